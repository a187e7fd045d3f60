"""From shards to one tree."""

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from fdp._placement.check_outputs import Weights, may_have_rows, problem_of, raise_any
from fdp._placement.moves import accumulator, concat, copy, is_inexact, to_device, total
from fdp._trees.describe import first_difference
from fdp._trees.profiling import staged
from fdp._trees.registry import flattened
from fdp._trees.tree import Flat, flatten, leaves_up_to, unflatten
from fdp._trees.types import Dims, Tree


@staged("gather")
def join(
    shards: Sequence[Tree],
    dims: Dims,
    weights: Weights,
    device: torch.device,
    name: str,
    where: str,
    hint: str = "",
) -> Tree:
    """Join the trees of all shards, leaf by leaf, on one device. `weights` are for means: the rows of each shard.

    `hint` ends messages about leaves: where the user says how each is joined.
    """
    choices = "aux_dims" if name == "aux" else "out_dims"
    if type(dims) in (int, str) and set(map(type, shards)) == {torch.Tensor} and not torch.compiler.is_compiling():
        leaves, structure = flattened(shards[0], name)
        return _join_tensors(shards, Flat(name, leaves, [dims], structure, []), weights, device, where, hint)
    first = flatten(shards[0], name, dims, choices, where)
    flats = [first, *[_alike(shard, first) or flatten(shard, name, dims, choices, where) for shard in shards[1:]]]
    for i, flat in enumerate(flats[1:], 1):
        if flat.structure is not first.structure and _structures_differ(flat.structure, first.structure):
            path, one, other = first_difference(first.structure, flat.structure, name)
            raise ValueError(f"{where}: shards differ in structure: {path} is {one} in shard 0, {other} in shard {i}")
    columns = list(zip(*[flat.leaves for flat in flats], strict=True))
    for i, (leaf, spec) in enumerate(zip(first.leaves, first.specs, strict=True)):
        if callable(spec):
            first.specs[i] = spec(leaf) if isinstance(leaf, torch.Tensor) else 0
    specs, is_compiling = first.specs, torch.compiler.is_compiling()
    are_zero = specs.count(0) == len(specs) and {int}.issuperset(map(type, specs))
    if are_zero and not is_compiling and may_have_rows([flat.leaves for flat in flats]):
        with contextlib.suppress(RuntimeError):  # of shapes that differ in more: what follows says which
            return unflatten(first.structure, _concatenated(flats, columns, device))
    raise_any([problem_of(column, first, i, weights) for i, column in enumerate(columns)], choices, where, hint)
    if is_compiling:  # ids would become guards on these very tensors
        leaves = [
            _join_leaf(column, spec, weights, device, first, i)
            for i, (column, spec) in enumerate(zip(columns, specs, strict=True))
        ]
        return unflatten(first.structure, leaves)
    keys = [
        (spec, *map(id, column)) if isinstance(column[0], torch.Tensor) else (spec, i)
        for i, (column, spec) in enumerate(zip(columns, specs, strict=True))
    ]
    joined: dict[tuple[Any, ...], Any] = {}
    for i, (key, column) in enumerate(zip(keys, columns, strict=True)):
        if key not in joined:
            joined[key] = _join_leaf(column, key[0], weights, device, first, i)
    return unflatten(first.structure, [joined[key] for key in keys])


def _alike(tree: Tree, first: Flat) -> Flat | None:
    """A tree that is one container of leaves, as the first is: flattened without a look at its keys."""
    structure = first.structure
    if torch.compiler.is_compiling() or structure.num_nodes != structure.num_leaves + 1:
        return None
    if type(tree) is not structure.type or type(tree) not in (dict, list, tuple):
        return None
    try:
        leaves = leaves_up_to(structure, tree)
    except ValueError:  # it has other keys
        return None
    return first._replace(leaves=leaves) if _TENSOR.issuperset(map(type, leaves)) else None


_TENSOR = frozenset({torch.Tensor})


