"""The values of which a clone has its own: containers, bound methods and partials. What is in them."""

from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
BOXES = frozenset({dict, OrderedDict, defaultdict, list, set, deque})


def is_tuple(kind: type) -> bool:
    """Whether it is a tuple, the class of a named tuple, or a frozenset: nobody can write to one."""
    return kind in (tuple, frozenset) or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def contents(box: Any) -> list[Any]:
    """What is in a container, the keys of a dict first."""
    return [*box, *box.values()] if isinstance(box, dict) else list(box)


def has_atoms_only(box: Any) -> bool:
    """Whether there are only numbers and strings in a container."""
    return ATOMS.issuperset(map(type, box)) and (not isinstance(box, dict) or ATOMS.issuperset(map(type, box.values())))


def is_constant(value: Any) -> bool:
    """Whether a value is made of numbers and strings, and nobody can write to it."""
    return type(value) in ATOMS or (is_tuple(type(value)) and all(map(is_constant, value)))


def is_setting(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a value is made of numbers and strings, and no empty container that waits for something."""
    if type(value) not in BOXES:
        return is_constant(value)
    inside = around | {id(value)}
    return bool(value) and id(value) not in around and all(is_setting(part, inside) for part in contents(value))
