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

    It depends on their kinds only, since it has to be the same in all processes. Real numbers may be sent as other
    `dtypes`.
    """

    def __init__(self, kinds: Sequence[Kind], dtypes: Sequence[torch.dtype | None] | None = None) -> None:
        self.kinds: list[Kind] = list(kinds)
        self.buckets: list[Bucket] = []
        filled: dict[Any, tuple[Bucket, int]] = {}
        for i, (dtype, shape, device, *_) in enumerate(self.kinds):
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
        # Those whose tensors are sent as they are; of a single one there would be no copy.
        several = {k: b for k, b in enumerate(self.buckets) if len(b.indices) > 1}
        self._plain = {k for k, b in several.items() if all(self._is_plain(i, b.dtype) for i in b.indices)}

    def _is_plain(self, index: int, dtype: torch.dtype) -> bool:
        own, _, _, layout, tracked = self.kinds[index]
        return own is dtype and layout is torch.strided and not tracked

    def packed(self, number: int, tensors: Sequence[Tensor], ours: Sequence[bool]) -> Tensor:
        """A bucket as it is sent: in memory of its own, or in that of a large tensor which is ours."""
        bucket = self.buckets[number]
        if bucket.is_large:
            i = bucket.indices[0]
            x = tensors[i]
            if ours[i] and x.dtype is bucket.dtype and x.is_contiguous() and not x.is_neg():
                return x
        if number in self._plain:
            return torch_private.flatten_dense_tensors([tensors[i] for i in bucket.indices])
        return torch.cat([_summable(tensors[i], bucket.dtype) for i in bucket.indices])

    def unpacked(self, flats: Sequence[Tensor], like: Sequence[Tensor] = ()) -> list[Tensor]:
        """The tensors of buckets that have arrived; sparse ones are `like` these."""
        found: list[Any] = [None] * len(self.kinds)
        for flat, (indices, sizes, *_) in zip(flats, self.buckets, strict=True):
            # `.data`: each has a version of its own, so that a write to one is none to the others.
            parts = [flat] if len(sizes) == 1 else flat.split_with_sizes(sizes)
            for i, part in zip(indices, parts, strict=True):
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
