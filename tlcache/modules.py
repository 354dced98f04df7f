"""Modules, found and read without running them or the packages above them.

Invariant: nothing is imported. A module is its statements, and which of them bind which name.
"""

from __future__ import annotations

import ast
import hashlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from tlcache.errors import FactoryError

__all__ = ["NAMED", "Source", "find", "load", "sha256"]

NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


class Source:
    """One parsed module: its statements, and which of them bind which name."""

    def __init__(self, name: str, path: Path, package: str, sha256: str) -> None:
        self.name = name
        self.path = path
        self.package = package
        self.sha256 = sha256
        self.body: list[ast.stmt] = []
        self.bindings: dict[str, list[int]] = {}
        self.effects: list[int] = []
        self.stars: list[ast.ImportFrom] = []


def load(name: str) -> Source | None:
    spec = find(name)
    if spec is None or not spec.origin or not spec.has_location:
        return None
    path = Path(spec.origin)
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    try:
        data = path.read_bytes()
        source = Source(name, path, package, hashlib.sha256(data).hexdigest())
        if path.suffix != ".py":
            # A compiled module is one statement: its bytes.
            source.body.append(ast.Expr(ast.Constant(source.sha256)))
            source.effects.append(0)
            return source
        tree = ast.parse(data, filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise FactoryError(f"cannot read the source of {name!r} ({path}): {error}") from error
    source.body = tree.body
    for index, statement in enumerate(tree.body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.ImportFrom) and any(a.name == "*" for a in statement.names):
            source.stars.append(statement)
            continue
        for target in set(_bound(statement)):
            source.bindings.setdefault(target, []).append(index)
        if _has_effects(statement):
            source.effects.append(index)
    return source


def find(name: str) -> ModuleSpec | None:
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
        except KeyError:
            spec = _namespace(name, path)
        except (ImportError, ValueError, AttributeError, OSError):
            continue
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _namespace(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """A namespace package in a package that is not imported, which the path finder asks for it."""
    portions: list[str] = []
    for place in path or ():
        importer = pkgutil.get_importer(place)
        spec = importer.find_spec(name) if importer is not None else None
        if spec is not None and spec.loader is None:
            portions += spec.submodule_search_locations or ()
    if not portions:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = portions
    return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a module-level statement binds, or changes in place (`TABLE[k] = v`)."""
    if isinstance(statement, NAMED):
        yield statement.name
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            yield from node.names
    if isinstance(statement, NAMED):
        return
    for node in ast.walk(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, NAMED):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name is not None:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest is not None:
            yield node.rest
    for place in _places(statement):
        for node in ast.walk(place):
            if isinstance(node, ast.Name):
                yield node.id


def _places(statement: ast.stmt) -> list[ast.expr]:
    """What an assignment assigns to."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, (ast.AnnAssign, ast.AugAssign)) else []


def _has_effects(statement: ast.stmt) -> bool:
    """Whether a module-level statement may work on something else than the names that it binds."""
    if isinstance(statement, (*NAMED, ast.Import, ast.ImportFrom)):
        return False
    if isinstance(statement, _ASSIGNMENTS):
        return any(
            isinstance(node, (ast.Attribute, ast.Subscript))
            for place in _places(statement)
            for node in ast.walk(place)
        )
    return not _is_main_guard(statement)


def _is_main_guard(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, which does not run where a factory is imported."""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and isinstance(statement.test.left, ast.Name)
        and statement.test.left.id == "__name__"
    )


def sha256(name: str) -> str | None:
    """The sha256 of a module's file, or None where there is none."""
    spec = find(name)
    try:
        if spec is not None and spec.origin and spec.has_location:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        pass
    return None
