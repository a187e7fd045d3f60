"""Which tensors are summed over processes as one, and in which form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._placement.moves import accumulator

_LARGE = 2**19  # bytes from which a tensor is summed by itself
_BUCKET = 2**22  # bytes of small ones that are summed as one, while the next are packed


def buckets_of(tensors: Sequence[Tensor], ours: Sequence[bool]) -> list[tuple[list[int], bool]]:
    """Which tensors are summed as one: those of one dtype and device, up to a size. And which in their own memory.

    It depends on their shapes and dtypes only, since it has to be the same in all processes.
    """
    found: list[tuple[list[int], bool]] = []
    filled: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(tensors):
        key = summed_as(x.dtype), x.device, x.is_complex()
        if x.numel() * key[0].itemsize >= _LARGE:
            in_place = ours[i] and x.dtype is key[0] and x.layout is torch.strided and x.is_contiguous()
            found.append(([i], in_place))
            continue
        bucket, size = filled.get(key, ([], 0))
        if not bucket or size > _BUCKET:
            bucket, size = [], 0
            found.append((bucket, False))
        bucket.append(i)
        filled[key] = bucket, size + x.numel() * key[0].itemsize
    return found


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Half precision has no room for sums, and not every backend knows every integer."""
    if dtype.is_complex:
        return dtype.to_real()
    return accumulator(dtype) if dtype.is_floating_point else torch.int64


def summable(x: Tensor) -> Tensor:
    """A tensor as it is sent: dense, real, and wide enough for sums."""
    x = x.detach().to_dense() if x.layout is not torch.strided else x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.to(summed_as(x.dtype))


def like(flat: Tensor, x: Tensor) -> Tensor:
    """What has arrived, as the tensor was."""
    found = torch.view_as_complex(flat.view(*x.shape, 2)) if x.is_complex() else flat.view(x.shape).to(x.dtype)
    return found.to_sparse(x.sparse_dim()) if x.layout is torch.sparse_coo else found
