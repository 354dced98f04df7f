"""Which operators a model runs, and on which shapes, from its Hugging Face config.json.

The shapes are those of one rank of a serving engine, without rows: the norms, activations, rope,
router softmax and projections of the Llama, Mistral, Qwen and DeepSeek families. Attention itself,
and products that an engine does in batches (the absorbed half of MLA), are no operators here.

Invariant: a number comes from the config, or is the default that `transformers` has for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tlcache.models.config import Config, load
from tlcache.spec import Value

__all__ = ["FAMILIES", "Family", "Model", "Part", "Projections", "Rows", "read"]

Rows = Literal["tokens", "sequences", "routed"]
"""What a row of an operator is: a token; a sequence, of which only the last token matters; a token
that the router chose, whose number nobody knows beforehand.
"""
Projections = Literal["fused", "separate", "none"]


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are built.

    Attributes:
        latent: Attention through latent vectors (MLA) instead of heads of keys and values.
        head_norms: q and k are normalized head by head.
        experts: The field with the number of experts; None for dense models.
        expert_size: The field with the width of an expert.
        head_size: The size of a head where the config says none, and it is not hidden / heads.
        bias: q, k and v have one, where the config does not say.
        softmax: The router's scores are a softmax, where the config does not say.
    """

    latent: bool = False
    head_norms: bool = False
    experts: str | None = None
    expert_size: str = "moe_intermediate_size"
    head_size: int | None = None
    bias: bool = False
    softmax: bool = True


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts="num_local_experts", expert_size="intermediate_size"),
    "qwen2": Family(bias=True),
    "qwen2_moe": Family(bias=True, experts="num_experts"),
    "qwen3": Family(head_norms=True, head_size=128),
    "qwen3_moe": Family(head_norms=True, experts="num_experts"),
    "deepseek": Family(experts="n_routed_experts"),
    "deepseek_v2": Family(latent=True, experts="n_routed_experts"),
    "deepseek_v3": Family(latent=True, experts="n_routed_experts", softmax=False),
    "kimi_k2": Family(latent=True, experts="n_routed_experts", softmax=False),
}
"""By `model_type`. DeepSeek-R1 is a deepseek_v3, its distillates are a llama and a qwen2."""


@dataclass(frozen=True)
class Part:
    """One operator of a model, with the fields of its workload but M.

    Attributes:
        what: Its place in the model, like `q_norm`.
        op: The operator.
        values: The workload's other fields.
        rows: What a row is.
        times: Rows a token: 32 where each of 32 heads is one.
    """

    what: str
    op: str
    values: Mapping[str, Value]
    rows: Rows = "tokens"
    times: int = 1


@dataclass(frozen=True)
class Model:
    """A model's parts, and what is to be said about them.

    Attributes:
        kind: Its `model_type`.
        dtype: Of its activations.
        parts: In the order in which a token meets them.
        notes: Sentences for a person.
    """

    kind: str
    dtype: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


_PADDING = 64  # vLLM and SGLang pad a vocabulary to a multiple of it
_DTYPES = ("bfloat16", "float16", "float32")


def read(
    path: str | os.PathLike[str],
    *,
    ranks: int = 1,
    projections: Projections = "fused",
    dtype: str | None = None,
) -> Model:
    """Read a config.json.

    Args:
        path: The file, or a directory that has one.
        ranks: Into how many the model is split by tensor parallelism.
        projections: `fused` as serving engines have them (qkv, gate and up), `separate` as
            `transformers` has them, or `none`.
        dtype: Instead of the config's.

    Raises:
        ModelConfigError: It is missing, no config of a model that is known here, or says something
            impossible.
    """
    config = load(Path(path), FAMILIES)
    family = FAMILIES[config.kind]
    notes: list[str] = []
    chosen = dtype or _dtype(config, notes)
    shape = _Shape(config, family, ranks, projections, chosen)
    parts = tuple(shape.parts())
    if projections != "none" and config.get("quantization_config") is not None:
        notes.append(
            f"the model is quantized, and gemm multiplies {chosen}; "
            "`--projections none` leaves them out"
        )
    return Model(config.kind, chosen, parts, tuple(dict.fromkeys([*notes, *shape.notes])))


