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
import functools
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from tlcache.errors import FactoryError

__all__ = ["ALGORITHM", "Closure", "adopt", "closure", "factory_digest", "module_sha256"]

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
    for name, sha256 in remembered.sources.items():
        spec = _find(name)
        if spec is None or not spec.origin or not spec.has_location:
            return False
        try:
            data = Path(spec.origin).read_bytes()
        except OSError:
            return False
        if hashlib.sha256(data).hexdigest() != sha256:
            return False
    top = remembered.kernel.partition(".")[0]
    if any(_find(name) is not None for name in remembered.absent):
        return False
    for name, counted in remembered.externals.items():
        if not _is_external(name, top) or _external(name) != counted:
            return False
    _known.setdefault(remembered.kernel, remembered)
    return True


def module_sha256(name: str) -> str | None:
    """The sha256 of a module's file, or None where there is none."""
    spec = _find(name)
    try:
        if spec is not None and spec.origin and spec.has_location:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        pass
    return None


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
    if name not in source.bindings:
        raise FactoryError(f"the module {module!r} ({source.path}) defines no {name!r}")
    walk.reach(source, name)
    return walk.closure(kernel)


@dataclass
class _Source:
    """One parsed module: its statements, and which of them bind which name."""

    name: str
    path: Path
    package: str
    sha256: str
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)
    stars: list[ast.ImportFrom] = field(default_factory=list)


