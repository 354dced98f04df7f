"""What a function's source says: its digest, and the names that it takes from outside of itself.

TileLang makes kernels of source, not of bytecode: it parses functions anew, and reads annotations
of local variables, which leave nothing in bytecode. So both count; this is the half of the source.

Invariant: two texts have one digest only if they are the same program but for comments, docstrings,
layout and line numbers. A name is left out only if the text itself binds it, by Python's scopes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tlcache.closure import canonical

__all__ = ["VERSION", "Text", "Use", "analyzed", "read"]

VERSION = 1
"""Of this analysis; part of every key that rests on it."""


class Use(NamedTuple):
    """A name from outside, and what is done with it.

    Attributes:
        head: The name; `module:` in front of it for a module that the function imports itself.
        attributes: The attributes that are asked for, one after another.
        kind: `value` (it is passed on), `call`, `store` (an item or an attribute is set), `bind`
            (the name itself is assigned), or `item` (it is asked for an item).
        constant: The constant that it is called with first, or asked for.
    """

    head: str
    attributes: tuple[str, ...]
    kind: str
    constant: str | None = None


class Text(NamedTuple):
    """What was read of a text: the function's name, its digest, and what it uses, in a fixed
    order.
    """

    name: str
    digest: str
    uses: tuple[Use, ...]


@functools.lru_cache(maxsize=4096)
def analyzed(source: str) -> Text | None:
    """The analysis of the lines of one function; None where they are no definition by themselves,
    as those of a lambda.
    """
    return read(source)


def read(source: str) -> Text | None:
    """`analyzed`, without its memory."""
    try:
        body = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not body or not isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    reader = _Reader()
    reader.statement(body[0])
    digest = hashlib.sha256(canonical(body[0]).encode()).hexdigest()
    return Text(body[0].name, digest, tuple(sorted(reader.uses, key=repr)))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Names(NamedTuple):
    """Names that a scope binds, and those of them that are others'."""

    bound: set[str]
    globals: set[str]
    nonlocals: set[str]


class _Scope:
    """One function's, class's or comprehension's names."""

    def __init__(self, names: _Names, inherited: bool) -> None:
        self.names = names.bound - names.globals - names.nonlocals
        self.globals = names.globals
        self.inherited = inherited  # whether scopes within see it; those of classes are not seen
        self.modules: dict[str, list[tuple[str, tuple[str, ...]]]] = {}


class _Reader:
    """Goes over a definition with Python's rules of scope."""

    def __init__(self) -> None:
        self.uses: set[Use] = set()
        self._scopes: list[_Scope] = []

    # --- names ---

    def _owner(self, name: str) -> _Scope | None:
        """The scope that binds a name; None where it comes from outside."""
        innermost = True
        for scope in reversed(self._scopes):
            if innermost or scope.inherited:
                if name in scope.globals:
                    return None
                if name in scope.names:
                    return scope
            innermost = False
        return None

    def _note(
        self, name: str, attributes: tuple[str, ...], kind: str, constant: str | None = None
    ) -> None:
        owner = self._owner(name)
        if owner is None:
            self.uses.add(Use(name, attributes, kind, constant))
            return
        for module, path in owner.modules.get(name, ()):
            self.uses.add(Use(f"module:{module}", path + attributes, kind, constant))

    # --- statements and expressions ---

    def statement(self, node: ast.AST) -> None:
        if isinstance(node, _FUNCTIONS):
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, _COMPREHENSIONS):
            self._comprehension(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Attribute):
            self._chain(node)
        elif isinstance(node, ast.Name):
            kind = "value" if isinstance(node.ctx, ast.Load) else "bind"
            self._note(node.id, (), kind)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Subscript):
            self._subscript(node)
        elif isinstance(node, ast.AnnAssign):
            self._annotation(node.annotation)
            self._each(filter(None, (node.target, node.value)))
        else:
            self._each(ast.iter_child_nodes(node))

    def _each(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.statement(node)

    def _annotation(self, node: ast.expr | None) -> None:
        """An annotation; TileLang evaluates one that is a text as well."""
        if node is None:
            return
        self.statement(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    self.statement(ast.parse(part.value.strip(), mode="eval").body)
                except (SyntaxError, ValueError, RecursionError):
                    pass  # a text like any other

    def _chain(
        self, node: ast.Attribute, kind: str | None = None, constant: str | None = None
    ) -> None:
        """`a.b.c`: the attributes of a name, else of any other expression."""
        attributes = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name):
            self.statement(value)
            return
        if kind is None:
            kind = "value" if isinstance(node.ctx, ast.Load) else "store"
        path = tuple(reversed(attributes))
        if kind == "store":
            path = path[:-1]
        self._note(value.id, path, kind, constant)

    def _call(self, node: ast.Call) -> None:
        first = node.args[0] if node.args else None
        constant = first.value if isinstance(first, ast.Constant) else None
        said = constant if isinstance(constant, str) else None
        if isinstance(node.func, ast.Name):
            self._note(node.func.id, (), "call", said)
        elif isinstance(node.func, ast.Attribute):
            self._chain(node.func, "call", said)
        else:
            self.statement(node.func)
        self._each([*node.args, *node.keywords])

    def _subscript(self, node: ast.Subscript) -> None:
        kind = "item" if isinstance(node.ctx, ast.Load) else "store"
        said = node.slice.value if isinstance(node.slice, ast.Constant) else None
        constant = said if isinstance(said, str) else None
        value: ast.expr = node.value
        while kind == "store" and isinstance(value, ast.Subscript):
            self.statement(value.slice)
            value = value.value
        if isinstance(value, ast.Name):
            self._note(value.id, (), kind, constant)
        elif isinstance(value, ast.Attribute) and kind == "item":
            self._chain(value, kind, constant)
        elif isinstance(value, ast.Attribute):
            self._chain(value, "value")
            base: ast.expr = value
            path = []
            while isinstance(base, ast.Attribute):
                path.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name):
                self._note(base.id, tuple(reversed(path)), "store")
        else:
            self.statement(value)
        self.statement(node.slice)

    # --- scopes ---

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        everyone = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        everyone += filter(None, (arguments.vararg, arguments.kwarg))
        if self._scopes:  # the defaults and decorators of the outermost one are evaluated already
            self._each([*arguments.defaults, *filter(None, arguments.kw_defaults)])
        body: list[ast.AST]
        if isinstance(node, ast.Lambda):
            body = [node.body]
        else:
            if self._scopes:
                self._each(node.decorator_list)
            body = list(node.body)
        names = _bound(body)
        names.bound.update(argument.arg for argument in everyone)
        # TileLang evaluates annotations with the names around the function, and so does Python.
        for argument in everyone:
            self._annotation(argument.annotation)
        if not isinstance(node, ast.Lambda):
            self._annotation(node.returns)
        self._scopes.append(_Scope(names, True))
        self._each(body)
        self._scopes.pop()

    def _class(self, node: ast.ClassDef) -> None:
        self._each([*node.decorator_list, *node.bases, *node.keywords])
        names = _bound(node.body)
        # A name that a class body binds may be read there before, and then comes from outside.
        names.bound.difference_update(
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
        )
        self._scopes.append(_Scope(names, False))
        self._each(node.body)
        self._scopes.pop()

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        self.statement(node.generators[0].iter)
        names = {
            part.id
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name)
        }
        self._scopes.append(_Scope(_Names(names, set(), set()), True))
        for index, generator in enumerate(node.generators):
            self._each([generator.target, *generator.ifs])
            if index:
                self.statement(generator.iter)
        if isinstance(node, ast.DictComp):
            self._each([node.key, node.value])
        else:
            self.statement(node.elt)
        self._scopes.pop()

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        """A function's own import: what it binds stands for a module, or for what is in one."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                path: tuple[str, ...] = (alias.name,)
            else:
                # `import a.b` binds a.
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                path = ()
            bound = alias.asname or alias.name.partition(".")[0]
            owner = self._owner(bound)
            if owner is None:
                self.uses.add(Use(bound, (), "bind"))
            else:
                owner.modules.setdefault(bound, []).append((module, path))
            self.uses.add(Use(f"module:{module}", path, "import"))


def _bound(body: Iterable[ast.AST]) -> _Names:
    """The names that statements bind in their own scope."""
    names, globals_, nonlocals = _Names(set(), set(), set())
    for node in _within(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global):
            globals_.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            nonlocals.update(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return _Names(names, globals_, nonlocals)


def _within(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of one scope. An assignment expression in a comprehension binds around it."""
    waiting = [(node, False) for node in body]
    while waiting:
        node, comprehended = waiting.pop()
        if not comprehended or isinstance(node, ast.NamedExpr):
            yield node
        inner: Iterable[ast.AST | None]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.Lambda):
            inner = [*node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            inner = [*node.decorator_list, *node.bases]
        elif isinstance(node, ast.NamedExpr):
            yield node.target
            inner = [node.value]
        else:
            inner = ast.iter_child_nodes(node)
        comprehended = comprehended or isinstance(node, _COMPREHENSIONS)
        waiting += [(part, comprehended) for part in inner if part is not None]
