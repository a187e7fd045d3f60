"""An operation on the tensors of all slots, of which other processes have some."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fdp._collectives.operations import Extreme, Operation, Scatter, Sum, counted
from fdp._placement.moves import accumulator, total
from fdp.distributed._agreement import Agreement
from fdp.distributed._communicator import Communicator
from fdp.distributed._session import Tag


def over_processes(operation: Operation, columns: Sequence[Sequence[Tensor]], across: Agreement) -> list[list[Tensor]]:
    """For each leaf, what becomes of it on each slot of this process."""
    assert across.session is not None
    comm, name = across.session.comm, operation.name
    counts = across.table.counts
    first, _ = across.table.before
    if isinstance(operation, Sum):
        columns = [counted(xs) for xs in columns]
        summed = _sums(columns, comm, name)
        return [[x] * len(xs) for x, xs in zip(summed, columns, strict=True)]
    if isinstance(operation, Scatter) and all(xs[0].dtype is not torch.bool for xs in columns):
        own = slice(first, first + counts[comm.rank])
        return [operation.parts(x, sum(counts), leaf)[own] for leaf, x in enumerate(_sums(columns, comm, name))]
    if isinstance(operation, Extreme):
        each = [comm.all(operation.results(xs, leaf)[0], name) for leaf, xs in enumerate(columns)]
        return [
            operation.results(found, leaf)[:1] * len(xs)
            for leaf, (found, xs) in enumerate(zip(each, columns, strict=True))
        ]
    found = []
    for leaf, xs in enumerate(columns):
        own = slice(first, first + len(xs))
        found.append(operation.results(_of_all_slots(xs, across, comm, name), leaf)[own])
    return found


def _sums(columns: Sequence[Sequence[Tensor]], comm: Communicator, name: str) -> list[Tensor]:
    """Half precision is added up in float32, and rounded once."""
    summed = comm.sums([total([x.to(accumulator(x.dtype)) for x in xs]) for xs in columns], name)
    return [x.to(xs[0].dtype) for x, xs in zip(summed, columns, strict=True)]


def _of_all_slots(xs: Sequence[Tensor], across: Agreement, comm: Communicator, name: str) -> list[Tensor]:
    """A leaf of every slot of every process, in order."""
    counts = [across.table.counts[rank] for rank in comm.ranks]
    nothing = xs[0].new_empty((0,) * xs[0].ndim)
    rounds = [comm.all(xs[i] if i < len(xs) else nothing, name) for i in range(max(counts))]
    return [rounds[i][process] for process, count in enumerate(counts) for i in range(count)]


def everywhere(values: list[Any], across: Agreement, tag: Tag) -> list[Any]:
    """The values of the slots of all processes, in order; they are no tensors."""
    assert across.session is not None
    across.session.agree(tag)
    return list(chain.from_iterable(across.session.comm.objects(values, tag.name)))
