"""The four moves of a tensor, each beside its adjoint: split and concat, copy and total.

All are plain differentiable torch, so autograd and torch.func need nothing special here.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor


def split(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    """Views of the given sizes along `dim`; one size is the whole tensor and gives the tensor itself."""
    # One node for all views: the backward of `narrow` would build a full gradient for each.
    return (tensor,) if len(sizes) == 1 else tensor.split_with_sizes(sizes, dim)


def concat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Inverse and adjoint of `split`; a single tensor is returned itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def copy(tensor: torch.Tensor, device: torch.device, *, always: bool = False) -> torch.Tensor:
    """The tensor on a device: itself if it is there already, unless storage of its own is wanted `always`."""
    if tensor.device != device:
        return tensor.to(device)
    return tensor.clone() if always else tensor


def layers(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and inside the transforms of torch.func the ones that it wraps, innermost last."""
    found = [tensor]
    while is_functorch_wrapped_tensor(found[-1]):
        found.append(get_unwrapped(found[-1]))
    return found


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor has means and gradients: floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in. Half precision has no room for sums: in bfloat16, 256 + 1 is 256."""
    return torch.promote_types(dtype, torch.float32) if dtype in (torch.bfloat16, torch.float16) else dtype


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of which either may be sparse."""
    return b + a if a.is_sparse and not b.is_sparse else a + b


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adjoint of copying to several slots: the sum, in slot order."""
    if len(tensors) == 1:
        return tensors[0]
    dtype = tensors[0].dtype
    return reduce(add, [tensor.to(accumulator(dtype)) for tensor in tensors]).to(dtype)
