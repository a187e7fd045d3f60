"""From shards to one tree: what may be joined how, and joining it."""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from fdp._placement.check_dims import REDUCTIONS, check_out_dim
from fdp._placement.devices import is_faking
from fdp._placement.moves import accumulator, concat, copy, is_inexact, layers, to_device, total
from fdp._trees.describe import first_difference
from fdp._trees.listing import listed
from fdp._trees.profiling import staged
from fdp._trees.registry import flattened
from fdp._trees.tree import Flat, flatten, is_array, unflatten
from fdp._trees.types import Dims, Tree

Weights = Sequence[float] | None


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
    flats = [flatten(shard, name, dims, choices, where) for shard in shards]
    for i, flat in enumerate(flats[1:], 1):
        if _structures_differ(flat.structure, flats[0].structure):
            path, one, other = first_difference(flats[0].structure, flat.structure, name)
            raise ValueError(f"{where}: shards differ in structure: {path} is {one} in shard 0, {other} in shard {i}")
    columns = list(zip(*(flat.leaves for flat in flats), strict=True))
    for i, (leaf, spec) in enumerate(zip(flats[0].leaves, flats[0].specs, strict=True)):
        if callable(spec):
            flats[0].specs[i] = spec(leaf) if isinstance(leaf, torch.Tensor) else 0
    _raise_any([_problem(column, flats[0], i, weights) for i, column in enumerate(columns)], choices, where, hint)
    specs = flats[0].specs
    if torch.compiler.is_compiling():  # ids would become guards on these very tensors
        leaves = [
            _join_leaf(column, spec, weights, device, flats[0], i)
            for i, (column, spec) in enumerate(zip(columns, specs, strict=True))
        ]
        return unflatten(flats[0].structure, leaves)
    keys = [
        (spec, *map(id, column)) if isinstance(column[0], torch.Tensor) else (spec, i)
        for i, (column, spec) in enumerate(zip(columns, specs, strict=True))
    ]
    joined: dict[tuple[Any, ...], Any] = {}
    for i, (key, column) in enumerate(zip(keys, columns, strict=True)):
        if key not in joined:
            joined[key] = _join_leaf(column, key[0], weights, device, flats[0], i)
    return unflatten(flats[0].structure, [joined[key] for key in keys])


def _join_tensors(
    column: Sequence[torch.Tensor], flat: Flat, weights: Weights, device: torch.device, where: str, hint: str
) -> torch.Tensor:
    """The same for trees that are a tensor each."""
    problem = _problem(column, flat, 0, weights)
    if problem is not None:
        _raise_any([problem], "aux_dims" if flat.name == "aux" else "out_dims", where, hint)
    return _join_leaf(column, flat.specs[0], weights, device, flat, 0)


def _raise_any(problems: Sequence[str | None], choices: str, where: str, hint: str) -> None:
    """Raise if some leaves cannot be joined."""
    if any(problems):
        hint = hint or f"{choices} says how each leaf is joined"
        raise ValueError(f"{where}: {listed(list(filter(None, problems)), separator='; ')}. {hint}")


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


# ---- what cannot be joined


def _problem(column: Sequence[Any], flat: Flat, index: int, weights: Weights) -> str | None:
    """Why the values of one leaf cannot be joined, None if they can."""
    spec = flat.specs[index]
    if type(spec) is int and spec == 0 and not torch.compiler.is_compiling() and _have_rows(column):
        return None
    if type(spec) is not int and spec is not None and not (isinstance(spec, str) and spec in REDUCTIONS):
        try:  # naming the leaf takes time
            check_out_dim(spec, flat.path(index))
        except ValueError as error:
            return str(error)
    if spec is None or spec == "list":
        return None
    if spec == "items":
        kinds = {type(value) for value in column}
        if len(kinds) == 1 and kinds <= {list, tuple}:
            return None
        return f"{flat.path(index)} is {sorted(kind.__name__ for kind in kinds)}; 'items' joins lists or tuples"
    tensors = [value for value in column if isinstance(value, torch.Tensor)]
    if not tensors:
        if is_array(column[0]):
            return f"{flat.path(index)} is a numpy array, which is not joined: return torch.as_tensor(array)"
        return None if all(same_value(column[0], value) for value in column) else _differs(column, flat.path(index))
    if len(tensors) < len(column):
        return f"{flat.path(index)} is a tensor in some shards and none in others: {_values(column)}"
    if len(tensors) > 1 and True in [tensor.is_nested for tensor in tensors] and not _can_add(tensors, spec):
        return (
            f"{flat.path(index)} is a nested tensor, which is not joined: return a padded one and its lengths, or "
            "choose 'list' (all values) or None (slot 0's value)"
        )
    if isinstance(spec, int):
        problem = _concat_problem(tensors, spec)
    else:
        problem = _reduce_problem(tensors, spec, weights, flat, index)
    return problem and f"{flat.path(index)} {problem}"