def _dtype(config: Config, notes: list[str]) -> str:
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(name)
    if value is None:
        notes.append("the config names no dtype; taken is bfloat16 (`--dtype` names another)")
        return "bfloat16"
    if value not in _DTYPES:
        raise config.wrong(name, f"known are {', '.join(_DTYPES)}; `--dtype` names another")
    return str(value)


class _Shape:
    """A rank's operators."""

    def __init__(
        self, config: Config, family: Family, ranks: int, projections: Projections, dtype: str
    ) -> None:
        self.config, self.family, self.ranks = config, family, ranks
        self.projections, self.dtype = projections, dtype
        self.hidden = config.size("hidden_size")
        self.heads = config.part(
            "num_attention_heads", config.size("num_attention_heads", 1024), ranks
        )
        self.eps = config.number("rms_norm_eps", 1e-6, 1.0)
        self.notes: list[str] = []

    def parts(self) -> Iterator[Part]:
        yield self._norm("input_norm", self.hidden)
        yield self._part("residual_norm", "fused_add_rms_norm", N=self.hidden, eps=self.eps)
        yield from self._latent() if self.family.latent else self._heads()
        yield from self._feed_forward()
        vocabulary = -(-self.config.size("vocab_size", 2**24) // _PADDING) * _PADDING
        share = self.config.part("vocab_size", vocabulary, self.ranks)
        yield from self._gemm("lm_head", share, self.hidden, rows="sequences")

    def _part(
        self, what: str, op: str, *, rows: Rows = "tokens", times: int = 1, **values: Value
    ) -> Part:
        return Part(what, op, {"dtype": self.dtype, **values}, rows, times)

    def _norm(self, what: str, size: int, times: int = 1) -> Part:
        return self._part(what, "rms_norm", N=size, eps=self.eps, times=times)

    def _gemm(self, what: str, n: int, k: int, rows: Rows = "tokens") -> Iterator[Part]:
        if self.projections != "none":
            yield self._part(what, "gemm", N=n, K=k, rows=rows)

    def _joined(self, k: int, rows: Rows = "tokens", /, **sizes: int) -> Iterator[Part]:
        """Projections of one input, which engines make one product: `q_proj` and so on."""
        if self.projections == "fused":
            yield from self._gemm("+".join(sizes), sum(sizes.values()), k, rows)
            return
        for what, size in sizes.items():
            yield from self._gemm(what, size, k, rows)

    def _heads(self) -> Iterator[Part]:
        """Attention by heads, of which several may share their keys and values."""
        config = self.config
        total = self.heads * self.ranks
        keys = config.size("num_key_value_heads", 1024, default=total)
        if total % keys:
            raise config.wrong("num_key_value_heads", f"it divides num_attention_heads, {total}")
        # Where there are more ranks than heads, several ranks have the same one.
        alone = self.ranks % keys == 0
        keys = 1 if alone else config.part("num_key_value_heads", keys, self.ranks)
        size = self._head_size(total)
        yield from self._joined(
            self.hidden, q_proj=self.heads * size, k_proj=keys * size, v_proj=keys * size
        )
        biased = config.get("attention_bias") is True or self.family.bias
        if biased and self.projections != "none":
            self.notes.append("q, k and v have a bias, which gemm does not add")
        if self.family.head_norms:
            yield self._norm("q_norm", size, self.heads)
            yield self._norm("k_norm", size, keys)
        turned = int(size * config.number("partial_rotary_factor", 1.0, 1.0))
        if turned < 2:
            raise config.wrong(
                "partial_rotary_factor", f"it leaves a pair of a head's {size} elements to turn"
            )
        for what, count in (("q_rope", self.heads), ("k_rope", keys)):
            yield self._part(what, "rope", H=count, D=turned)
        yield from self._gemm("o_proj", self.hidden, self.heads * size)

    def _head_size(self, heads: int) -> int:
        named = self.config.get("head_dim") is not None
        if not named and self.family.head_size is None and self.hidden % heads:
            raise self.config.wrong(
                "hidden_size", f"num_attention_heads, {heads}, divides it where head_dim is missing"
            )
        return self.config.size("head_dim", 1024, self.family.head_size or self.hidden // heads)

    def _latent(self) -> Iterator[Part]:
        """DeepSeek's attention: queries, keys and values come from short vectors."""
        config = self.config
        plain, turned = config.size("qk_nope_head_dim", 1024), config.size("qk_rope_head_dim", 1024)
        queries, latent = self.heads * (plain + turned), config.size("kv_lora_rank")
        values = self.heads * config.size("v_head_dim", 1024)
        if config.get("q_lora_rank") is None:
            yield from self._gemm("q_proj", queries, self.hidden)
            yield from self._gemm("kv_a_proj", latent + turned, self.hidden)
        else:
            rank = config.size("q_lora_rank")
            yield from self._joined(self.hidden, q_a_proj=rank, kv_a_proj=latent + turned)
            yield self._norm("q_a_norm", rank)
            yield from self._gemm("q_b_proj", queries, rank)
        yield self._norm("kv_a_norm", latent)
        yield from self._gemm("kv_b_proj", self.heads * plain + values, latent)
        pairs = config.get("rope_interleave")
        if not isinstance(pairs, bool) and pairs is not None:
            raise config.wrong("rope_interleave", "it is true or false")
        for what, count in (("q_rope", self.heads), ("k_rope", 1)):
            yield self._part(what, "rope", H=count, D=turned, interleaved=pairs is not False)
        yield from self._gemm("o_proj", self.hidden, values)

    def _feed_forward(self) -> Iterator[Part]:
        config, family = self.config, self.family
        experts = config.count(family.experts) if family.experts is not None else 0
        if not experts or self._some_dense():
            yield from self._gated("", "intermediate_size", 1, "tokens")
        if not experts:
            return
        yield from self._gemm("router", experts, self.hidden)
        scores = config.get("scoring_func")
        if scores == "softmax" or (scores is None and family.softmax):
            yield Part("router_softmax", "softmax", {"dtype": "float32", "N": experts})
        if config.get("shared_expert_intermediate_size") is not None:
            yield from self._gated("shared_", "shared_expert_intermediate_size", 1, "tokens")
        elif shared := config.count("n_shared_experts"):
            yield from self._gated("shared_", family.expert_size, shared, "tokens")
        yield from self._gated("expert_", family.expert_size, 1, "routed")

    def _some_dense(self) -> bool:
        """Whether some layers of a model with experts have none."""
        config = self.config
        if config.kind.startswith("qwen"):
            step = config.size("decoder_sparse_step", default=1)
            return step > 1 or bool(config.get("mlp_only_layers"))
        return bool(config.count("first_k_dense_replace"))

    def _gated(self, prefix: str, field: str, times: int, rows: Rows) -> Iterator[Part]:
        """Gate and up, their activation, and down."""
        size = self.config.part(field, self.config.size(field, 262144) * times, self.ranks)
        names = {f"{prefix}gate_proj": size, f"{prefix}up_proj": size}
        yield from self._joined(self.hidden, rows, **names)
        act = self.config.get("hidden_act")
        if act in (None, "silu", "swish"):
            yield self._part(f"{prefix}activation", "silu_and_mul", N=size, rows=rows)
        else:
            self.notes.append(f"hidden_act is {str(act)[:40]!r}, for which there is no operator")
        yield from self._gemm(f"{prefix}down_proj", self.hidden, size, rows)
