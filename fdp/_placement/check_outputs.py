"""What the shards have returned for a leaf of the output: whether it can be joined."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fdp._placement.check_dims import REDUCTIONS, check_out_dim
from fdp._placement.devices import is_faking
from fdp._placement.moves import copy, is_inexact, layers
from fdp._trees.listing import listed
from fdp._trees.opaque import is_array
from fdp._trees.tree import Flat

Weights = Sequence[float] | None


def raise_any(problems: Sequence[str | None], choices: str, where: str, hint: str) -> None:
    """Raise if some leaves cannot be joined."""
    if any(problems):
        hint = hint or f"{choices} says how each leaf is joined"
        raise ValueError(f"{where}: {listed(list(filter(None, problems)), separator='; ')}. {hint}")


def problem_of(column: Sequence[Any], flat: Flat, index: int, weights: Weights) -> str | None:
    """Why the values of one leaf cannot be joined, None if they can."""
    spec = flat.specs[index]
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


def may_have_rows(shards: Sequence[Sequence[Any]]) -> bool:
    """Whether all leaves are tensors with a dim 0, and those of shards alike but, perhaps, for their shapes.

    So are almost all outputs. Then torch says whether they can be concatenated.
    """
    first: list[Any] | None = None
    for leaves in shards:
        if not _TENSOR.issuperset(map(type, leaves)):
            return False
        kinds = list(map(_kind, leaves))
        if first is None and any(is_nested or ndim == 0 for _, ndim, is_nested in kinds):
            return False
        if kinds != (first or kinds):
            return False
        first = kinds
    return True


_TENSOR = frozenset({torch.Tensor})
_kind = operator.attrgetter("dtype", "ndim", "is_nested")


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
