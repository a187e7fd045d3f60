"""Objects in outputs that torch's gather takes apart by iterating: a cache of keys and values, layer by layer."""

import copy as copies
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch

from fdp._placement.join import same_value
from fdp._placement.moves import concat, copy
from fdp._trees.tree import map_leaves
from fdp._trees.types import Tree

_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, deque)


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
    return marked, [_Joining(column, device, dim, where).joined for column in columns]


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
        and any(isinstance(part, torch.Tensor) for part in _parts(leaf, set()))
    )


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    inside = _inside(value)
    if inside is None:
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for _, part in inside:
            yield from _parts(part, seen)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container or a plain object, by key; None for what has no parts."""
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    if isinstance(value, torch.Tensor | torch.nn.Module | type) or callable(value):
        return None
    return list(vars(value).items()) if hasattr(value, "__dict__") else None


@final
class _Joining:
    """Stores of all replicas as one: tensors are concatenated, and whatever else is in them must be equal."""

    def __init__(self, stores: Sequence[Any], device: torch.device, dim: int, where: str) -> None:
        self._device, self._dim = device, dim
        self._name, self._where = type(stores[0]).__name__, where
        self._sizes: tuple[int, ...] | None = None
        self._made: dict[tuple[int, ...], Any] = {}
        tensors = [[part for part in _parts(store, set()) if isinstance(part, torch.Tensor)] for store in stores]
        self._devices = [{tensor.device for tensor in found} for found in tensors]
        self.joined = self._join(stores, "")

    def path(self, index: int, /) -> str:
        """What the log of transfers calls a tensor."""
        return f"output.{self._name}"

    def _join(self, values: Sequence[Any], path: str) -> Any:
        key = tuple(map(id, values))
        if key not in self._made:
            self._made[key] = self._join_new(values, path, key)
        return self._made[key]

    def _join_new(self, values: Sequence[Any], path: str, key: tuple[int, ...]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
            return self._join_tensors(values, path)
        if isinstance(first, torch.device) and all(v in own for v, own in zip(values, self._devices, strict=True)):
            return self._device
        if all(value is first for value in values[1:]) and len(values) > 1:
            return first
        insides = [_inside(value) for value in values]
        if insides[0] is None or any(type(value) is not type(first) for value in values):
            return first if all(same_value(first, value) for value in values) else self._refuse(values, path)
        keys = [[name for name, _ in inside or ()] for inside in insides]
        if any(each != keys[0] for each in keys):
            self._refuse(keys, path)
        if not isinstance(first, tuple):
            self._made[key] = copies.copy(first)  # before what is in it, which may lead back
        parts = [
            (name, self._join([(inside or ())[i][1] for inside in insides], _step(path, first, name)))
            for i, name in enumerate(keys[0])
        ]
        return _refilled(first, self._made.get(key), parts)

    def _join_tensors(self, tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        moved = [copy(tensor, self._device, self, 0) for tensor in tensors]
        if all(tensor.ndim == 0 for tensor in moved):
            return moved[0] if all(same_value(moved[0], tensor) for tensor in moved) else self._refuse(moved, path)
        sizes = tuple(tensor.shape[self._dim] for tensor in moved)
        self._sizes = self._sizes or (sizes if any(sizes) else None)
        if any(sizes) and sizes != self._sizes:
            self._refuse([tuple(tensor.shape) for tensor in moved], path)
        return concat(moved, self._dim)

    def _refuse(self, values: Iterable[Any], path: str) -> Any:
        each = ", ".join(f"{str(value)[:60]} in replica {i}" for i, value in enumerate(values))
        raise ValueError(
            f"{self._where}: the {self._name} in the output cannot be joined: {path} is {each}. Return tensors, or "
            "override gather. A model of transformers returns no cache with use_cache=False"
        )


def _step(path: str, owner: Any, name: Any) -> str:
    return f"{path}[{name!r}]" if type(owner) in _CONTAINERS or isinstance(owner, tuple) else f"{path}.{name}"


def _refilled(first: Any, made: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    if isinstance(first, tuple):
        values = [part for _, part in parts]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if isinstance(first, list | deque):
        for name, part in parts:
            made[name] = part
    else:
        (made if isinstance(first, dict) else vars(made)).update(parts)
    return made
