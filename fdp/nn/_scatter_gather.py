"""torch.nn.parallel's scatter and gather, on the partitions and the trees of fdp."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp._placement.common_rows import check_tracing, partition_of
from fdp._placement.devices import as_device, as_devices
from fdp._placement.join import join
from fdp._placement.leaves import place
from fdp._placement.moves import Memo
from fdp._placement.partition import Partition, chunked, make_partition
from fdp._placement.sharded import Slots
from fdp._placement.split_dims import flatten_args, rows_of
from fdp._trees.tree import Flat, tensors_in
from fdp._trees.types import DeviceLike, Tree

Inputs = tuple[tuple[Any, ...], ...]
Keywords = tuple[dict[str, Any], ...]

_MINUS_ONE = (
    'Using -1 to represent CPU tensor is deprecated. Please use a device object or string instead, e.g., "cpu".'
)
_SCALARS = (
    "Was asked to gather along dimension {}, but all input tensors were scalars; will instead unsqueeze and return a "
    "vector."
)
_HINT = (
    "fdp.dp_apply has out_dims to say how each leaf is joined; a DataParallel can override gather. A model of "
    "transformers returns no cache with use_cache=False"
)


def scatter(inputs: Tree, target_gpus: Sequence[DeviceLike | int], dim: int = 0) -> Sequence[Tree]:
    """Split the tensors of a tree by rows, as `torch.nn.parallel.scatter` does.

    `gather(scatter(x, devices), devices[0]) == x` for a tensor.

    >>> import torch
    >>> from fdp.nn import scatter
    >>> scatter({"x": torch.arange(5), "name": "a"}, ["cpu", "cpu"])
    [{'x': tensor([0, 1, 2]), 'name': 'a'}, {'x': tensor([3, 4]), 'name': 'a'}]

    Args:
        inputs: Any tree. Tensors of at least one dimension are split; other values go whole to every device.
        target_gpus: One device a part; an int is the index of an accelerator.
        dim: The dimension that is split.

    Returns:
        A tuple of tensors for a tensor, else a list: a tree for each device that has rows. `torch.chunk` cuts each
        tensor by itself.

    Raises:
        ValueError: Tensors that differ in their number of chunks (torch drops the surplus), a dim out of range, or no
            such device.
        TypeError: An object that holds tensors but is no tree (torch gives every device the whole).
    """
    columns, _ = _split([("inputs", inputs)], as_devices(target_gpus, "scatter"), dim, None, "scatter", on_all=True)
    return tuple(columns[0]) if isinstance(inputs, torch.Tensor) else columns[0]


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, target_gpus: Sequence[DeviceLike | int], dim: int = 0
) -> tuple[Inputs, Keywords]:
    """Split positional and keyword arguments by rows, as `torch.nn.parallel.scatter_gather.scatter_kwargs` does.

    >>> import torch
    >>> from fdp.nn import scatter_kwargs
    >>> scatter_kwargs((torch.arange(3),), {"scale": 2}, ["cpu", "cpu"])
    (((tensor([0, 1]),), (tensor([2]),)), ({'scale': 2}, {'scale': 2}))

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments, or None.
        target_gpus: One device a part; an int is the index of an accelerator.
        dim: The dimension that is split.

    Returns:
        For each device that has rows, its positional arguments and its keyword arguments. Without any arguments both
        are empty.

    Raises:
        ValueError, TypeError: As `scatter` does, for all arguments together.
    """
    devices = as_devices(target_gpus, "scatter_kwargs")
    args, keywords, _ = split_call(inputs, kwargs or {}, devices, dim, None, "scatter_kwargs", on_all=True)
    return args, keywords


def gather(outputs: Sequence[Tree], target_device: DeviceLike | int, dim: int = 0) -> Tree:
    """Join the outputs of all devices on one, as `torch.nn.parallel.gather` does.

    >>> import torch
    >>> from fdp.nn import gather
    >>> gather([{"x": torch.zeros(2), "name": "a"}, {"x": torch.ones(1), "name": "a"}], "cpu")
    {'x': tensor([0., 0., 1.]), 'name': 'a'}

    Args:
        outputs: A tree for each device. Tensors are concatenated, 0-dim tensors make a vector. Other values must be
            equal and are returned once.
        target_device: Where the result goes; an int is the index of an accelerator.
        dim: The dimension that is concatenated.

    Returns:
        One tree.

    Raises:
        ValueError: No outputs, or structures, shapes, dtypes or values that are no tensors differ.
        TypeError: An object that holds tensors but is no tree.

    Warns:
        UserWarning: 0-dim tensors became a vector.
        FutureWarning: -1 stands for the CPU.
    """
    outputs = list(outputs)
    if not outputs:
        raise ValueError("gather: there are no outputs; expected at least one tree to gather from")
    return join_outputs(outputs, as_target(target_device, "gather"), dim, "gather")


def as_target(device: DeviceLike | int, where: str) -> torch.device:
    """Where outputs go; -1 is what torch once called the CPU."""
    if device == -1 and not isinstance(device, bool):
        warnings.warn(_MINUS_ONE, FutureWarning, stacklevel=3)
        return torch.device("cpu")
    return as_device(device, where)


def check_dim(dim: int, where: str) -> None:
    """One dim for all tensors."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{where}: dim must be an int, got {dim!r}")


