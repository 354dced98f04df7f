"""A small transformer with `ops.RMSNorm`: prefill, then decode. Run it twice; it says what each
start cost.

    python examples/serve.py                     # the first start compiles
    python examples/serve.py                     # the second one loads what the first one compiled
    python examples/serve.py --rows exact        # one kernel a row count, as the three-layer design
    has it

With a GPU it runs there, else on the CPU.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402 -- the clock starts before the imports, which are part of a start
import json  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import ops  # noqa: E402
from tlcache import runtime  # noqa: E402


class Block(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm; keys and values are cached for
    decoding.
    """

    def __init__(self, width: int, heads: int, rows: str) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = ops.RMSNorm(width, 1e-5, rows=rows)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = ops.RMSNorm(width, 1e-5, rows=rows)
        self.up = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens, width = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x)).view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(0, 1).reshape(tokens, width))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), (k, v)


class Transformer(nn.Module):
    """Blocks of two RMSNorms each, over an embedding that is also the output layer."""

    def __init__(self, blocks: int, width: int, heads: int, vocabulary: int, rows: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, rows) for _ in range(blocks))

    def forward(self, tokens: Tensor, past: list) -> tuple[Tensor, list]:
        x = self.embedding(tokens)
        kept = []
        for block, before in zip(self.blocks, past, strict=True):
            x, after = block(x, before)
            kept.append(after)
        return x[-1] @ self.embedding.weight.T, kept

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int) -> list[int]:
        """Prefill with the prompt, then decode greedily."""
        scores, past = self(prompt, [None] * len(self.blocks))
        answer = [int(scores.argmax())]
        while len(answer) < count:
            scores, past = self(prompt.new_tensor(answer[-1:]), past)
            answer.append(int(scores.argmax()))
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128, help="tokens to prefill (M = PROMPT)")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to decode (M = 1)")
    parser.add_argument("--rows", choices=("auto", "exact", "dynamic"), default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    model = Transformer(arguments.blocks, arguments.width, 8, 4096, arguments.rows)
    model = model.to(device="cuda" if cuda else "cpu", dtype=torch.bfloat16).eval()
    prompt = torch.randint(4096, (arguments.prompt,), device="cuda" if cuda else "cpu")
    imported = time.perf_counter()
    answer = model.generate(prompt, arguments.tokens)
    first = time.perf_counter()
    model.generate(prompt, arguments.tokens)
    second = time.perf_counter()

    counters = runtime.counters()
    result = {
        "imports_and_weights_s": imported - STARTED,
        "first_answer_s": first - imported,
        "second_answer_s": second - first,
        "kernels_compiled": counters.compiled,
        "kernels_restored": counters.restored,
        "tilelang_disk_hits": counters.disk,
        "compiling_saved_s": counters.saved_seconds,
        "tilelang_imported": "tilelang" in sys.modules,
        "answer": answer,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"answer            {answer}")
    print(f"imports, weights  {result['imports_and_weights_s']:.2f} s")
    print(f"first answer      {result['first_answer_s']:.2f} s")
    print(f"second answer     {result['second_answer_s']:.2f} s")
    print(
        f"kernels           {counters.compiled} compiled, {counters.restored} restored in "
        f"{counters.restore_seconds * 1e3:.1f} ms"
        f" (that saved {counters.saved_seconds:.1f} s of compiling)"
    )
    print(f"TileLang          {'imported' if result['tilelang_imported'] else 'not imported'}")


if __name__ == "__main__":
    main()
