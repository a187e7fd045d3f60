"""What the shards have returned for each leaf of the output: whether it can be joined."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._placement.moves import is_inexact, layers
from fdp._trees import torch_private
from fdp._trees.message_lists import listed, quoted
from fdp._trees.opaque import is_array

Weights = Sequence[float] | None
Column = Sequence[Any]
"""The values of one leaf, of each shard."""

JOINS = {
    "items": "lists joined",
    "mean": "mean by rows",
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "stack": "stacked",
    "list": "a list",
}
"""How an output may be joined, beside an int and None, and what `explain` says of it."""


def are_alike(column: Column, dim: int) -> bool:
    """Whether these are tensors with rows that differ in nothing else but, perhaps, their shapes: as almost all are."""
    if not _TENSOR.issuperset(map(type, column)):
        return False
    kinds = list(map(_kind, column))
    _, ndim, is_nested = kinds[0]
    return not is_nested and -ndim <= dim < ndim and kinds.count(kinds[0]) == len(kinds)


_TENSOR = frozenset({Tensor})
_kind: Any = operator.attrgetter("dtype", "ndim", "is_nested")


def problem_of(column: Column, spec: Any, weights: Weights) -> str | None:
    """Why the values of a leaf cannot be joined, None if they can."""
    if spec is None or spec == "list":
        return None
    if type(spec) is not int and not (isinstance(spec, str) and spec in JOINS):
        names = ", ".join(repr(name) for name in JOINS if name != "items")
        return (
            f"has the out_dim {quoted(spec)}; expected an int (concatenate), None (slot 0's value), 'items' (join "
            f"lists) or one of {names}"
        )
    if spec == "items":
        kinds = {type(value) for value in column}
        if len(kinds) == 1 and kinds <= {list, tuple}:
            return None
        return f"is {sorted(kind.__name__ for kind in kinds)}; 'items' joins lists or tuples"
    tensors = [value for value in column if isinstance(value, Tensor)]
    if not tensors:
        return _values_problem(column)
    if len(tensors) < len(column):
        return f"is a tensor in some shards and none in others: {_values(column)}"
    if len(tensors) > 1 and any(tensor.is_nested for tensor in tensors):
        return (
            "is a nested tensor, which is not joined: return a padded one and its lengths, or choose 'list' (all "
            "values) or None (slot 0's value)"
        )
    return _dim_problem(tensors, spec) if isinstance(spec, int) else _reduce_problem(tensors, spec, weights)


def _values_problem(column: Column) -> str | None:
    """The same for what is no tensor."""
    if is_array(column[0]):
        return "is a numpy array, which is not joined: return torch.as_tensor(array)"
    if all(same_value(column[0], value) for value in column):
        return None
    return (
        f"differs between shards: {_values(column)}. A value that is no tensor is returned once: return a tensor, or "
        "choose 'list' (all values) or None (slot 0's)"
    )


def _dim_problem(tensors: Sequence[Tensor], dim: int) -> str | None:
    shape, ndim = tuple(tensors[0].shape), tensors[0].ndim
    if ndim == 0:
        return (
            f"is a 0-dim tensor, which cannot be concatenated along dim {dim}: choose 'mean', 'sum', "
            "'max', 'min', 'stack', 'list' or None (slot 0's value)"
        )
    if not -ndim <= dim < ndim:
        return f"has shape {shape}, for which out_dim {dim} is out of range"
    at = dim % ndim
    return _differing(tensors, lambda x: x.shape[:at] + x.shape[at + 1 :], f"cannot be concatenated along dim {dim}")


def _reduce_problem(tensors: Sequence[Tensor], spec: str, weights: Weights) -> str | None:
    first = tensors[0]
    if spec in ("max", "min") and first.is_complex():
        return f"is complex, which has no {spec!r}"
    if spec == "sum" and first.dtype is torch.bool:
        return "is bool, whose sum would not be bool: choose 'max' (any), 'min' (all), or return integers"
    if spec == "mean" and is_inexact(first):
        if weights is None and len(tensors) > 1:
            return "has out_dim 'mean', but the rows of the shards are not known: pass weights"
        if weights is not None and sum(weights) == 0:
            return "has out_dim 'mean', but there are no rows: the mean over zero rows is not defined"
    return _differing(tensors, lambda x: x.shape, f"have no {spec!r}: choose 0 to concatenate")


def _differing(tensors: Sequence[Tensor], fit: Callable[[Tensor], Any], problem: str) -> str | None:
    """Why tensors do not go together; what `fit` says of each is what has to be equal of their shapes."""
    if len({(x.ndim, *fit(x)) for x in tensors}) > 1:
        return f"has shapes {listed(tensors, lambda tensor: str(tuple(tensor.shape)))}, which {problem}"
    dtypes = [tensor.dtype for tensor in tensors]
    if dtypes.count(dtypes[0]) == len(dtypes):
        return None
    each = ", ".join(f"{dtype} in shard {dtypes.index(dtype)}" for dtype in dict.fromkeys(dtypes))
    return f"has dtypes that differ, {each}: convert it in the function, as with .float()"


def must_agree(value: Any, spec: Any) -> bool:
    """Whether the mean of a leaf is what all shards have."""
    return spec == "mean" and isinstance(value, Tensor) and not is_inexact(value)


def differing_integers(columns: Sequence[Column], specs: Sequence[Any]) -> list[tuple[int, str]]:
    """Those under "mean" that differ between shards, compared at once: the host waits for one number.

    All are on one device. Each comes with its position, and with what is wrong.
    """
    found = [i for i, spec in enumerate(specs) if must_agree(columns[i][0], spec)]
    if not found or len(columns[0]) < 2 or torch.compiler.is_dynamo_compiling():
        return []
    tensors = [[layers(x)[-1] for x in columns[i]] for i in found]
    if tensors[0][0].is_meta or torch_private.fake_mode() is not None:
        return []
    packed = torch.stack([torch.cat([x.reshape(-1).long() for x in shard]) for shard in zip(*tensors, strict=True)])
    differs = (packed != packed[0]).any(0)
    if not differs.any():
        return []
    return [
        (
            i,
            f"is {own[0].dtype}, which has no 'mean', and differs between shards ({_values(own)}): choose 'sum', "
            "'max', 'min' or 'list', or return a float",
        )
        for i, own, part in zip(found, tensors, differs.split([own[0].numel() for own in tensors]), strict=True)
        if part.any()
    ]


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are equal; NaN is to itself."""
    if a is b:
        return True
    try:
        return bool(a == b) or bool(a != a and b != b)  # NaN equals NaN here
    except Exception:  # an `==` that does not say yes or no
        return False


def _values(column: Column) -> str:
    return listed([f"{str(value)[:60]} in shard {i}" for i, value in enumerate(column)], most=4)
