"""The digest of the source that a kernel's factory reaches, taken without importing the factory.

Invariant: an edit that can change the kernel changes the digest; comments, docstrings, layout and
code that the factory does not reach leave it alone. It is the same on Python 3.10 to 3.13, whatever
the working directory, and it is read from source text, so neither TileLang nor torch is imported
for it.

From the factory's definition every name is followed: functions, classes and constants of its
module, and what it imports from modules outside the standard library, torch and TileLang. Installed
packages of others count by their version. Statements of a module that define nothing (calls, loops)
always count. What is looked up by a computed name (`getattr`, `importlib`) cannot be seen; a
factory must not depend on it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tlcache import modules
from tlcache.errors import FactoryError

__all__ = ["ALGORITHM", "Closure", "adopt", "adopt_all", "canonical", "closure"]
__all__ += ["factory_digest"]

ALGORITHM = 1
"""Version of the digest; to be raised when the same source gives another one (a test knows)."""

_EXTERNAL = frozenset({"torch", "tilelang", "tvm", "tvm_ffi", "__future__"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "lineno", "col_offset"})


class Closure(NamedTuple):
    """What a factory reaches.

    Attributes:
        kernel: The factory's import path.
        digest: The sha256 of its canonical source, as hexadecimal text.
        sources: Module names to the sha256 of the files that were read.
        absent: Modules that were looked for and are not there.
        externals: Top-level packages that count by version, and how each counts.
    """

    kernel: str
    digest: str
    sources: dict[str, str]
    absent: list[str]
    externals: dict[str, str]


_known: dict[str, Closure] = {}


def factory_digest(kernel: str) -> str:
    """The sha256 of everything that the factory `pkg.module:name` reaches, as hexadecimal text.

    Computed once in a process: a running process cannot exchange the source of what it has
    imported.

    Raises:
        FactoryError: There is no such module or name, or its source cannot be read.
    """
    return closure(kernel).digest


def closure(kernel: str) -> Closure:
    """Everything that the factory `pkg.module:name` reaches; see `factory_digest`."""
    found = _known.get(kernel)
    if found is None:
        try:
            found = _known[kernel] = _walked(kernel)
        except RecursionError as error:
            raise FactoryError(f"the source of {kernel} is nested too deeply to be read") from error
    return found


def adopt(remembered: Closure) -> bool:
    """Take a closure that was computed earlier, if computing it now would give the same.

    It would if every file that was read has the same bytes, what was absent still is, and the
    packages that count by version have the same versions.
    """
    return adopt_all([remembered])


def adopt_all(remembered: Sequence[Closure]) -> bool:
    """Take closures that were computed earlier, if computing each of them now would give the same;
    else none of them. What several of them read is looked at once.
    """
    sources = {item for one in remembered for item in one.sources.items()}
    if any(modules.sha256(name) != sha256 for name, sha256 in sources):
        return False
    if any(
        modules.find(name) is not None for name in {n for one in remembered for n in one.absent}
    ):
        return False
    for one in remembered:
        top = one.kernel.partition(".")[0]
        for name, counted in one.externals.items():
            if not _is_external(name, top) or _external(name) != counted:
                return False
    for one in remembered:
        _known.setdefault(one.kernel, one)
    return True


def _walked(kernel: str) -> Closure:
    module, separator, name = kernel.partition(":")
    if not separator or not module or not name:
        raise FactoryError(
            f"the kernel {kernel!r} is not an import path",
            hint="write it as `package.module:factory`",
        )
    walk = _Walk(module.partition(".")[0])
    source = walk.module(module)
    if source is None:
        raise FactoryError(
            f"no module named {module!r}, which the kernel {kernel!r} should be in",
            hint="install it, or run where Python finds it",
        )
    if not walk.defines(source, name):
        near = difflib.get_close_matches(name, source.bindings, 1)
        raise FactoryError(
            f"the module {module!r} ({source.path}) defines no {name!r}",
            hint=f"did you mean `{module}:{near[0]}`?" if near else None,
        )
    walk.reach(source, name)
    return walk.closure(kernel)


class _Walk:
    """A walk from a factory over all that it names. Each statement that it comes to counts once."""

    def __init__(self, top: str) -> None:
        self._top = top
        self._modules: dict[str, modules.Source | None] = {}
        self._reached: dict[str, set[int]] = {}
        self._imports: set[str] = set()
        self._externals: dict[str, str] = {}
        self._done: set[tuple[str, str]] = set()

    def closure(self, kernel: str) -> Closure:
        lines = [f"closure {ALGORITHM}", *sorted(self._imports)]
        for name in sorted(self._reached):
            source = self._modules[name]
            assert source is not None
            lines += _statements(source, self._reached[name])
        text = "\n".join(lines)
        return Closure(
            kernel,
            hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            {name: source.sha256 for name, source in self._modules.items() if source},
            [n for n, source in self._modules.items() if not source and modules.find(n) is None],
            self._externals,
        )

    def module(self, name: str) -> modules.Source | None:
        if name not in self._modules:
            self._modules[name] = modules.load(name)
        return self._modules[name]

    def defines(
        self, source: modules.Source, name: str, seen: frozenset[str] = frozenset()
    ) -> bool:
        """Whether a module has a name, of its own or by a star import."""
        if name in source.bindings:
            return True
        for star in source.stars:
            base = _absolute(source, star)
            origin = self._internal(base) if base not in seen else None
            if origin is not None and self.defines(origin, name, seen | {source.name}):
                return True
        return False

    def reach(self, source: modules.Source, name: str) -> None:
        """Come to what `name` means in `source`, and to all that it names in turn."""
        if (source.name, name) in self._done:
            return
        self._done.add((source.name, name))
        self._enter(source)
        if name in source.bindings:
            for index in source.bindings[name]:
                self._come_to(source, index, name)
        else:
            for star in source.stars:
                self._import(source, star)

    def _enter(self, source: modules.Source) -> None:
        """Come to the statements that work on something else, wherever a module is used at all."""
        if (source.name, " effects") not in self._done:
            self._done.add((source.name, " effects"))
            for index in source.effects:
                self._come_to(source, index, None)

    def _come_to(self, source: modules.Source, index: int, name: str | None) -> None:
        statement = source.body[index]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            # An import counts by what it brings, not by where it stands.
            self._import(source, statement, name)
            return
        reached = self._reached.setdefault(source.name, set())
        if index in reached:
            return
        reached.add(index)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                self.reach(source, node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(source, node)

    def _import(
        self,
        source: modules.Source,
        statement: ast.Import | ast.ImportFrom,
        wanted: str | None = None,
    ) -> None:
        """Follow an import: the one name `wanted` of it, or every name that it binds."""
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if wanted not in (None, bound) and alias.name != "*":
                continue
            if isinstance(statement, ast.Import):
                self._import_module(source, alias, bound)
                continue
            base = _absolute(source, statement)
            self._imports.add(f"{source.name}:{bound} is {base}:{alias.name}")
            if alias.name == "*":
                self._whole(base)
            else:
                self._import_name(source, base, alias.name)

    def _import_module(self, source: modules.Source, alias: ast.alias, bound: str) -> None:
        self._imports.add(f"{source.name}:{bound} is {alias.name if alias.asname else bound}")
        parts = alias.name.split(".")
        # `import a.b` binds a, and makes b an attribute of it; `import a.b as c` binds b alone.
        first = len(parts) if alias.asname else 1
        for count in range(first, len(parts) + 1):
            self._whole(".".join(parts[:count]))

    def _import_name(self, source: modules.Source, base: str, name: str) -> None:
        origin = self._internal(base)
        found = False
        if origin is not None:
            self._enter(origin)
            # A package that imports its own submodule binds the submodule, not a name of itself.
            if origin is not source and self.defines(origin, name):
                self.reach(origin, name)
                found = True
        if not _is_external(base, self._top) and self.module(f"{base}.{name}") is not None:
            self._whole(f"{base}.{name}")
            found = True
        if not found:
            self._imports.add(f"external {self._external(base)}:{name}")

    def _whole(self, name: str) -> None:
        """Come to everything in a module."""
        if (name, " whole") in self._done:
            return
        self._done.add((name, " whole"))
        origin = self._internal(name)
        if origin is None:
            self._imports.add(f"external {self._external(name)}")
            return
        self._enter(origin)
        for bound in origin.bindings:
            self.reach(origin, bound)
        for star in origin.stars:
            self._import(origin, star)

    def _internal(self, name: str) -> modules.Source | None:
        """The module as source to follow, or None for one that counts by name and version."""
        return None if _is_external(name, self._top) else self.module(name)

    def _external(self, name: str) -> str:
        counted = _external(name)
        if counted != name and _is_external(name, self._top):
            self._externals[name] = counted
        return counted


def _statements(source: modules.Source, reached: set[int]) -> Iterator[str]:
    """The statements of a module that were come to.

    Their order counts, except that a function or class that is the only one of its name may stand
    anywhere.
    """
    for index in sorted(reached):
        statement = source.body[index]
        if isinstance(statement, modules.NAMED) and len(source.bindings[statement.name]) == 1:
            continue
        yield f"{source.name}: {canonical(statement)}"
    named = [
        source.body[index] for index in reached if isinstance(source.body[index], modules.NAMED)
    ]
    alone = [n for n in named if len(source.bindings[n.name]) == 1]  # type: ignore[attr-defined]
    yield from sorted(f"{source.name}: {canonical(statement)}" for statement in alone)


def _is_external(name: str, factory_top: str) -> bool:
    """Whether a module counts by name and version: the standard library, torch, TileLang, installed
    packages other than the factory's own.
    """
    top = name.partition(".")[0]
    if top in _EXTERNAL or top in sys.stdlib_module_names:
        return True
    if top == factory_top or (spec := modules.find(top)) is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(part in _INSTALLED for place in places for part in Path(place).parts)


def _absolute(source: modules.Source, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    relative = "." * statement.level + (statement.module or "")
    try:
        return importlib.util.resolve_name(relative, source.package)
    except ImportError as error:
        raise FactoryError(
            f"{source.path} imports {relative}, which is above its top package: {error}"
        ) from error


@functools.cache
def _external(name: str) -> str:
    """How a module of somebody else counts: TileLang and torch by name, the rest with their
    version.
    """
    top = name.partition(".")[0]
    if top in _EXTERNAL or top in sys.stdlib_module_names:
        return name
    from importlib import metadata

    try:
        return f"{name}=={metadata.version(top)}"
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(top)
        if not owners:
            return name  # absent, or of the standard library of a newer Python
        return f"{name}=={','.join(metadata.version(owner) for owner in sorted(owners))}"


def canonical(node: ast.AST) -> str:
    """A text for a syntax tree that is the same on every supported Python.

    `ast.dump` is not: its fields and its handling of empty lists changed between 3.10 and 3.13.
    """
    parts: list[str] = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and _has_docstring(value):
            value = value[1:]
        if isinstance(node, ast.JoinedStr):
            # Python 3.12 has empty texts around a nested format where the others have none.
            value = [v for v in value if not (isinstance(v, ast.Constant) and v.value == "")]
        if isinstance(value, list):
            inner = ",".join(
                canonical(item) if isinstance(item, ast.AST) else ascii(item) for item in value
            )
            parts.append(f"{name}=[{inner}]")
        elif isinstance(value, ast.AST):
            parts.append(f"{name}={canonical(value)}")
        else:
            # Which characters `repr` escapes depends on the Unicode version of the Python.
            parts.append(f"{name}={value!a}")
    return f"{type(node).__name__}({' '.join(parts)})"


def _has_docstring(body: list[ast.AST]) -> bool:
    return bool(
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )
