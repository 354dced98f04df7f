"""Pickles as data: what objects a pickle describes, without making one.

TileLang up to 0.1.14 writes a kernel's parameters as a pickle. To unpickle is to run what the file
says, so it is never done.

Invariant: nothing is imported, called or allocated beyond the size of the file. A pickle that uses
more of the format than the parameters do is refused.
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

__all__ = ["Built", "Global", "PickleError", "read"]

_MOST = 256 * 1024


class PickleError(ValueError):
    """The bytes are not a pickle of the kind that is read here."""


class Global(NamedTuple):
    """A name that a pickle refers to, as `module.name`."""

    module: str
    name: str


class Built:
    """An object that a pickle describes.

    Attributes:
        maker: What would have made it.
        arguments: From what.
        state: What it would have been given then; None where nothing.
    """

    __slots__ = ("arguments", "maker", "state")

    def __init__(self, maker: object, arguments: object) -> None:
        self.maker = maker
        self.arguments = arguments
        self.state: Any = None


class _Mark:
    pass


_MARK = _Mark()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("SHORT_BINUNICODE", "BINUNICODE", "UNICODE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
}
_IGNORED = {"PROTO", "FRAME", "STOP"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes) -> Any:
    """The value that a pickle describes: lists, dicts, tuples, texts, numbers, `Global`s and
    `Built`s.

    Raises:
        PickleError: It is damaged, is too large, or is of another kind.
    """
    if len(data) > _MOST:
        raise PickleError(f"a pickle of {len(data)} bytes holds more than parameters")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            _step(opcode.name, argument, stack, memo)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PickleError(f"{type(error).__name__}: {error}") from None
    if len(stack) != 1 or stack[0] is _MARK:
        raise PickleError("it does not end with one value")
    return stack[0]


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _LITERALS:
        stack.append(argument)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name == "APPEND":
        item = stack.pop()
        _expect(stack[-1], list).append(item)
    elif name == "APPENDS":
        items = _since_mark(stack)
        _expect(stack[-1], list).extend(items)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _expect(stack[-1], dict)[key] = value
    elif name == "SETITEMS":
        items = _since_mark(stack)
        _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
    elif name == "STACK_GLOBAL":
        last, first = stack.pop(), stack.pop()
        stack.append(Global(_expect(first, str), _expect(last, str)))
    elif name == "GLOBAL":
        stack.append(Global(*argument.split(" ", 1)))
    elif name in ("REDUCE", "NEWOBJ"):
        arguments, maker = stack.pop(), stack.pop()
        stack.append(Built(_expect(maker, Global), _expect(arguments, tuple)))
    elif name == "BUILD":
        state = stack.pop()
        _expect(stack[-1], Built).state = state
    elif name not in _IGNORED:
        raise PickleError(f"it uses {name}, as no parameters do")


def _since_mark(stack: list[Any]) -> list[Any]:
    for place in range(len(stack) - 1, -1, -1):
        if stack[place] is _MARK:
            items = stack[place + 1 :]
            del stack[place:]
            return items
    raise PickleError("it ends something that it did not begin")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleError(f"there is a {type(value).__name__} where a {kind.__name__} should be")
    return value