def split_call(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: tuple[torch.device, ...],
    dim: int,
    weights: Sequence[float] | None,
    where: str,
    *,
    on_all: bool = False,
) -> tuple[Inputs, Keywords, Partition | None]:
    """The arguments of each replica, and the partition for them; nothing if there are no arguments."""
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"{where}: inputs must be a tuple of positional arguments, got {type(inputs).__name__}")
    if not inputs and not kwargs:
        return (), (), None
    named = [(f"inputs[{i}]", value) for i, value in enumerate(inputs)]
    named += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    columns, partition = _split(named, devices, dim, weights, where, on_all=on_all)
    for column, (_, value) in zip(columns, named, strict=True):
        if isinstance(value, list | dict) and not value:  # one for all: forward may collect something in it
            column[:] = [value] * len(column)
    shards, n = list(zip(*columns, strict=True)), len(inputs)
    return tuple(s[:n] for s in shards), tuple(dict(zip(kwargs, s[n:], strict=True)) for s in shards), partition


def join_outputs(outputs: Sequence[Tree], device: torch.device, dim: int, where: str) -> Tree:
    """The outputs of all replicas as one; 0-dim tensors become a vector."""
    check_dim(dim, where)
    if any(tensor.ndim == 0 for tensor in tensors_in(outputs[0])):
        warnings.warn(_SCALARS.format(dim), stacklevel=3)
    return join(outputs, lambda tensor: dim if tensor.ndim else "stack", None, device, "output", where, _HINT)


def _split(
    named: Sequence[tuple[str, Tree]],
    devices: tuple[torch.device, ...],
    dim: int,
    weights: Sequence[float] | None,
    where: str,
    *,
    on_all: bool,
) -> tuple[list[list[Tree]], Partition]:
    """Cut trees as torch.chunk does, or by weights. Where nothing is split, one device gets it, or `on_all` each."""
    check_dim(dim, where)
    check_tracing(devices, where)
    whole = "override scatter" if where == "DataParallel" else "call fdp.scatter with None in in_dims"
    flats = flatten_args([(name, tree, dim, "dim") for name, tree in named], where, whole)
    partitions = _by_rows(flats, devices) if weights is None else {}
    partition = next(iter(partitions.values()), None)
    if partition is None:
        _, partition = partition_of(flats, devices, weights, where, keep_empty=True, sizes_of=chunked, whole=whole)
        rows = None if partition.sizes is None else sum(partition.sizes)
        partition = make_partition(
            rows, partition.devices, partition.sizes, keep_empty=on_all if rows is None else rows == 0
        )
    elif len(partitions) > 1:
        partition = partition._replace(sizes=None)
    memo: Memo = {}
    return [place(flat, partition, memo, partitions if len(partitions) > 1 else None) for flat in flats], partition


def _by_rows(flats: Sequence[Flat], devices: tuple[torch.device, ...]) -> dict[int, Partition]:
    """A partition for each number of rows that there is, if torch.chunk cuts all of them into equally many parts.

    Such as one copy for each device, beside a batch: `adjacency.repeat(len(devices), 1, 1)`. A tensor without rows is
    in every part.
    """
    leaves = [(leaf, spec) for flat in flats for leaf, spec in zip(flat.leaves, flat.specs, strict=True)]
    found = {rows_of(leaf, spec) for leaf, spec in leaves} - {-1}
    partitions = {rows: make_partition(rows, devices, chunked(rows, len(devices))) for rows in sorted(found - {0})}
    parts = {partition.slots: partition.devices for partition in partitions.values()}
    if len(parts) != 1 or any(isinstance(leaf, Slots) for leaf, _ in leaves):
        return {}
    [(slots, used)] = parts.items()
    return partitions | ({0: Partition(slots, used, (0,) * len(slots))} if 0 in found else {})
