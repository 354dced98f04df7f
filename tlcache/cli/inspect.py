"""`tlcache inspect`: everything about one entry."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.errors import KernelError, UsageError
from tlcache.store import calls, described, entry, layout, roots, scan, select, sources
from tlcache.store.entry import Entry
from tlcache.store.record import Record

__all__ = ["command"]


@click.command("inspect")
@click.argument("key")
@options.cache_dir
@click.option(
    "--source",
    "side",
    type=click.Choice(sources.SIDES),
    help="Write the source of that side, and nothing else.",
)
@click.option("--sass", is_flag=True, help="Write the device code, disassembled.")
@options.json_output
def command(
    key: str, cache_dir: str | None, side: str | None, sass: bool, json_wanted: bool
) -> int:
    """Show everything about one kernel.

    KEY is a kernel's key or its record's action key, or any prefix that only one of them has; with
    a directory before it where several roots or versions have the same. What `ls --all` lists
    besides kernels has keys, too.
    """
    places = roots.chain(cache_dir)
    root, known = places[0], list(scan.scan_all(places))
    one = select.called(known, key, root)
    if side is not None and sass:
        raise UsageError("--source and --sass exclude each other", hint="ask twice")
    if side is not None:
        return _write_source(one, side, json_wanted)
    if sass:
        from tlcache.cli import disassembly

        _write_text("kernel.sass", disassembly.sass(one).encode(), json_wanted)
        return 0
    related = _related(one, known)
    filed, sound = scan.record_of(one), scan.sound(one)
    if json_wanted:
        kernel = one.place.kind == "kernel"
        render.emit_json(
            {
                "root": str(root),
                "entry": described.as_json(one),
                "record": filed.to_json() if filed else None,
                "sound": sound if filed else None,
                "kernels": [kernel._asdict() for kernel in one.facts.kernels],
                "cuda_binaries": [made.place.location for made in related if kernel],
                "made": [made.place.location for made in related if not kernel],
                "code": select.code_of(one),
                "files": dict(_files(one)),
            }
        )
        return 0
    for name, value in _facts(one, related, filed, sound):
        click.echo(f"{name:<16}{render.plain(str(value))}")
    return 0


def _related(one: Entry, known: list[Entry]) -> list[Entry]:
    """The cuda-binaries that a kernel was made from, or the kernels that were made from one."""
    if one.place.kind == "cuda-binary":
        return [
            made
            for made in known
            if made.payload == one.payload and one.payload and made.place.kind == "kernel"
        ]
    return entry.cuda_binaries(known).get(one.payload or "", [])


def _files(one: Entry) -> list[tuple[str, int]]:
    """The names and sizes of its files."""
    if not os.path.isdir(one.place.location):
        return [(os.path.basename(one.place.location), one.bytes)]
    found = []
    for name in sorted(entry.listing(one.place).names):
        try:
            found.append((name, os.lstat(f"{one.place.location}/{name}").st_size))
        except OSError:
            pass  # it has vanished
    return found


def _write_source(one: Entry, side: str, json_wanted: bool) -> int:
    told = sources.read(one, side)
    if told is None:
        raise KernelError(
            f"{one.place.key[:12]} holds no source of the {side}'s side",
            hint=f"`tlcache inspect {one.place.key[:12]}` shows its files",
        )
    _write_text(told.name, told.data, json_wanted)
    return 0


def _write_text(name: str, data: bytes, json_wanted: bool) -> None:
    """Write a source: in a pipe its bytes as they are, on a terminal highlighted, and without
    what would move the cursor.
    """
    if json_wanted:
        render.emit_json({"name": name, "text": data.decode("utf-8", "replace")})
        return
    if not sys.stdout.isatty():
        click.echo(data, nl=False)
        return
    lines = data.decode("utf-8", "replace").expandtabs(4).splitlines()
    text = "\n".join(map(render.plain, lines))
    if not render.styled():
        click.echo(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    language = {".py": "python", ".sass": "gas"}.get(os.path.splitext(name)[1], "cuda")
    shown = Syntax(text, language, background_color="default", word_wrap=True)
    Console(highlight=False).print(shown)


def _facts(
    one: Entry, related: list[Entry], filed: Record | None, sound: bool
) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = [
        ("key", one.place.key),
        ("path", one.place.path),
        ("kind", described.KINDS.get(one.place.kind, one.place.kind)),
        ("kernel", one.kernel or "unknown"),
        ("backend", one.backend or "unknown"),
        ("tilelang", one.place.tilelang or "unknown"),
        ("platform", one.place.platform or "unknown"),
        ("library", one.library or "none"),
        ("size", render.size(one.bytes)),
        ("created", one.created.isoformat(timespec="seconds") if one.created else "unknown"),
        ("last used", f"{render.ago(one.last_used)}"),
        ("machine", one.facts.host or "unknown"),
    ]
    for kernel in one.facts.kernels:
        registers = "unknown" if kernel.registers is None else kernel.registers
        facts.append(
            ("device code", f"{kernel.name}  {registers} registers, {kernel.shared} B shared")
        )
    joined = "made" if one.place.kind == "cuda-binary" else "cuda-binary"
    facts += [(joined, other.place.key) for other in related]
    facts += _bare(one) if filed is None else _recorded(filed, sound)
    facts.append(("code", select.code_of(one) or "unknown"))
    facts += [("file", f"{name}  {render.size(size)}") for name, size in _files(one)]
    return facts


def _bare(one: Entry) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = [("target", one.target or "unknown")]
    facts.append(("toolkit", one.facts.toolkit or "unknown"))
    for index, bare in enumerate(one.params or ()):
        facts.append((f"param {index}", f"{bare.dtype} {_shape(bare.shape)}"))
    if one.place.kind == "kernel":
        facts.append(("record", f"none: {_without_record(one)}"))
    return facts


def _without_record(one: Entry) -> str:
    """How processes get a kernel that has no record."""
    path = os.fspath(one.place.path)
    held = layout.holding(os.path.join(path, "a file"))
    if held is not None and os.path.relpath(path, held[0]) in calls.uses(held[0]):
        return "it is restored by what its call means"
    return "only TileLang itself can load it"


def _recorded(filed: Record, sound: bool) -> list[tuple[str, Any]]:
    spec = filed.spec
    facts: list[tuple[str, Any]] = [
        ("factory", spec.kernel),
        ("workload", spec.workload_text),
        ("schedule", spec.schedule_text or "none"),
        ("target", spec.target),
    ]
    facts += [(f"pass {name}", value) for name, value in spec.pass_configs.items()]
    if spec.compile_flags:
        facts.append(("flags", " ".join(spec.compile_flags)))
    for index, param in enumerate(filed.launch.params):
        role = "out" if index in filed.launch.outputs else "in"
        facts.append((f"param {param.name}", f"{role}  {param.dtype} {_shape(param.shape)}"))
    nvcc = filed.toolkit.get("nvcc") if spec.target.is_cuda else None
    matches = "matches" if sound else "DOES NOT MATCH the library"
    return [
        *facts,
        ("calling", f"{filed.launch.abi}, {filed.launch.symbol}"),
        ("compiled in", render.duration(filed.compile_seconds)),
        ("nvcc", nvcc or "not used"),
        ("host compiler", filed.toolkit.get("host_compiler") or "none"),
        ("driver", filed.toolkit.get("driver") or "none"),
        ("tvm-ffi", filed.versions.get("tvm_ffi") or "unknown"),
        ("source digest", filed.source_digest),
        ("sha256", f"{filed.library.sha256}  {matches}"),
        ("record", filed.action_key),
        ("recorded", filed.created),
    ]


def _shape(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"