def _concatenated(
    flats: Sequence[Flat], columns: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> list[torch.Tensor]:
    """Tensors that have rows; one that stands in two places is one tensor."""
    are_here = all({device}.issuperset(map(_device, flat.leaves)) for flat in flats)
    keys: Sequence[Any] = range(len(columns))
    if len(set(map(id, flats[0].leaves))) < len(columns):
        keys = list(zip(*[map(id, flat.leaves) for flat in flats], strict=True))
    joined: dict[Any, torch.Tensor] = {}
    for i, (key, column) in enumerate(zip(keys, columns, strict=True)):
        if key not in joined:
            moved = column if are_here else [copy(value, device, flats[0], i) for value in column]
            joined[key] = concat(moved, 0)
    return [joined[key] for key in keys]


_device: Callable[[torch.Tensor], torch.device] = operator.attrgetter("device")


def _join_tensors(
    column: Sequence[torch.Tensor], flat: Flat, weights: Weights, device: torch.device, where: str, hint: str
) -> torch.Tensor:
    """The same for trees that are a tensor each."""
    problem = problem_of(column, flat, 0, weights)
    if problem is not None:
        raise_any([problem], "aux_dims" if flat.name == "aux" else "out_dims", where, hint)
    return _join_leaf(column, flat.specs[0], weights, device, flat, 0)


def _join_leaf(column: Sequence[Any], spec: Any, weights: Weights, device: torch.device, flat: Flat, index: int) -> Any:
    if spec == "items":
        name, memo = flat.path(index), {}
        return type(column[0])(chain.from_iterable(to_device(value, device, name, memo) for value in column))
    if spec is None:
        column = column[:1]  # nobody needs the others on this device
    moved = [
        copy(value, device, flat, index) if isinstance(value, torch.Tensor) and value.device != device else value
        for value in column
    ]
    if spec == "list":
        return moved
    if spec is None or not isinstance(moved[0], torch.Tensor):
        return moved[0]
    if isinstance(spec, int):
        return concat(moved, spec)
    return mean(moved, weights) if spec == "mean" else _REDUCTIONS[spec](moved)


def mean(tensors: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
    """The weighted mean. Integers must agree; a tensor of weight 0 is left out, not multiplied: NaN * 0 is NaN."""
    if not is_inexact(tensors[0]):
        if torch.compiler.is_compiling():
            for tensor in tensors[1:]:
                torch.ops.aten._assert_async.msg(
                    (tensor == tensors[0]).all(), "integers under 'mean' differ between shards"
                )
        return tensors[0]
    if weights is None or len(tensors) == 1:
        return tensors[0]
    # Half precision has no room for sums over rows: 4097 is not even a number there.
    wide = accumulator(tensors[0].dtype)
    scale = 2.0 ** -math.frexp(max(weights))[1]  # exact, and no weight is too large or small for it
    scaled = [weight * scale for weight in weights]
    weighted = [
        (tensor if tensor.dtype is wide else tensor.to(wide)) * weight
        for tensor, weight in zip(tensors, scaled, strict=True)
        if weight != 0
    ]
    whole, joined = sum(scaled), total(weighted)
    joined = joined if whole == 1 else joined / whole
    return joined if wide is tensors[0].dtype else joined.to(tensors[0].dtype)


_REDUCTIONS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "sum": total,
    # Over a stack, not pairwise: equal maxima then share their gradient evenly.
    "max": lambda tensors: torch.stack(list(tensors)).amax(0) if len(tensors) > 1 else tensors[0],
    "min": lambda tensors: torch.stack(list(tensors)).amin(0) if len(tensors) > 1 else tensors[0],
    "stack": lambda tensors: torch.stack(list(tensors)),
}


def _structures_differ(one: Any, other: Any) -> bool:
    if _COMPILES_COMPARISONS or not torch.compiler.is_compiling():
        return one != other
    if one.type is not other.type or one.entries() != other.entries():
        return True
    return any(map(_structures_differ, one.children(), other.children()))


# The compiler of torch before 2.13 does not compare optree's structures, nor does that of 2.13 on Python 3.13.
_COMPILES_COMPARISONS = torch.__version__ >= "2.13" and sys.version_info < (3, 13)