class _Walk:
    def __init__(self, top: str) -> None:
        self._top = top
        self._modules: dict[str, _Source | None] = {}
        self._lines: set[str] = set()
        self._externals: dict[str, str] = {}
        self._done: set[tuple[str, str]] = set()

    def closure(self, kernel: str) -> Closure:
        text = "\n".join([f"closure {ALGORITHM}", *sorted(self._lines)])
        return Closure(
            kernel,
            hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            {name: source.sha256 for name, source in self._modules.items() if source},
            [name for name, source in self._modules.items() if not source],
            self._externals,
        )

    def module(self, name: str) -> _Source | None:
        if name not in self._modules:
            self._modules[name] = _load(name)
        return self._modules[name]

    def reach(self, source: _Source, name: str) -> None:
        """Add what `name` means in `source`, and all that it reaches in turn."""
        if (source.name, name) in self._done:
            return
        if (source.name, "") not in self._done:
            self._done.add((source.name, ""))
            for statement in source.effects:
                self._add(source, "", statement)
        self._done.add((source.name, name))
        statements = source.bindings.get(name)
        if statements is not None:
            for statement in statements:
                self._add(source, name, statement)
            return
        for star in source.stars:
            self._import(source, star)

    def _add(self, source: _Source, name: str, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._import(source, statement, name)
            return
        # A module-level import is named by what it brings, not by its text, so that moving an
        # import changes nothing; everything else is named by its canonical form.
        self._lines.add(f"{source.name}:{name}={_canonical(statement)}")
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                self.reach(source, node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(source, node)

    def _import(
        self, source: _Source, statement: ast.Import | ast.ImportFrom, wanted: str | None = None
    ) -> None:
        """Follow an import: the one name `wanted` of it, or every name that it binds."""
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if wanted not in (None, "", bound) and alias.name != "*":
                continue
            if isinstance(statement, ast.Import):
                brought = alias.name if alias.asname else bound
                self._lines.add(f"{source.name}:{bound} is {brought}")
                self._whole(alias.name)
                continue
            base = _absolute(source, statement)
            self._lines.add(f"{source.name}:{bound} is {base}:{alias.name}")
            if alias.name == "*":
                self._whole(base)
                continue
            origin = self._internal(base)
            if origin is not None and (alias.name in origin.bindings or origin.stars):
                self.reach(origin, alias.name)
            elif origin is not None or self._internal(f"{base}.{alias.name}") is not None:
                self._whole(f"{base}.{alias.name}")
            else:
                self._lines.add(f"external {self._external(base)}:{alias.name}")

    def _whole(self, name: str) -> None:
        origin = self._internal(name)
        if origin is None:
            self._lines.add(f"external {self._external(name)}")
            return
        for bound in ["", *origin.bindings]:
            self.reach(origin, bound)
        for star in origin.stars:
            self._import(origin, star)

    def _internal(self, name: str) -> _Source | None:
        """The module as source to follow, or None for one that counts by name and version."""
        return None if _is_external(name, self._top) else self.module(name)

    def _external(self, name: str) -> str:
        counted = _external(name)
        if counted != name and _is_external(name, self._top):
            self._externals[name] = counted
        return counted


def _is_external(name: str, factory_top: str) -> bool:
    """Whether a module counts by name and version: the standard library, torch, TileLang, installed
    packages other than the factory's own.
    """
    top = name.partition(".")[0]
    if top in _EXTERNAL or top in sys.stdlib_module_names:
        return True
    if top == factory_top or (spec := _find(top)) is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(part in _INSTALLED for place in places for part in Path(place).parts)


def _absolute(source: _Source, statement: ast.ImportFrom) -> str:
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
        owners = metadata.packages_distributions().get(top, [])
        return f"{name}=={','.join(metadata.version(owner) for owner in sorted(owners))}"


def _load(name: str) -> _Source | None:
    spec = _find(name)
    if spec is None or not spec.origin or not spec.has_location:
        return None
    path = Path(spec.origin)
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    try:
        data = path.read_bytes()
        source = _Source(name, path, package, hashlib.sha256(data).hexdigest())
        if path.suffix != ".py":
            # A compiled module is one statement: its bytes.
            source.effects.append(ast.Expr(ast.Constant(source.sha256)))
            return source
        tree = ast.parse(data, filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise FactoryError(f"cannot read the source of {name!r} ({path}): {error}") from error
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.ImportFrom) and any(a.name == "*" for a in statement.names):
            source.stars.append(statement)
            continue
        for target in set(_bound(statement)):
            source.bindings.setdefault(target, []).append(statement)
        if not isinstance(statement, _DEFINITIONS) and not _is_main_guard(statement):
            source.effects.append(statement)
    return source


def _find(name: str) -> ModuleSpec | None:
    """Where a module is, without running the packages above it, as `importlib.util.find_spec`
    would.
    """
    found: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1:
            if found is None or found.submodule_search_locations is None:
                return None
            path = list(found.submodule_search_locations)
        found = _located(".".join(parts[:count]), path)
    return found


def _located(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is None:
            continue
        try:
            spec = find(name, path)
        except (ImportError, ValueError, AttributeError, KeyError, OSError):
            continue
        if isinstance(spec, ModuleSpec):
            return spec
    return None


_DEFINITIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a module-level statement binds, or changes in place (`TABLE[k] = v`)."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    places: list[ast.AST] = [statement]
    if isinstance(statement, ast.Assign):
        places = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        places = [statement.target]
    whole = isinstance(statement, _DEFINITIONS)
    for node in itertools.chain.from_iterable(map(ast.walk, places)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and (whole or isinstance(node.ctx, ast.Store)):
            yield node.id


def _is_main_guard(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, which does not run where a factory is imported."""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and isinstance(statement.test.left, ast.Name)
        and statement.test.left.id == "__name__"
    )


def _canonical(node: ast.AST) -> str:
    """A text for a syntax tree that is the same on every supported Python.

    `ast.dump` is not: its fields and its handling of empty lists changed between 3.10 and 3.13.
    """
    parts: list[str] = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and _has_docstring(value):
            value = value[1:]
        if isinstance(value, list):
            inner = ",".join(
                _canonical(item) if isinstance(item, ast.AST) else repr(item) for item in value
            )
            parts.append(f"{name}=[{inner}]")
        elif isinstance(value, ast.AST):
            parts.append(f"{name}={_canonical(value)}")
        else:
            parts.append(f"{name}={value!r}")
    return f"{type(node).__name__}({' '.join(parts)})"


def _has_docstring(body: list[ast.AST]) -> bool:
    return bool(
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )
