"""The values of which a clone has its own: containers, bound methods and partials. What is in them."""

import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
BOXES = frozenset({dict, OrderedDict, defaultdict, list, set, deque})


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in such a value, by key; None for any other."""
    kind = type(value)
    if kind is functools.partial:
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if kind is types.MethodType:
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if kind in (tuple, frozenset):
        return list(enumerate(value))
    if kind not in BOXES:
        return None
    held = value.copy()  # at once: other threads may write to it
    if not isinstance(held, dict):
        return list(enumerate(held))
    factory = [("default_factory", held.default_factory)] if isinstance(held, defaultdict) else []
    return [*factory, *((key, key) for key in held), *held.items()]


def is_setting(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a value is made of numbers and strings, and no empty container that waits for something."""
    if type(value) in ATOMS:
        return True
    if type(value) not in BOXES and type(value) not in (tuple, frozenset):
        return False
    waits = not value and type(value) in BOXES
    inside = around | {id(value)}
    return not waits and id(value) not in around and all(is_setting(part, inside) for _, part in parts_of(value) or ())


def is_constant(value: Any) -> bool:
    """Whether a value is made of numbers and strings, and nobody can write to it."""
    return type(value) in ATOMS or (type(value) in (tuple, frozenset) and all(map(is_constant, value)))
