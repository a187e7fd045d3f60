"""Which tensors are summed over processes as one, and in which form."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._placement.moves import accumulator
from fdp._trees import torch_private

_LARGE = 2**19  # bytes from which a tensor is summed by itself
_BUCKET = 25 * 2**20  # bytes of small ones that are summed as one

Kind = tuple[torch.dtype, torch.Size, torch.device, torch.layout, bool]
kind_of: Callable[[Any], Kind] = operator.attrgetter("dtype", "shape", "device", "layout", "requires_grad")


class Bucket(NamedTuple):
    """Tensors that are summed as one: which, how many numbers each has, and as what these are sent."""

    indices: list[int]
    sizes: list[int]
    dtype: torch.dtype
    device: torch.device
    is_large: bool


@final
class Packing:
    """How tensors of these kinds are sent: those of one dtype and device as one, up to a size.

    It depends on their kinds and order only, since it has to be the same in all processes. One bucket of real numbers
    has `room` for so many bytes more, at its end: then it is the last. Real numbers may be sent as other `dtypes`.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        room: int = 0,
        order: Sequence[int] | None = None,
        dtypes: Sequence[torch.dtype | None] | None = None,
    ) -> None:
        self.kinds: list[Kind] = list(kinds)
        self.buckets: list[Bucket] = []
        filled: dict[Any, tuple[Bucket, int]] = {}
        for i in range(len(self.kinds)) if order is None else order:
            dtype, shape, device, *_ = self.kinds[i]
            other = None if dtypes is None or not dtype.is_floating_point else dtypes[i]
            sent = summed_as(dtype) if other is None else other
            size = shape.numel() * (2 if dtype.is_complex else 1)
            nbytes = size * sent.itemsize
            if nbytes >= _LARGE:
                self.buckets.append(Bucket([i], [size], sent, device, True))
                continue
            bucket, held = filled.get((sent, device), (None, 0))
            if bucket is None or held > _BUCKET:
                bucket, held = Bucket([], [], sent, device, False), 0
                self.buckets.append(bucket)
            bucket.indices.append(i)
            bucket.sizes.append(size)
            filled[sent, device] = bucket, held + nbytes
        if room:
            small = [b for b in self.buckets if not b.is_large and b.dtype.is_floating_point]
            last = small[-1] if small else Bucket([], [], torch.float32, torch.device("cpu"), False)
            self.buckets = [*(bucket for bucket in self.buckets if bucket is not last), last]
        # Those whose tensors are sent as they are; of a single one there would be no copy.
        several = {k: b for k, b in enumerate(self.buckets) if len(b.indices) > 1}
        self._plain = {k for k, b in several.items() if all(self._is_plain(i, b.dtype) for i in b.indices)}
        self._extra = [0] * len(self.buckets)
        if room:
            self._extra[-1] = room // self.buckets[-1].dtype.itemsize

    def _is_plain(self, index: int, dtype: torch.dtype) -> bool:
        own, _, _, layout, tracked = self.kinds[index]
        return own is dtype and layout is torch.strided and not tracked

    @property
    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """How many numbers each bucket has, and of what."""
        return [(sum(b.sizes) + extra, b.dtype) for b, extra in zip(self.buckets, self._extra, strict=True)]

    def packed(self, number: int, tensors: Sequence[Tensor], ours: Sequence[bool]) -> Tensor:
        """A bucket as it is sent: in memory of its own, or in that of a large tensor which is ours."""
        bucket, extra = self.buckets[number], self._extra[number]
        if bucket.is_large:
            i = bucket.indices[0]
            x = tensors[i]
            if ours[i] and x.dtype is bucket.dtype and x.is_contiguous() and not x.is_neg():
                return x
        rest = [torch.zeros(extra, dtype=bucket.dtype, device=bucket.device)] if extra else []
        if number in self._plain:
            return torch_private.flatten_dense_tensors([*(tensors[i] for i in bucket.indices), *rest])
        return torch.cat([*(_summable(tensors[i], bucket.dtype) for i in bucket.indices), *rest])

    def room_of(self, flats: Sequence[Tensor]) -> Tensor:
        """The room at the end of the bucket that has it."""
        return flats[-1][-self._extra[-1] :]

    def zeros(self) -> list[Tensor]:
        """All buckets, of a process that has nothing to add."""
        each = zip(self.sizes, self.buckets, strict=True)
        return [torch.zeros(size, dtype=dtype, device=bucket.device) for (size, dtype), bucket in each]

    def unpacked(self, flats: Sequence[Tensor], like: Sequence[Tensor] = ()) -> list[Tensor]:
        """The tensors of buckets that have arrived; sparse ones are `like` these."""
        found: list[Any] = [None] * len(self.kinds)
        for flat, (indices, sizes, *_), extra in zip(flats, self.buckets, self._extra, strict=True):
            # `.data`: each has a version of its own, so that a write to one is none to the others.
            parts = [flat] if len(sizes) == 1 and not extra else flat.split_with_sizes([*sizes, extra])
            for i, part in zip(indices, parts, strict=False):
                dtype, shape = self.kinds[i][:2]
                part = part if part is flat else part.data
                found[i] = part.view(shape) if dtype is flat.dtype else _as_it_was(part, dtype, shape)
        for i, x in enumerate(like):
            if x.layout is torch.sparse_coo:
                found[i] = found[i].to_sparse(x.sparse_dim())
        return found


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Half precision has no room for sums, and not every backend knows every integer."""
    if dtype.is_complex:
        return dtype.to_real()
    return accumulator(dtype) if dtype.is_floating_point else torch.int64


def _summable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor as they are sent: dense, real, and wide enough for sums."""
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return (x if x.dtype is dtype else x.to(dtype)).reshape(-1)


def _as_it_was(flat: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if dtype.is_complex:
        flat = flat if flat.storage_offset() % 2 == 0 else flat.clone()
        return torch.view_as_complex(flat.view(*shape, 2))
    return flat.view(shape).to(dtype)
