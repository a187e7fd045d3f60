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
    """What is in such a value, by key, but for numbers and strings if there is nothing else; None for any other."""
    kind = type(value)
    if kind is functools.partial:
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), ("__dict__", vars(value))]
    if kind is types.MethodType:
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if is_tuple(kind) or kind is frozenset:
        return [] if has_atoms_only(value) else list(enumerate(value))
    if kind not in BOXES:
        return None
    held = value.copy()  # at once: other threads may write to it
    factory = [("default_factory", held.default_factory)] if isinstance(held, defaultdict) else []
    if has_atoms_only(held):
        return factory
    return [*factory, *((key, key) for key in held), *held.items()] if isinstance(held, dict) else list(enumerate(held))


def is_tuple(kind: type) -> bool:
    """Whether it is tuple, or the class of a named tuple."""
    return kind is tuple or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def has_atoms_only(box: Any) -> bool:
    """Whether there are only numbers and strings in a container."""
    return ATOMS.issuperset(map(type, box)) and (not isinstance(box, dict) or ATOMS.issuperset(map(type, box.values())))


def is_setting(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a value is made of numbers and strings, and no empty container that waits for something."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind not in BOXES and not is_tuple(kind) and kind is not frozenset:
        return False
    waits = not value and kind in BOXES
    inside = around | {id(value)}
    return not waits and id(value) not in around and all(is_setting(part, inside) for _, part in parts_of(value) or ())


def is_constant(value: Any) -> bool:
    """Whether a value is made of numbers and strings, and nobody can write to it."""
    return type(value) in ATOMS or (
        (is_tuple(type(value)) or type(value) is frozenset) and all(map(is_constant, value))
    )