def _have_rows(column: Sequence[Any]) -> bool:
    """Whether these are tensors that differ in nothing but the rows along dim 0: that of almost all outputs."""
    if set(map(type, column)) != {torch.Tensor} or True in map(_is_nested, column) or len(set(map(_dtype, column))) > 1:
        return False
    shapes = set(map(_shape, column))
    return () not in shapes and len({shape[1:] for shape in shapes}) == 1


_is_nested, _dtype, _shape = map(operator.attrgetter, ("is_nested", "dtype", "shape"))


def _can_add(tensors: Sequence[torch.Tensor], spec: Any) -> bool:
    """Whether there is a sum of nested tensors: torch knows it of those with the same offsets."""
    if spec not in ("sum", "mean") or not all(x.is_nested and x.layout is torch.jagged for x in tensors):
        return False
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _concat_problem(tensors: Sequence[torch.Tensor], dim: int) -> str | None:
    ndim = tensors[0].ndim
    if ndim == 0:
        return (
            f"is a 0-dim tensor, which cannot be concatenated along dim {dim}: choose 'mean', 'sum', "
            "'max', 'min', 'stack', 'list' or None (slot 0's value)"
        )
    if not -ndim <= dim < ndim:
        return f"has shape {tuple(tensors[0].shape)}, for which out_dim {dim} is out of range"
    at = dim % ndim
    if len({(tensor.dtype, tensor.ndim, tensor.shape[:at], tensor.shape[at + 1 :]) for tensor in tensors}) == 1:
        return None
    return _dtype_problem(tensors) or f"has shapes {_shapes(tensors)}, which cannot be concatenated along dim {dim}"


def _reduce_problem(tensors: Sequence[torch.Tensor], spec: str, weights: Weights, flat: Flat, index: int) -> str | None:
    if len({tensor.shape for tensor in tensors}) > 1:
        return f"has shapes {_shapes(tensors)}, which have no {spec!r}: choose 0 to concatenate"
    if spec in ("max", "min") and tensors[0].is_complex():
        return f"is complex, which has no {spec!r}"
    if spec == "sum" and tensors[0].dtype is torch.bool:
        return "is bool, whose sum would not be bool: choose 'max' (any), 'min' (all), or return integers"
    if spec == "mean" and not is_inexact(tensors[0]):
        if not torch.compiler.is_compiling() and not all(_equal(tensors[0], t, flat, index) for t in tensors[1:]):
            return (
                f"is {tensors[0].dtype}, which has no 'mean', and differs between shards ({_values(tensors)}): choose "
                "'sum', 'max', 'min' or 'list', or return a float"
            )
    elif spec == "mean" and weights is None and len(tensors) > 1:
        return "has out_dim 'mean', but the rows of the shards are not known: pass weights"
    elif spec == "mean" and weights is not None and sum(weights) == 0:
        return "has out_dim 'mean', but there are no rows: the mean over zero rows is not defined"
    return _dtype_problem(tensors)


def _structures_differ(one: Any, other: Any) -> bool:
    if _COMPILES_COMPARISONS or not torch.compiler.is_compiling():
        return one != other
    if one.type is not other.type or one.entries() != other.entries():
        return True
    return any(map(_structures_differ, one.children(), other.children()))


# The compiler of torch before 2.13 does not compare optree's structures, nor does that of 2.13 on Python 3.13.
_COMPILES_COMPARISONS = torch.__version__ >= "2.13" and sys.version_info < (3, 13)


def _dtype_problem(tensors: Sequence[torch.Tensor]) -> str | None:
    if len({tensor.dtype for tensor in tensors}) == 1:
        return None
    kinds = {tensor.dtype: i for i, tensor in reversed(list(enumerate(tensors)))}
    each = ", ".join(f"{dtype} in shard {i}" for dtype, i in sorted(kinds.items(), key=lambda kind: kind[1]))
    return f"has dtypes that differ, {each}: convert it in the function, as with .float()"


def _equal(a: torch.Tensor, b: torch.Tensor, flat: Flat, index: int) -> bool:
    one, other = layers(a)[-1], layers(b)[-1]
    if one.is_meta:
        return True
    moved = copy(other, one.device, flat, index)
    return is_faking() or torch.equal(one, moved)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are equal; NaN is to itself."""
    if a is b:
        return True
    try:
        return bool(a == b) or bool(a != a and b != b)  # NaN equals NaN here
    except Exception:  # an `==` that does not say yes or no
        return False


def _differs(column: Sequence[Any], path: str) -> str:
    return (
        f"{path} differs between shards: {_values(column)}. A value that is no tensor is returned once: return a "
        "tensor, or choose 'list' (all values) or None (slot 0's)"
    )


def _values(column: Sequence[Any]) -> str:
    return ", ".join(f"{str(value)[:60]} in shard {i}" for i, value in enumerate(column[:4])) + ", ..." * (
        len(column) > 4
    )


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return listed(tensors, lambda tensor: str(tuple(tensor.shape)))
