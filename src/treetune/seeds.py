"""Does a class read a seed anywhere? Asked of infinite tasksets, whose shuffle seed only they can honour."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType


def mentions_seed(cls: type, stop: type) -> bool:
    """Whether a method of `cls` or of its bases below `stop`, or a function of the same module that one
    of them names, touches something called `seed`."""
    pending = [
        function
        for base in cls.__mro__[: cls.__mro__.index(stop)]
        for value in vars(base).values()
        if (function := _function(value)) is not None
    ]
    seen: set[FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        if "seed" in names:
            return True
        for name in names:
            named = function.__globals__.get(name)
            if isinstance(named, FunctionType) and named.__module__ == function.__module__:
                pending.append(named)
    return False


def _function(value: object) -> FunctionType | None:
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
