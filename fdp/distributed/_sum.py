"""A gradient step over processes: one sum, for which nothing is asked of the others before.

Each process computes the means of its own rows. They are sent times the own weight, with the weight behind them; the
sum is divided by the sum of the weights. Small marks say of which call it is.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._trees import torch_private
from fdp.distributed._exchange import as_it_was, numbers_of, size_of, wire_dtype
from fdp.distributed._reports import Tag
from fdp.distributed._waits_and_failures import Epoch

SCALE = 2.0**-24  # of weights, exact: so a sum over that many rows is no larger than the largest mean
PLAIN = 2  # the number of the weight of what is added up as it is
_BITS = 12  # of a mark: so the sum over 4,096 processes is exact in float32
_MASK = (1 << _BITS) - 1
_TAIL = 7  # numbers behind each sum: two weights, marks of the call and of a digest, and whether there is one
_FULL = 2**21  # numbers from which on the next parcel begins: one is packed while those before it are on their way
_MOST = 16  # tails that are kept
_KIND: Any = operator.attrgetter("dtype", "layout")
_DATA: Any = operator.attrgetter("data")  # a version of its own: a write to one is none to the others


class Parcel(NamedTuple):
    """What is sent as one: which tensors, and where the numbers of each weight begin and end.

    If all are of the usual `kinds`, they are put together and taken apart in one call.
    """

    dtype: torch.dtype
    device: torch.device
    at: list[int]
    sizes: list[int]
    runs: list[tuple[int, int, int]]
    kinds: list[Any] | None
    has_tail: bool
    key: str


class Total(NamedTuple):
    """What all have, the sum of their first weights if it was read, and whether their digests are the same."""

    found: list[Tensor]
    weight: float | None
    are_same: bool


@final
class Wire:
    """How tensors of these kinds are sent, in all processes: those of a dtype and device as one, up to a size.

    Each has one of two weights, or is `PLAIN`. The first `n` real ones may be `sent_as` another dtype. `mark` stands
    for the call and all that has been agreed on.
    """

    def __init__(
        self, tensors: Sequence[Tensor], weights: Sequence[int], n: int, sent_as: torch.dtype | None, mark: int
    ) -> None:
        self.mark, self._marks = mark, _marks(mark)
        groups: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        for i, x in enumerate(tensors):
            dtype = sent_as if sent_as is not None and i < n and not x.is_complex() else wire_dtype(x.dtype)
            kind = dtype, x.device
            groups.setdefault((*kind, filled.get(kind, 0) // _FULL), []).append(i)
            filled[kind] = filled.get(kind, 0) + size_of(x)
        parcels = [_parcel(tensors, weights, at, dtype, device) for (dtype, device, _), at in groups.items()]
        self._parcels = sorted(parcels, key=lambda parcel: parcel.dtype is sent_as)  # it takes its total from another
        self._tails: dict[Any, Tensor] = {}

    def summed(
        self,
        epoch: Epoch,
        tag: Tag,
        tensors: Sequence[Tensor],
        weights: tuple[float, float],
        digest: int | None,
        *,
        is_read: bool,
    ) -> Total:
        """The means and sums over all processes. The `digest` is of what is to be the same in all, or None."""
        own, sent = [weight * SCALE for weight in weights], list[Any]()
        tail = (*own, *self._marks, *_marks(digest or 0), float(digest is not None))
        for parcel in self._parcels:
            flat, parts = self._packed(parcel, tensors, own, tail)
            wait = epoch.send(tag, flat, partial(_allreduce, flat), parcel.key, is_more=len(sent) > 0)
            sent.append((parcel, flat, parts, wait))
        found: list[Any] = [None] * len(tensors)
        totals: Any = None
        for parcel, flat, parts, wait in sent:
            wait()
            if parcel.has_tail:
                totals = self._totals(epoch, tag, flat[-_TAIL:], is_read)
            for start, stop, weight in parcel.runs:
                if weight != PLAIN:
                    flat[start:stop].div_(totals[weight])
            for i, x in zip(parcel.at, _unpacked(parcel, flat, parts, tensors), strict=True):
                found[i] = x
        if not isinstance(totals, list):
            return Total(found, None, True)
        *_, low, high, present = totals
        are_same = present == epoch.size and (low, high) == tuple(x * epoch.size for x in _marks(digest or 0))
        return Total(found, totals[0], are_same)

    def _packed(
        self, parcel: Parcel, tensors: Sequence[Tensor], own: Sequence[float], tail: tuple[float, ...]
    ) -> tuple[Tensor, list[Tensor] | None]:
        """All numbers, and the tensors if they are as usual."""
        usual: list[Tensor] | None = list(map(tensors.__getitem__, parcel.at))
        if list(map(_KIND, usual)) != parcel.kinds:
            usual = None
        parts = usual or [numbers_of(tensors[i], parcel.dtype) for i in parcel.at]
        if parcel.has_tail:
            parts = [*parts, self._kept(tail, parcel.dtype, parcel.device)]
        flat = torch_private.flatten_dense_tensors(parts)
        if len(parts) == 1:  # it may be the tensor itself
            flat = flat.clone()
        for start, stop, weight in parcel.runs:
            if weight != PLAIN and own[weight] == 0:
                flat[start:stop].zero_()  # not times 0, which leaves a NaN one
            elif weight != PLAIN:
                flat[start:stop].mul_(own[weight])
        return flat, usual

    def _totals(self, epoch: Epoch, tag: Tag, tail: Tensor, is_read: bool) -> Any:
        """The sums of the weights. Where the marks are not those of all, an error, or NaN where nobody may look."""
        expected = [mark * epoch.size for mark in self._marks]
        if tail.is_cpu or is_read:
            found = tail.tolist()
            if found[2:4] != expected:
                epoch.disagree(tag)
            return found
        differ = (tail[2:4] != self._kept(tuple(expected), tail.dtype, tail.device)).any()
        return tail[:2].masked_fill(differ, torch.nan)

    def _kept(self, values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of these numbers: on an accelerator, making one anew would wait for it."""
        key = values, dtype, device
        if key not in self._tails:
            if len(self._tails) > _MOST:
                self._tails.clear()
            self._tails[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._tails[key]


def _allreduce(flat: Tensor, group: Any) -> Any:
    return group.allreduce([flat])


def _parcel(
    tensors: Sequence[Tensor], weights: Sequence[int], at: list[int], dtype: torch.dtype, device: torch.device
) -> Parcel:
    at = sorted(at, key=lambda i: weights[i])
    sizes = [size_of(tensors[i]) for i in at]
    runs: list[tuple[int, int, int]] = []
    start = 0
    for i, size in zip(at, sizes, strict=True):
        if runs and runs[-1][2] == weights[i]:
            runs[-1] = (runs[-1][0], start + size, weights[i])
        else:
            runs.append((start, start + size, weights[i]))
        start += size
    has_tail = dtype in (torch.float32, torch.float64)  # there is room for weights and marks
    is_plain = all(tensors[i].dtype is dtype and tensors[i].layout is torch.strided for i in at) and 0 not in sizes
    kinds = list(map(_KIND, map(tensors.__getitem__, at))) if is_plain else None
    return Parcel(dtype, device, at, sizes, runs, kinds, has_tail, f"{dtype}, {start + _TAIL * has_tail}")


def _unpacked(parcel: Parcel, flat: Tensor, parts: list[Tensor] | None, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if parts is not None:
        return list(map(_DATA, torch_private.unflatten_dense_tensors(flat, parts)))
    pieces = flat.split_with_sizes([*parcel.sizes, *([_TAIL] if parcel.has_tail else [])])
    return [as_it_was(piece.data, tensors[i]) for i, piece in zip(parcel.at, pieces, strict=False)]


def _marks(number: int) -> tuple[float, float]:
    return float(number & _MASK), float(number >> _BITS & _MASK)
