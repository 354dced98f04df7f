"""Why the kernel of a program's own call would be traced at the next start: which one thing, had
it been different, would have had it restored.

What the call is asked for by, only a process with the program in it can tell (`warm/questions.py`);
here that is compared with the calls that are filed, as `why.py` compares specs with records.

Invariant: a cause is told only if it is so. Where a key differs and nothing that is kept of it
does, that is what is told.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tlcache import fingerprint
from tlcache.spec import KernelSpec
from tlcache.store import calls, files, layout, record
from tlcache.store.answers import Answer, Style
from tlcache.warm.outcome import Asked, Outcome
from tlcache.why import Cause, Difference, Kind, Reader, family

__all__ = ["Calls"]


class Calls:
    """Finds the causes of calls.

    Args:
        roots: The roots in force.
        reader: The records of these.
    """

    def __init__(self, roots: Sequence[str | os.PathLike[str]], reader: Reader) -> None:
        self._roots = [os.path.abspath(root) for root in roots]
        self._reader = reader
        self._filed: dict[tuple[str, frozenset[str]], list[tuple[str, Answer]]] = {}

    def cause(self, spec: KernelSpec, outcome: Outcome, recorded: str | None = None) -> Cause:
        """Why the kernel of a spec is restored or not.

        Args:
            spec: The kernel.
            outcome: What a worker told of its call.
            recorded: TileLang's key for it, where a recording tells it.
        """
        key, asked = spec.action_key(), outcome.asked
        if asked is None:
            told = (outcome.error or "unknown").splitlines()[0]
            return Cause(spec, key, "failed", told, hint=outcome.hint)
        if asked.key is None:
            there = self._is_compiled(spec, recorded if asked.recorded else None)
            told = f"TileLang traces it at each start: {asked.reason}"
            if not there:
                told += (
                    "; and its cache lacks it, so that it is compiled then"
                    if there is not None
                    else "; whether its cache has it is not known"
                )
            return Cause(spec, key, "not restorable", told, loadable=there)
        found = self._found(spec, asked) or self._missing(spec, asked, recorded)
        if found.kind != "hit" and recorded is not None and not asked.recorded:
            return replace(found, hint=_ANEW)
        return found

    def _is_compiled(self, spec: KernelSpec, made: str | None) -> bool | None:
        """Whether TileLang's cache has the kernel, if that can be told; `made` is TileLang's key
        for it, if known.
        """
        if made is not None:
            here = (fingerprint.tilelang_version(), fingerprint.platform_name())
            place = os.path.join(layout.namespace(*here), "kernels", made)
            return any(os.path.isdir(os.path.join(root, place)) for root in self._roots)
        for root in self._roots:
            warmed = calls.read_warmed(root, spec.action_key())
            if warmed is not None:
                return record.sound_library(root, warmed) is not None
        return True if self._reader.cause(spec).kind == "hit" else None

    # --- the roots ---

    def _found(self, spec: KernelSpec, asked: Asked) -> Cause | None:
        """What became of the call, in the first root from which it is restored, else in the first
        that knows of it; None where none does.
        """
        first: Cause | None = None
        for root in self._roots:
            told = self._at(root, spec, asked)
            if told is not None and told.kind == "hit":
                return told if root == self._roots[0] else replace(told, root=root)
            first = first or told
        return first

    def _at(self, root: str, spec: KernelSpec, asked: Asked) -> Cause | None:
        """What became of the call there; None where none is filed."""
        assert asked.key is not None
        key = spec.action_key()
        answer = _file(root, asked.key, "call")
        if answer is None:
            return None
        if isinstance(answer, str):
            return Cause(spec, key, "damaged", answer)
        assert isinstance(answer, Answer)
        if record.sound_library(root, answer) is None:
            return self._reader.without_library(root, spec, answer, "its call")
        styles = [_file(root, asked.front, "style") for root in self._roots]
        sound = not asked.styled or any(isinstance(style, Style) for style in styles)
        style = answer if sound else next(filter(None, styles), None)
        if style is None:
            told = f"how its function is called is not filed any more in {self._shown()}"
            return Cause(spec, key, "vanished", told)
        if isinstance(style, str):
            return Cause(spec, key, "damaged", style)
        return Cause(spec, key, "hit", "it is there")

    # --- no call of this key ---

    def _missing(self, spec: KernelSpec, asked: Asked, recorded: str | None) -> Cause:
        key = spec.action_key()
        made = recorded if asked.recorded else None
        gone = self._reader.eviction(key, made)
        if gone is not None and not self._is_compiled(spec, made):
            return Cause(spec, key, "evicted", gone)
        if not any(map(os.path.isdir, self._roots)):
            return Cause(spec, key, "no record", f"there is no cache root {self._shown()}")
        kernels = frozenset({spec.kernel, asked.kernel})
        filed = [(root, *one) for root in self._roots for one in self._answers(root, kernels)]
        near = [
            (differences, name, answer, root)
            for root, name, answer in filed
            if (differences := _differences(answer, asked, spec)) is not None
        ]
        if not near:
            answers = [answer for *_, answer in filed]
            return Cause(spec, key, "no record", self._none(spec, asked, answers, made))
        differences, name, answer, root = min(near, key=lambda one: (_weight(one[0]), one[1]))
        loadable = record.sound_library(root, answer) is not None
        told = "; ".join(map(_sentence, differences)) or (
            "its key is another one than that of the call that is filed, though nothing that is "
            "told apart differs: something else that it reaches does, as an object, the GPU that "
            "it asks for, or a variable or file that it looks at"
        )
        if not loadable:
            told += "; the library of that call is not there, or not sound"
        kind: Kind = differences[0].kind if differences else "unknown"
        return Cause(spec, key, kind, told, tuple(differences), name, root, loadable)

    def _none(
        self,
        spec: KernelSpec,
        asked: Asked,
        filed: Sequence[Answer],
        made: str | None,
    ) -> str:
        if filed:
            given = sorted({_given(answer, spec) for answer in filed})
            shown = ", ".join(given[:3]) + (" …" if len(given) > 3 else "")
            return f"no call with these arguments is filed; there are {shown}"
        told = f"no call of {asked.kernel} is filed in {self._shown()}"
        if self._is_compiled(spec, made):
            told += "; its library is in TileLang's cache, which finds it by tracing"
        return told

    def _shown(self) -> str:
        return " or ".join(self._roots)

    def _answers(self, root: str, kernels: frozenset[str]) -> list[tuple[str, Answer]]:
        """The sound calls of a factory, with their keys."""
        known = self._filed.get((root, kernels))
        if known is None:
            known = self._filed[root, kernels] = list(_read(root, kernels))
        return known


_ANEW = (
    "its recording is of another kernel than its function makes now: "
    "`tlcache run --record FILE -- COMMAND` records it anew"
)


def _file(root: str, key: str, what: str) -> Answer | Style | str | None:
    """What a file of calls holds; a sentence where it is damaged, None where it is not there."""
    path = calls.path_of(root, key)
    told = "its call" if what == "call" else "what tells how its function is called,"
    try:
        name, found = calls.decode(files.read(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return f"{told} {path} cannot be read: {reason}"
    except ValueError:
        return f"{told} {path} fails its checksum"
    if name != key or not isinstance(found, Answer if what == "call" else Style):
        return f"{told} {path} is another file's"
    return found


def _read(root: str, kernels: frozenset[str]) -> Iterator[tuple[str, Answer]]:
    needles = [json.dumps(kernel).encode() for kernel in kernels]
    for key, path in calls.all_of(root):
        try:
            data = files.read(path)
            if any(needle in data for needle in needles):
                name, found = calls.decode(data)
                if isinstance(found, Answer) and name == key and found.kernel in kernels:
                    yield key, found
        except (OSError, ValueError):
            pass  # it is a miss, too


# --- comparing ---

_GIVEN = ("argument ", "constant ")
_VERSIONS: tuple[tuple[Kind, str], ...] = (
    ("tilelang", "tilelang"),
    ("tvm-ffi", "tvm_ffi"),
    ("platform", "platform"),
)
_KINDS: Mapping[str, Kind] = {
    "host": "target spelling",
    "backend": "backend",
    "out_idx": "output indices",
    "pass configs": "pass configs",
    "compile flags": "compile flags",
    "python": "python",
}


def _differences(answer: Answer, asked: Asked, spec: KernelSpec) -> list[Difference] | None:
    """In which ingredients of its key a call differs, the weightiest first; None where it is one of
    another workload.
    """
    there, here = answer.ingredients, asked.made_of
    said = {*spec.workload, *spec.schedule}
    apart = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    given = [name for name in apart if name.startswith(_GIVEN)]
    if any(name.startswith("constant ") or _bare(name) in said for name in given):
        return None
    if any(_is_closure(name, spec) for name in apart):
        return None
    versions = fingerprint.versions()
    found = [
        Difference(kind, answer.versions.get(name, "unknown"), versions[name])
        for kind, name in _VERSIONS
        if answer.versions.get(name) != versions[name]
    ]
    both = [name for name in apart if name in here and name in there]
    for head in ("value ", "function "):
        found += [
            Difference("source", f"{name} {there[name]}", f"{name} {here[name]}")
            for name in both
            if name.startswith(head)
        ]
    found += [
        Difference("default", f"{name[9:]}={there.get(name)}", f"{name[9:]}={here.get(name)}")
        for name in given
    ]
    if there.get("target") != here.get("target"):
        one, other = there.get("target", answer.target), here.get("target", spec.target.name)
        same = family(one) == family(other)
        found.append(Difference("target spelling" if same else "other target", one, other))
    elif "host" in both:
        found.append(Difference("target spelling", there["host"], here["host"]))
    found += [
        Difference(_KINDS[name], there[name], here[name])
        for name in both
        if name in _KINDS and name != "host"
    ]
    variables = [name for name in apart if name.startswith("variable ")]
    for name in variables:
        now = name.replace("variable start ", "variable ")  # as of the process's start
        if now == name or now not in variables:
            found.append(Difference("variable", _set(name, there), _set(name, here)))
    return found


def _given(answer: Answer, spec: KernelSpec) -> str:
    """What a call was given, like `n=8 bias=1.0`."""
    given = [
        f"{_bare(name)}={value}"
        for name, value in answer.ingredients.items()
        if name.startswith(_GIVEN) or _is_closure(name, spec)
    ]
    return " ".join(given) or answer.title


def _bare(name: str) -> str:
    return re.split(r"[ .]", name)[-1]


def _is_closure(name: str, spec: KernelSpec) -> bool:
    """Whether a value is what the function around a kernel's was given."""
    return name.startswith("value ") and ":" in name and _bare(name) in spec.workload


