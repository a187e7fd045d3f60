"""An operation on the tensors of all slots, of which other processes have some."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fdp._collectives.operations import Extreme, Operation, Scatter, Sum, counted
from fdp._placement.moves import accumulator, total
from fdp.distributed._exchange import all_of, sums
from fdp.distributed._table import Table
from fdp.distributed._waits_and_failures import Epoch


def over_processes(
    operation: Operation, columns: Sequence[Sequence[Tensor]], epoch: Epoch, table: Table
) -> list[list[Tensor]]:
    """For each leaf, what becomes of it on each slot of this process."""
    name, counts = operation.name, table.counts
    first, _ = table.before
    if isinstance(operation, Sum):
        columns = [counted(xs) for xs in columns]
        summed = _sums(columns, epoch, name)
        return [[x] * len(xs) for x, xs in zip(summed, columns, strict=True)]
    if isinstance(operation, Scatter) and all(xs[0].dtype is not torch.bool for xs in columns):
        own = slice(first, first + counts[epoch.rank])
        return [operation.parts(x, sum(counts), leaf)[own] for leaf, x in enumerate(_sums(columns, epoch, name))]
    if isinstance(operation, Extreme):
        each = [all_of(epoch, operation.results(xs, leaf)[0], name) for leaf, xs in enumerate(columns)]
        return [
            operation.results(found, leaf)[:1] * len(xs)
            for leaf, (found, xs) in enumerate(zip(each, columns, strict=True))
        ]
    found = []
    for leaf, xs in enumerate(columns):
        own = slice(first, first + len(xs))
        found.append(operation.results(_of_all_slots(xs, epoch, counts, name), leaf)[own])
    return found


def _sums(columns: Sequence[Sequence[Tensor]], epoch: Epoch, name: str) -> list[Tensor]:
    """Half precision is added up in float32, and rounded once."""
    summed = sums(epoch, [total([x.to(accumulator(x.dtype)) for x in xs]) for xs in columns], name)
    return [x.to(xs[0].dtype) for x, xs in zip(summed, columns, strict=True)]


def _of_all_slots(xs: Sequence[Tensor], epoch: Epoch, counts: Sequence[int], name: str) -> list[Tensor]:
    """A leaf of every slot of every process, in order."""
    nothing = xs[0].new_empty((0,) * xs[0].ndim)
    rounds = [all_of(epoch, xs[i] if i < len(xs) else nothing, name) for i in range(max(counts))]
    return [rounds[i][process] for process, count in enumerate(counts) for i in range(count)]
