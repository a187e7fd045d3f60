"""What is inside an object that is no tree: whether a tensor is, and where.

References are read as the garbage collector reads them. So slots, private attributes and containers of any kind are
seen, and no code of the object's class runs.
"""

import functools
import gc
import io
import logging
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

MOST_OBJECTS = 10_000  # some 20 ms

# What leads to the state of the whole program. What a function closes over, or a method is bound to, is shared on
# purpose.
_ENDS = (
    *(type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools._lru_cache_wrapper),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, weakref.ref, *weakref.ProxyTypes),
    *(threading.Thread, logging.Logger, logging.Handler, io.IOBase),
)


class TooManyError(Exception):
    """An object has more inside than is looked at."""


def find_inside(
    obj: Any, is_wanted: Callable[[Any], bool], may_matter: Callable[[Any], bool] = gc.is_tracked
) -> tuple[str, Any] | None:
    """The first thing inside an object, at any depth, that `is_wanted`, and its path: `._store['x']`.

    Parts that do not `may_matter` are passed over: by default those that the garbage collector does not track, since no
    tensor is inside.
    """
    if issubclass(type(obj), _ENDS):
        return None
    found: list[tuple[Any, int]] = [(obj, -1)]  # each with the position of what holds it
    seen = {id(obj)}
    for i, (holder, _) in enumerate(found):
        for part in filter(may_matter, gc.get_referents(holder)):
            if is_wanted(part):
                return _path([*_chain(found, i), part]), part
            if id(part) not in seen and not issubclass(type(part), _ENDS):
                seen.add(id(part))
                found.append((part, i))
        if len(found) > MOST_OBJECTS:
            raise TooManyError
    return None


def _chain(found: list[tuple[Any, int]], index: int) -> list[Any]:
    """An object and all that lead to it, outermost first."""
    chain: list[Any] = []
    while index >= 0:
        holder, index = found[index]
        chain.append(holder)
    return chain[::-1]


def _path(chain: list[Any]) -> str:
    path, names = "", None
    for holder, part in pairwise(chain):
        is_namespace = holder is names
        names = _namespace(holder)
        if part is not names:
            path += _step(holder, part, is_namespace)
    return path


def _step(holder: Any, part: Any, is_namespace: bool) -> str:
    """How to get from an object to a part of it; `[...]` where no expression does, as for elements of a set."""
    for key, value in _items(holder):
        if value is part and is_namespace:
            return f".{key}"
        if value is part:
            return f"[{key!r}]" if type(key) in (str, int) else f"[<{type(key).__name__}>]"
    for name, value in attributes(holder):
        if value is part:
            return f".{name}"
    return "[...]"


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    kinds: tuple[Any, ...] = (list, tuple, deque)
    if issubclass(type(holder), dict):
        yield from dict.items(holder)
    for kind in kinds:
        if issubclass(type(holder), kind):
            yield from enumerate(kind.__iter__(holder))


def attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """What an object has under names, in its `__dict__` and its slots; no code of its class runs."""
    yield from (_namespace(holder) or {}).items()
    for cls in type(holder).__mro__:
        for name, member in vars(cls).items():
            if type(member) is types.MemberDescriptorType and name != "__dict__":
                try:
                    yield name, member.__get__(holder)
                except AttributeError:  # a slot that is not set
                    continue


def _namespace(holder: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, also where its class has a property of that name."""
    for cls in type(holder).__mro__:
        descriptor: Any = vars(cls).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return descriptor.__get__(holder)
    return None
