"""A Hugging Face config.json, each field checked when it is asked for.

Invariant: a field that is missing or absurd is one ModelConfigError that names the file, the field
and its value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tlcache.errors import ModelConfigError

__all__ = ["Config", "load"]

_MOST_BYTES = 16 * 1024 * 1024  # quantized models list their layers; no config has a tenth of it
_WIDEST = 65536


class Config:
    """The fields of a config, each checked when it is asked for."""

    def __init__(self, path: Path, fields: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._fields, self._prefix = path, fields, prefix
        self.kind = str(fields["model_type"])

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def wrong(self, name: str, reason: str) -> ModelConfigError:
        """The error about a field, with its value."""
        if name not in self._fields:
            said = "is missing"
        else:
            shown = json.dumps(self._fields[name], default=str)
            said = f"is {shown if len(shown) <= 60 else shown[:57] + '...'}"
        return ModelConfigError(f"{self._path}: {self._prefix}{name} {said}; {reason}", hint=_HINT)

    def size(self, name: str, most: int = _WIDEST, default: int | None = None) -> int:
        """A whole number from 1 on; null is as good as missing."""
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(name, f"it is a whole number from 1 to {most}")
        return value

    def count(self, name: str) -> int:
        """A whole number that may be 0, as it is where the field is missing."""
        return 0 if self._fields.get(name) in (None, 0) else self.size(name)

    def number(self, name: str, default: float, most: float) -> float:
        """A number above 0."""
        value = self._fields.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(name, f"it is a number above 0, of at most {most:g}")
        return float(value)

    def part(self, name: str, value: int, ranks: int) -> int:
        """A rank's share of something that the ranks divide."""
        if value % ranks:
            raise self.wrong(name, f"{ranks} ranks (`--tp`) do not divide {value}")
        return value // ranks


_HINT = "give the model's own config.json, as `transformers` writes it"


def load(path: Path, known: Collection[str]) -> Config:
    """Read a config.json; of a model that sees or hears, the part that writes.

    Args:
        path: The file, or a directory that has one.
        known: The values of `model_type` that will do.

    Raises:
        ModelConfigError: It is missing, no JSON object, or of another `model_type`.
    """
    file = path / "config.json" if path.is_dir() else path
    text = _read(path, file)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{file} is not a JSON object", hint=_HINT)
    if _is(fields, known):
        return Config(file, fields)
    inner = fields.get("text_config")
    if isinstance(inner, dict) and _is(inner, known):
        return Config(file, inner, "text_config.")
    kind = fields.get("model_type")
    shown = "missing" if kind is None else json.dumps(kind, default=str)[:60]
    raise ModelConfigError(
        f"{file}: model_type is {shown}; known are {', '.join(known)}",
        hint="write its workloads by hand, as examples/llama3-8b.json does, or record them: "
        "`tlcache record`",
    )


def _read(path: Path, file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        named = str(path)
        if named.count("/") == 1 and named[0] not in "./~" and not path.is_dir():
            raise ModelConfigError(
                f"there is no file {named}, and nothing is downloaded here",
                hint=f"if it is a model on the hub: `hf download {named} config.json "
                "--local-dir DIR`, then `--from-hf DIR`",
            ) from error
        raise ModelConfigError(
            f"there is no {file}", hint="`--from-hf` takes a config.json, or a directory with one"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ModelConfigError(f"{file} cannot be read: {reason}", hint=_HINT) from error
    if len(text) > _MOST_BYTES:
        raise ModelConfigError(
            f"{file} has more than {_MOST_BYTES >> 20} MiB; it is no config.json", hint=_HINT
        )
    return text


def _is(fields: Mapping[str, Any], known: Collection[str]) -> bool:
    kind = fields.get("model_type")
    return isinstance(kind, str) and kind in known
