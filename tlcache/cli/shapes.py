"""`tlcache shapes`: a shapes.json from a model's config."""

from __future__ import annotations

import os
import shlex

import click

from tlcache.cli import render
from tlcache.errors import UsageError
from tlcache.models import document, parts
from tlcache.models.document import ModelShapes
from tlcache.spec import workload_text
from tlcache.store.files import write_atomically

__all__ = ["command"]

_LARGEST, _DIGITS = 2**24, 8


def _numbers(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    found = []
    for word in (text or "").replace(",", " ").split():
        sound = word.isascii() and word.isdigit() and len(word) <= _DIGITS
        if not (sound and 1 <= int(word) <= _LARGEST):
            raise UsageError(
                f"--{option.name} has {word!r}; it takes whole numbers from 1 to {_LARGEST}",
                hint=f"`--{option.name} 1,2,4`",
            )
        found.append(int(word))
    return tuple(found)


@click.command("shapes")
@click.option(
    "--from-hf",
    "config",
    required=True,
    metavar="FILE",
    help="A Hugging Face config.json, or a directory that has one.",
)
@click.option(
    "--batch",
    metavar="N,N",
    callback=_numbers,
    help="Sequences decoded at a time: a row each, like 1,2,4.",
)
@click.option(
    "--prompt",
    metavar="N,N",
    callback=_numbers,
    help="Lengths of prompts: batch times prompt rows, like 128,2048.",
)
@click.option("--exact", is_flag=True, help="Leave out the kernels that take any number of rows.")
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Ranks that share the model by tensor parallelism; the shapes are those of one.",
)
@click.option(
    "--projections",
    type=click.Choice(["fused", "separate", "none"]),
    default="fused",
    show_default=True,
    help="q, k, v in one product, and gate and up, as serving engines do; or apart, or none.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Instead of the config's.",
)
@click.option("-o", "--output", metavar="FILE", help="Write them here, and show what they are for.")
def command(
    config: str,
    batch: tuple[int, ...],
    prompt: tuple[int, ...],
    exact: bool,
    tp: int,
    projections: parts.Projections,
    dtype: str | None,
    output: str | None,
) -> int:
    """Write a shapes.json for the model of a Hugging Face config.json.

    It has the norms, activations, rope, router softmax and projections of Llama, Mistral, Qwen and
    DeepSeek models. Each gets a kernel for any number of rows, and one for each number of rows that
    `--batch` and `--prompt` make.
    """
    model = parts.read(config, ranks=tp, projections=projections, dtype=dtype)
    made = document.make(model, batch, prompt, exact=exact)
    if output is None:
        click.echo(made.text, nl=False)
    else:
        _write(made, output)
        _show(made, model, output)
    for sentence in model.notes:
        render.note(f"note: {render.plain(sentence)}")
    for sentence in made.left_out:
        render.note(f"left out: {sentence}")
    if output is not None:
        render.note(
            f"\nhint: `tlcache warm --shapes {shlex.quote(output)} --target sm90` compiles them"
        )
    return 0


def _write(made: ModelShapes, output: str) -> None:
    try:
        write_atomically(os.path.abspath(output), made.text.encode())
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="name another file with `-o`, or leave it out to have them on stdout",
        ) from error


def _show(made: ModelShapes, model: parts.Model, output: str) -> None:
    rows = [
        [
            line.op,
            workload_text(line.values),
            " ".join(map(str, line.rows)),
            ", ".join(line.parts),
        ]
        for line in made.lines
    ]
    render.table(["OPERATOR", "SHAPE", "ROWS (M)", "WHERE"], rows)
    render.note(f"{render.count(made.kernels, 'kernel')} a target for {model.kind}, in {output}")
