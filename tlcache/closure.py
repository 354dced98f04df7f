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
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

from tlcache.errors import FactoryError

__all__ = ["factory_digest"]

_EXTERNAL = frozenset({"torch", "tilelang", "tvm", "tvm_ffi", "__future__"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "lineno", "col_offset"})


@functools.cache
def factory_digest(kernel: str) -> str:
    """The sha256 of everything that the factory `pkg.module:name` reaches, as hexadecimal text.

    Raises:
        FactoryError: There is no such module or name, or its source cannot be read.
    """
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
    return walk.digest()


@dataclass
class _Source:
    """One parsed module: its statements, and which of them bind which name."""

    name: str
    path: Path
    package: str
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)
    stars: list[ast.ImportFrom] = field(default_factory=list)


class _Walk:
    def __init__(self, top: str) -> None:
        self._top = top
        self._modules: dict[str, _Source | None] = {}
        self._lines: set[str] = set()
        self._done: set[tuple[str, str]] = set()

    def digest(self) -> str:
        text = "\n".join(sorted(self._lines))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

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
                self._whole(alias.name)
                continue
            base = _absolute(source, statement)
            if alias.name == "*":
                self._whole(base)
                continue
            origin = self._internal(base)
            if origin is not None and (alias.name in origin.bindings or origin.stars):
                self.reach(origin, alias.name)
            elif origin is not None or self._internal(f"{base}.{alias.name}") is not None:
                self._whole(f"{base}.{alias.name}")
            else:
                self._lines.add(f"external {_external(base)}:{alias.name}")

    def _whole(self, name: str) -> None:
        origin = self._internal(name)
        if origin is None:
            self._lines.add(f"external {_external(name)}")
            return
        for bound in ["", *origin.bindings]:
            self.reach(origin, bound)
        for star in origin.stars:
            self._import(origin, star)

    def _internal(self, name: str) -> _Source | None:
        """The module as source to follow, or None for one that counts by name and version."""
        top = name.partition(".")[0]
        if top in _EXTERNAL or top in sys.stdlib_module_names:
            return None
        if top != self._top and (spec := _find(top)) is not None:
            places = [spec.origin or "", *(spec.submodule_search_locations or ())]
            if any(part in _INSTALLED for place in places for part in Path(place).parts):
                return None
        return self.module(name)


def _absolute(source: _Source, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    relative = "." * statement.level + (statement.module or "")
    return importlib.util.resolve_name(relative, source.package)


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
    if path.suffix != ".py":
        # A compiled module is one statement: its bytes.
        blob = ast.Expr(ast.Name(id=hashlib.sha256(path.read_bytes()).hexdigest(), ctx=ast.Load()))
        return _Source(name, path, name.rpartition(".")[0], effects=[blob])
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise FactoryError(f"cannot read the source of {name!r} ({path}): {error}") from error
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    source = _Source(name, path, package)
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.ImportFrom) and any(a.name == "*" for a in statement.names):
            source.stars.append(statement)
            continue
        bound = set(_bound(statement))
        for target in bound:
            source.bindings.setdefault(target, []).append(statement)
        if not bound:
            source.effects.append(statement)
    return source


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a module-level statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    yield node.id
    else:
        # if, try, with, for: whatever they bind anywhere inside.
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from _bound(child)
            elif isinstance(child, ast.ExceptHandler):
                for inner in child.body:
                    yield from _bound(inner)


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
