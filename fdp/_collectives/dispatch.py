"""A collective over a tree: which way it takes, with what can be differentiated through it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fdp._collectives.activation_checkpoint import replayed
from fdp._collectives.axes import AxisName, axis_of, inside, names_of
from fdp._collectives.combine import Undifferentiable
from fdp._collectives.levels import Place
from fdp._collectives.meeting import Brought, meet, said_of
from fdp._collectives.operations import Extreme, Operation
from fdp._placement.slot import Axis
from fdp._trees import torch_private
from fdp._trees.message_lists import listed
from fdp._trees.tree import Flat, flatten, unflatten
from fdp._trees.types import Tree


def reduced(where: str, tree: Tree, axis_name: AxisName, make: Callable[[], Operation]) -> Tree:
    """Apply a reduction over one axis, or over several, one after the other."""
    for name in names_of(where, axis_name):
        tree = on_tree(where, tree, name, lambda tensors: make())
    return tree


def on_tree(
    where: str, tree: Tree, axis_name: str, make: Callable[[Sequence[Tensor]], Operation], *, numbers: bool = True
) -> Tree:
    """Apply an operation to all tensors of a tree, and to its numbers if it has a meaning for them."""
    axis = axis_of(where, axis_name)
    return replayed(lambda: _on_tree(where, tree, axis, make, numbers), where, axis.slot.device)


def _on_tree(where: str, tree: Tree, axis: Axis, make: Callable[[Sequence[Tensor]], Operation], numbers: bool) -> Tree:
    flat = flatten(tree, "tree", where=where)
    kinds = set(map(type, flat.leaves))
    if all(issubclass(kind, Tensor) for kind in kinds):
        are_tensors, tensors, plain = [True] * len(flat.leaves), flat.leaves, []
    else:
        are_tensors = [isinstance(leaf, Tensor) for leaf in flat.leaves]
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
        plain = [leaf for leaf in flat.leaves if not isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, int | float) and numbers for leaf in plain):
        raise _not_exchanged(where, flat, numbers)
    operation = make(tensors)
    operation.name = where
    inner = torch_private.depth() - axis.run.depth if axis.slot.count > 1 else 0
    same = flat.structure, are_tensors, operation.options(), f"inside {inner} transforms of torch.func"
    found = _exchange(axis, operation, tensors, same)
    if plain:
        each, rest = iter(found), iter(_of_numbers(axis, where, plain, same))
        found = [next(each) if is_tensor else next(rest) for is_tensor in are_tensors]
    return unflatten(flat.structure, found)


def _not_exchanged(where: str, flat: Flat, numbers: bool) -> TypeError:
    kinds = (Tensor, int, float) if numbers else (Tensor,)
    wrong = [(i, leaf) for i, leaf in enumerate(flat.leaves) if not isinstance(leaf, kinds)]
    kind = "tensors, ints and floats" if numbers else "tensors"
    each = listed(wrong, lambda pair: f"{flat.path(pair[0])} ({_type(pair[1])})")
    return TypeError(f"{where}: only {kind} can be exchanged, not {each}. torch.as_tensor makes tensors of numbers")


def _type(leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")


def _of_numbers(axis: Axis, where: str, numbers: Sequence[Any], same: Any) -> list[Any]:
    reduce: Callable[[Any], Any] = {"pmax": max, "pmin": min}.get(where, sum)
    if axis.slot.count == 1:
        return [sum([x]) for x in numbers]  # as with several: bools become ints

    def combine(everybody: list[Brought]) -> list[list[Any]]:
        own = [each.value for each in everybody]
        columns = zip(*axis.run.peers.everywhere(own, where, (inside(axis), same), say), strict=True)
        # A NaN wins, as in tensors; Python's `max` and `min` keep or lose it by its place.
        return [[next((x for x in column if x != x), None) or reduce(column) for column in columns]] * len(own)

    def say() -> str:
        return said_of(same, ["a tensor"] * sum(same[1]))

    return meet(axis, Brought(where, ("numbers", same), say, numbers), combine)


def _exchange(axis: Axis, operation: Operation, tensors: Sequence[Tensor], same: Any) -> Sequence[Tensor]:
    if not tensors:
        return ()
    if isinstance(operation, Extreme):  # without a graph, and so without tensors that are saved for it
        found = _exchanged(axis, operation, [x.detach() for x in tensors], same)
        return Undifferentiable.apply(operation.name, len(found), *found, *tensors)
    return _exchanged(axis, operation, tensors, same)


def _exchanged(axis: Axis, operation: Operation, tensors: Sequence[Tensor], same: Any) -> Sequence[Tensor]:
    if axis.slot.count == 1:
        found = [operation.results([x], i)[0] for i, x in enumerate(tensors)]
        return [y.clone() if y is x else y for x, y in zip(tensors, found, strict=True)]  # as with several
    return Place(axis, operation, same).exchanged(tensors).tensors
