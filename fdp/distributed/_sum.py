"""A gradient step over processes: one sum, for which nothing is asked of the others before.

Each process computes the means of its own rows. They are sent times the own weight, with the weight behind them; the
sum is divided by the sum of the weights. Small marks say of which call it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._trees import torch_private
from fdp.distributed._epoch import Epoch, Tag
from fdp.distributed._exchange import as_it_was, numbers_of, size_of, wire_dtype

SCALE = 2.0**-24  # of weights, exact: so a sum over that many rows is no larger than the largest mean
_BITS = 12  # of a mark: so the sum over 4,096 processes is exact in float32
_TAIL = 7  # numbers behind each sum: two weights, marks of the call and of a digest, and whether there is one
_FULL = 2**21  # numbers from which on the next parcel begins: one is packed while those before it are on their way
_MOST = 16  # tails that are kept
_MASK = (1 << _BITS) - 1
PLAIN = 2  # the number of the weight of what is added up as it is


class Parcel(NamedTuple):
    """What is sent as one: which tensors, how many numbers each has, and where those of each weight begin and end."""

    dtype: torch.dtype
    device: torch.device
    at: list[int]
    sizes: list[int]
    runs: list[tuple[int, int, int]]
    is_usual: bool  # all are sent as they are


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
        self.mark = mark
        self.marks = _marks(mark)
        groups: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        for i, x in enumerate(tensors):
            dtype = sent_as if sent_as is not None and i < n and not x.is_complex() else wire_dtype(x.dtype)
            kind = dtype, x.device
            groups.setdefault((*kind, filled.get(kind, 0) // _FULL), []).append(i)
            filled[kind] = filled.get(kind, 0) + size_of(x)
        self.buckets = [_bucket(tensors, weights, at, dtype, device) for (dtype, device, _), at in groups.items()]
        self.buckets.sort(key=lambda bucket: bucket.dtype is sent_as)  # which takes its total from another
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
        if len(self._tails) > _MOST:
            self._tails.clear()
        own, waits = [weight * SCALE for weight in weights], list[tuple[Parcel, Tensor, Callable[[], None]]]()
        tail = (*own, *self.marks, *_marks(digest or 0), float(digest is not None))
        for bucket in self.buckets:
            flat = self._packed(bucket, tensors, own, tail)
            key = f"{bucket.dtype}, {flat.numel()}"
            wait = epoch.send(tag, flat, partial(_allreduce, flat), key, is_more=len(waits) > 0)
            waits.append((bucket, flat, wait))
        found: list[Any] = [None] * len(tensors)
        totals: Any = []
        for bucket, flat, wait in waits:
            wait()
            if _has_tail(bucket.dtype):
                totals = self._totals(epoch, tag, flat[-_TAIL:], is_read)
            for start, stop, weight in bucket.runs:
                if weight != PLAIN:
                    flat[start:stop].div_(totals[weight])
            _unpack(bucket, flat, tensors, found)
        if not isinstance(totals, list):
            return Total(found, None, True)
        *_, low, high, present = totals
        are_same = present == epoch.size and (low, high) == tuple(x * epoch.size for x in _marks(digest or 0))
        return Total(found, totals[0], are_same)

    def _packed(
        self, bucket: Parcel, tensors: Sequence[Tensor], own: Sequence[float], tail: tuple[float, ...]
    ) -> Tensor:
        parts = [tensors[i] for i in bucket.at]
        if not bucket.is_usual or not all(map(_is_usual, parts)):
            parts = [numbers_of(x, bucket.dtype) for x in parts]
        if _has_tail(bucket.dtype):
            parts.append(self._kept(tail, bucket.dtype, bucket.device))
        flat = torch_private.flatten_dense_tensors(parts)
        if len(parts) == 1:  # it may be the tensor itself
            flat = flat.clone()
        for start, stop, weight in bucket.runs:
            if weight != PLAIN and own[weight] == 0:
                flat[start:stop].zero_()  # not times 0, which leaves a NaN one
            elif weight != PLAIN:
                flat[start:stop].mul_(own[weight])
        return flat

    def _totals(self, epoch: Epoch, tag: Tag, tail: Tensor, is_read: bool) -> Any:
        """The sums of the weights. Where the marks are not those of all, an error, or NaN where nobody may look."""
        expected = [mark * epoch.size for mark in self.marks]
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
            self._tails[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._tails[key]


def _allreduce(flat: Tensor, group: Any) -> Any:
    return group.allreduce([flat])


def _bucket(
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
    return Parcel(dtype, device, at, sizes, runs, all(tensors[i].dtype is dtype for i in at))


def _unpack(bucket: Parcel, flat: Tensor, tensors: Sequence[Tensor], found: list[Any]) -> None:
    tail = [_TAIL] if _has_tail(bucket.dtype) else []
    # `.data`: each has a version of its own, so that a write to one is none to the others.
    for i, part in zip(bucket.at, flat.split_with_sizes([*bucket.sizes, *tail]), strict=False):
        x = tensors[i]
        found[i] = part.data.view(x.shape) if bucket.is_usual and _is_usual(x) else as_it_was(part.data, x)


def _marks(number: int) -> tuple[float, float]:
    return float(number & _MASK), float(number >> _BITS & _MASK)


def _is_usual(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.requires_grad


def _has_tail(dtype: torch.dtype) -> bool:
    """Whether there is room for weights and marks."""
    return dtype in (torch.float32, torch.float64)
