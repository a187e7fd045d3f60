"""Objects in outputs that torch's gather takes apart by iterating: a cache of keys and values, layer by layer."""

import copy as copies
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

from fdp._placement.check_outputs import same_value
from fdp._placement.moves import concat, copy
from fdp._trees.tree import map_leaves
from fdp._trees.types import Tree


@final
class _StorePlace:
    """Stands for a store in the outputs of all replicas, which it is equal in."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self._name = number, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StorePlace) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"a {self._name}"


def without_stores(outputs: Sequence[Tree], device: torch.device, dim: int, where: str) -> tuple[list[Tree], list[Any]]:
    """The outputs with a place in place of each store, and the joined stores."""
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return list(outputs), []
    found: list[list[Any]] = [[] for _ in outputs]

    def mark(leaf: Any, own: list[Any]) -> Any:
        if not _is_store(leaf):
            return leaf
        own.append(leaf)
        return _StorePlace(len(own) - 1, type(leaf).__name__)

    marked = [map_leaves(functools.partial(mark, own=own), output) for own, output in zip(found, outputs, strict=True)]
    if not any(found):
        return list(outputs), []
    columns = zip(*found, strict=False)  # where numbers differ, places do when outputs are joined
    return marked, [_join(column, device, dim, where) for column in columns]


def with_stores(output: Tree, stores: Sequence[Any]) -> Tree:
    """Inverse of `without_stores`, for the joined output."""
    if not stores:
        return output
    return map_leaves(lambda leaf: stores[leaf.number] if isinstance(leaf, _StorePlace) else leaf, output)


def _is_store(leaf: Any) -> bool:
    """Whether torch's gather would iterate over an object of a class of the user's, and find tensors in it."""
    return (
        not isinstance(leaf, torch.Tensor | torch.nn.Module | type | Iterator)
        and hasattr(leaf, "__dict__")
        and isinstance(leaf, Iterable)
        and any(isinstance(part, torch.Tensor) for _, (part,) in _columns([leaf], "", set()))
    )


class _Name(NamedTuple):
    """What the log of transfers calls all tensors of a store."""

    name: str

    def path(self, index: int, /) -> str:
        return f"output.{self.name}"


def _join(stores: Sequence[Any], device: torch.device, dim: int, where: str) -> Any:
    """Stores of all replicas as one: tensors are concatenated, and whatever else is in them must be equal."""
    name = type(stores[0]).__name__
    columns = list(_columns(stores, "", set()))
    devices = [
        {x.device for x in own if isinstance(x, torch.Tensor)} for own in zip(*(c for _, c in columns), strict=True)
    ]
    memo: dict[int, Any] = {}
    rows: tuple[int, ...] = ()
    for path, values in columns:
        first, shown = values[0], values
        joined: Any = _refused
        if isinstance(first, torch.Tensor) and id(first) in memo:
            pass  # one tensor in two places of the first store only
        elif all(isinstance(value, torch.Tensor) for value in values):
            moved = [copy(value, device, _Name(name), 0) for value in values]
            if all(tensor.ndim == 0 for tensor in moved):
                joined = first if _all_equal(moved) else _refused
            else:
                shown, sizes = [tuple(tensor.shape) for tensor in moved], tuple(tensor.shape[dim] for tensor in moved)
                rows = rows or (sizes if any(sizes) else ())
                joined = concat(moved, dim) if not any(sizes) or sizes == rows else _refused
        elif isinstance(first, torch.device) and all(v in own for v, own in zip(values, devices, strict=True)):
            joined = device
        elif _all_equal(values):
            joined = first
        if joined is _refused:
            each = ", ".join(f"{str(value)[:60]} in replica {i}" for i, value in enumerate(shown))
            raise ValueError(
                f"{where}: the {name} in the output cannot be joined: {path} is {each}. Return tensors, or override "
                "gather. A model of transformers returns no cache with use_cache=False"
            )
        memo[id(first)] = joined
    return copies.deepcopy(stores[0], memo)


_refused = object()


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value is values[0] or same_value(values[0], value) for value in values)


def _columns(values: Sequence[Any], path: str, seen: set[tuple[int, ...]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """What is in objects of the same structure, each part of all of them, with the way to it."""
    key, first = tuple(map(id, values)), values[0]
    if key in seen:
        return
    seen.add(key)
    insides = [inside for value in values if (inside := _inside(value)) is not None]
    shared = len(values) > 1 and all(value is first for value in values)
    if shared or len(insides) < len(values) or any(type(value) is not type(first) for value in values):
        yield path, values
        return
    steps = [[step for step, _ in inside] for inside in insides]
    if any(each != steps[0] for each in steps):
        yield path, steps
        return
    for i, step in enumerate(steps[0]):
        yield from _columns([inside[i][1] for inside in insides], path + step, seen)


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """What is in a container or a plain object, and how to come to it; None for what has no parts."""
    if isinstance(value, torch.Tensor | torch.nn.Module | type) or callable(value):
        return None
    found = [(f".{name}", part) for name, part in vars(value).items()] if hasattr(value, "__dict__") else []
    if isinstance(value, dict):
        return [*((f"[{key!r}]", part) for key, part in value.items()), *found]
    if isinstance(value, list | tuple | deque):
        return [*((f"[{i}]", part) for i, part in enumerate(value)), *found]
    return found if hasattr(value, "__dict__") else None
