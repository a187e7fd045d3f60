"""From shards to one tree."""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from fdp._placement.check_outputs import Column, Weights, are_alike, differing_integers, problem_of
from fdp._placement.moves import Memo, accumulator, concat, copy_once, is_inexact, to_device, total
from fdp._placement.packing import copy_all
from fdp._trees.describe import first_difference
from fdp._trees.message_lists import listed
from fdp._trees.profiling import staged
from fdp._trees.tree import Flat, flatten, unflatten
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

    `hint` ends messages about leaves: where the user says how each is joined. A tensor that stands in two places is
    joined once.
    """
    choices = "aux_dims" if name == "aux" else "out_dims"
    flats = [flatten(shard, name, dims, choices, where) for shard in shards]
    first, *others = flats
    for i, flat in enumerate(others, 1):
        if flat.structure is not first.structure and _structures_differ(flat.structure, first.structure):
            path, one, other = first_difference(first.structure, flat.structure, name)
            raise ValueError(f"{where}: shards differ in structure: {path} is {one} in shard 0, {other} in shard {i}")
    resolve_specs(first)
    is_compiling = torch.compiler.is_dynamo_compiling()
    if is_compiling:  # a dim may be a symbol there, which no message can hold
        first.specs[:] = [int(spec) if isinstance(spec, int) else spec for spec in first.specs]
    columns: list[Column] = list(zip(*[flat.leaves for flat in flats], strict=True))
    if is_compiling or not all(_are_on(device, flat.leaves) for flat in flats):
        columns = _brought(columns, device, first)
    problems: list[tuple[int, str]] = []
    leaves: list[Any] = []
    joined: dict[Any, Any] = {}
    # While compiling, ids would become guards on these very tensors.
    has_ties = not is_compiling and len(set(map(id, first.leaves))) < len(first.leaves)
    for i, (column, spec) in enumerate(zip(columns, first.specs, strict=True)):
        key = (spec, *map(id, column)) if has_ties and isinstance(column[0], torch.Tensor) else i
        if key not in joined:
            is_usual = not is_compiling and type(spec) is int and are_alike(column, spec)
            problem = None if is_usual else problem_of(column, spec, weights)
            try:
                joined[key] = None if problem else _joined(column, spec, weights)
            except RuntimeError:  # of their shapes
                problem = problem_of(column, spec, weights)
                if problem is None:
                    raise
            problems += [(i, problem)] if problem else ()
        leaves.append(joined.get(key))
    if "mean" in first.specs and not problems:
        problems = differing_integers(columns, first.specs)
    if problems:
        hint = hint or f"{choices} says how each leaf is joined"
        each = listed([f"{first.path(i)} {problem}" for i, problem in problems], separator="; ")
        raise ValueError(f"{where}: {each}. {hint}")
    return unflatten(first.structure, leaves)


_device_of: Callable[[torch.Tensor], torch.device] = operator.attrgetter("device")


def _are_on(device: torch.device, leaves: Sequence[Any]) -> bool:
    """Whether all are tensors on a device."""
    try:
        return {device}.issuperset(map(_device_of, leaves))
    except AttributeError:
        return False


def resolve_specs(flat: Flat) -> None:
    """Put what functions among the specs say of the tensors in their place."""
    for i, spec in enumerate(flat.specs):
        if callable(spec):
            flat.specs[i] = spec(flat.leaves[i]) if isinstance(flat.leaves[i], torch.Tensor) else 0


def _brought(columns: Sequence[Column], device: torch.device, flat: Flat) -> list[Column]:
    """What is needed of each leaf, on the device. What several slots have returned is copied once."""
    needed = [column[:1] if spec is None else column for column, spec in zip(columns, flat.specs, strict=True)]
    memo: Memo = {}
    pairs = [(x, i) for i, column in enumerate(needed) for x in column if isinstance(x, torch.Tensor)]
    copy_all([(x, flat, i) for x, i in pairs if x.device != device], [device], memo)
    found: list[Column] = []
    for i, (column, spec) in enumerate(zip(needed, flat.specs, strict=True)):
        if spec == "items":
            found.append([to_device(value, device, flat.path(i), memo) for value in column])
        else:
            found.append([copy_once(x, device, flat, i, memo) if isinstance(x, torch.Tensor) else x for x in column])
    return found


def _joined(column: Column, spec: Any, weights: Weights) -> Any:
    first = column[0]
    if type(spec) is int:
        return concat(column, spec) if isinstance(first, torch.Tensor) else first
    if spec == "items":
        return type(first)(chain.from_iterable(column))
    if spec == "list":
        return list(column)
    if spec is None or not isinstance(first, torch.Tensor):
        return first
    return mean(column, weights) if spec == "mean" else _REDUCTIONS[spec](column)


def mean(tensors: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
    """The weighted mean. Integers must agree; a tensor of weight 0 is left out, not multiplied: NaN * 0 is NaN."""
    if not is_inexact(tensors[0]):
        if torch.compiler.is_dynamo_compiling():
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
    weighted: list[torch.Tensor] = []
    whole = 0.0
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight != 0:
            weighted.append((tensor if tensor.dtype is wide else tensor.to(wide)) * (weight * scale))
            whole += weight * scale
    joined = total(weighted)
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
    if not torch.compiler.is_dynamo_compiling():
        return one != other
    # The compiler of torch before 2.13 does not compare optree's structures, nor does that of 2.13 on Python 3.13.
    if one.type is not other.type or one.entries() != other.entries():
        return True
    return any(map(_structures_differ, one.children(), other.children()))