def _set(name: str, values: Mapping[str, str]) -> str:
    bare = name.removeprefix("variable ")
    return f"{bare}={values[name]}" if name in values else f"{bare} not set"


def _weight(differences: Sequence[Difference]) -> int:
    far = any(one.kind == "other target" for one in differences)
    return len(differences) + (100 if far else 0)


def _sentence(one: Difference) -> str:
    if one.kind == "source":
        what, _, rest = one.there.partition(" ")
        name, _, value = rest.partition(" ")
        if what == "function":
            return f"{name} has changed"
        here = one.here.removeprefix(f"{what} {name} ")
        if _digests(value, here):
            return f"{name} has changed"
        return f"{name} was {value} and is {here}"
    return _NAMED[one.kind].format(one.there, one.here)


def _digests(*values: str) -> bool:
    return all(len(value) == 12 and set(value) <= set("0123456789abcdef") for value in values)


_NAMED: Mapping[Kind, str] = {
    "tilelang": "it was compiled by TileLang {0}, and {1} is installed",
    "tvm-ffi": "it was compiled with tvm-ffi {0}, and {1} is installed",
    "platform": "it was compiled on {0}, and this is {1}",
    "python": "it was called by the Python {0}, and this is {1}",
    "variable": "it was compiled with {0}, and here it is {1}",
    "default": "its call had {0}, which is {1} now",
    "target spelling": "it was compiled for {0}, and is asked for {1}",
    "other target": "it was compiled only for {0}, and {1} is asked for",
    "output indices": "it was compiled with out_idx={0}, and is asked for with {1}",
    "pass configs": "it was compiled with the pass configs {0}, and is asked for with {1}",
    "compile flags": "it was compiled with the flags {0}, and is asked for with {1}",
    "backend": "it was compiled for the backend {0}, and is asked for by {1}",
}
