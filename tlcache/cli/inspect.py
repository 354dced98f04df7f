"""`tlcache inspect`: everything about one kernel."""

from __future__ import annotations

from typing import Any

import click

from tlcache.cli import ls, options, render
from tlcache.errors import UsageError
from tlcache.store import entry, layout, record
from tlcache.store.entry import Entry

__all__ = ["command"]


@click.command("inspect")
@click.argument("key")
@options.cache_dir
@options.json_output
def command(key: str, cache_dir: str | None, json_wanted: bool) -> int:
    """Show everything about one kernel.

    KEY is a kernel's key or its record's action key, or any prefix that only one of them has.
    """
    root = layout.cache_root(cache_dir)
    wanted = key.lower()
    found = [
        one
        for one in entry.scan(root)
        if one.place.key.startswith(wanted)
        or (one.record is not None and one.record.action_key.startswith(wanted))
    ]
    if not found:
        raise UsageError(
            f"no kernel in {root} has a key that begins with {key!r}",
            hint="`tlcache ls` lists the keys",
        )
    if len(found) > 1:
        keys = ", ".join(one.place.key[:16] for one in found[:5])
        raise UsageError(
            f"{len(found)} kernels have keys that begin with {key!r}: {keys}",
            hint="give more of the key",
        )
    one = found[0]
    sound = one.record is not None and record.sound_library(root, one.record) is not None
    if json_wanted:
        detail = one.record.to_json() if one.record else None
        render.emit_json(
            {
                "root": str(root),
                "entry": ls.as_json(one),
                "record": detail,
                "sound": sound if one.record else None,
            }
        )
        return 0
    for name, value in _facts(one, sound):
        click.echo(f"{name:<16}{value}")
    return 0


def _facts(one: Entry, sound: bool) -> list[tuple[str, Any]]:
    filed = one.record
    facts: list[tuple[str, Any]] = [
        ("key", one.place.key),
        ("path", one.place.path),
        ("kernel", one.kernel or "unknown"),
        ("backend", one.backend or "unknown"),
        ("tilelang", one.place.tilelang or "unknown"),
        ("platform", one.place.platform or "unknown"),
        ("library", one.library or "none"),
        ("size", render.size(one.bytes)),
        ("created", one.created.isoformat(timespec="seconds") if one.created else "unknown"),
        ("last used", f"{render.ago(one.last_used)}"),
    ]
    if filed is None:
        for index, bare in enumerate(one.params or ()):
            facts.append((f"param {index}", f"{bare.dtype} {_shape(bare.shape)}"))
        facts.append(
            ("record", "none: `tlcache warm` did not make it, so only TileLang can load it")
        )
        return facts
    spec = filed.spec
    facts += [
        ("factory", spec.kernel),
        ("workload", spec.workload_text),
        ("schedule", spec.schedule_text or "none"),
        ("target", spec.target),
    ]
    for index, param in enumerate(filed.launch.params):
        role = "out" if index in filed.launch.outputs else "in"
        facts.append((f"param {param.name}", f"{role}  {param.dtype} {_shape(param.shape)}"))
    facts += [
        ("calling", f"{filed.launch.abi}, {filed.launch.symbol}"),
        ("compiled in", render.duration(filed.compile_seconds)),
        ("nvcc", (filed.toolkit.get("nvcc") if spec.target.is_cuda else None) or "not used"),
        ("host compiler", filed.toolkit.get("host_compiler") or "none"),
        ("driver", filed.toolkit.get("driver") or "none"),
        ("tvm-ffi", filed.versions.get("tvm_ffi") or "unknown"),
        ("source digest", filed.source_digest),
        (
            "sha256",
            f"{filed.library.sha256}  {'matches' if sound else 'DOES NOT MATCH the library'}",
        ),
        ("record", filed.action_key),
        ("recorded", filed.created),
    ]
    return facts


def _shape(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"
