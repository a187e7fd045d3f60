"""The four moves of a tensor, each beside its adjoint: split and concat, copy and total.

All are plain differentiable torch, so autograd and torch.func need nothing special here.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fdp._placement.transfer_log import Named, report
from fdp._trees import torch_private
from fdp._trees.tree import flatten, unflatten
from fdp._trees.types import Tree

Memo = dict[Any, Any]
"""By tensor and dim its pieces, by tensor and device its copy there: a tensor that stands twice is moved once."""


def split(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    """Views of the given sizes along `dim`; one size is the whole tensor and gives the tensor itself."""
    # One node for all views: the backward of `narrow` would build a full gradient for each.
    return (tensor,) if len(sizes) == 1 else tensor.split_with_sizes(sizes, dim)


def concat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Inverse and adjoint of `split`; a single tensor is returned itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def copy(tensor: torch.Tensor, device: torch.device, flat: Named, index: int, *, always: bool = False) -> torch.Tensor:
    """The tensor on a device: itself if it is there already, unless storage of its own is wanted `always`.

    It is the leaf `index` of `flat`: the log of `transfers` names it so.
    """
    if tensor.device != device:
        report(tensor, device, flat, index)
        may_be_pinned = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
        if not may_be_pinned or torch.compiler.is_dynamo_compiling() or not layers(tensor)[-1].is_pinned():
            return tensor.to(device)
        # From pinned memory a copy goes on while the host does. What has gaps torch puts elsewhere first, and waits.
        if has_gaps(tensor) and not (tensor.requires_grad or torch_private.is_transformed()):
            tensor = tensor.clone().pin_memory()
        return tensor.to(device, non_blocking=True)
    return tensor.clone() if always else tensor


def copy_once(
    tensor: torch.Tensor, device: torch.device, flat: Named, index: int, memo: Memo, *, always: bool = False
) -> torch.Tensor:
    """A whole tensor on a device: the copy that is there, if there is one."""
    key = tensor, device
    if key not in memo:
        memo[key] = copy(tensor, device, flat, index, always=always)
    return memo[key]


def to_device(tree: Tree, device: torch.device, name: str, memo: Memo | None = None, *, always: bool = False) -> Tree:
    """The tree, which is called `name`, with every tensor on a device, in storage of its own if that is wanted."""
    flat, memo = flatten(tree, name), {} if memo is None else memo
    leaves = [
        copy_once(leaf, device, flat, i, memo, always=always) if isinstance(leaf, torch.Tensor) else leaf
        for i, leaf in enumerate(flat.leaves)
    ]
    return unflatten(flat.structure, leaves)


def layers(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and inside the transforms of torch.func the ones that it wraps, innermost last."""
    found = [tensor]
    while torch_private.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch_private.get_unwrapped(found[-1]))
    return found


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor has means and gradients: floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after `expand`: then nobody can write to the tensor in place."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether between the elements of a tensor there is memory of others, as in columns of a matrix."""
    if tensor.layout is not torch.strided:
        return False
    return 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True)) != tensor.numel()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in. Half precision has no room for sums: in bfloat16, 256 + 1 is 256."""
    return torch.promote_types(dtype, torch.float32) if dtype in _HALF else dtype


_HALF = frozenset({torch.bfloat16, torch.float16})


def promoted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the widest of their dtypes. Under autocast the dtype of a result may depend on its rows."""
    dtypes = [tensor.dtype for tensor in tensors]
    if dtypes.count(dtypes[0]) == len(dtypes):
        return list(tensors)
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of which either may be sparse."""
    return b + a if a.is_sparse and not b.is_sparse else a + b


def add_to(own: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The sum, in the memory of the first where that can be; nobody else has that one: it is a sum itself."""
    if torch.compiler.is_dynamo_compiling() or torch_private.is_transformed():  # a batched one fits into no other
        return add(own, tensor)
    is_graph = own.requires_grad or (tensor.requires_grad and torch.is_grad_enabled())
    if is_graph or not type(own) is type(tensor) is torch.Tensor or own.dtype is not tensor.dtype:
        return add(own, tensor)
    return own.add_(tensor) if own.layout is tensor.layout is torch.strided else add(own, tensor)


LARGE = 2**18
"""Bytes: smaller tensors are added up in few calls, larger ones one by one, so that each can be let go."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a contiguous tensor on the CPU holds. Not through numpy: torch can be installed without it."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adjoint of copying to several slots: the sum, in slot order."""
    if len(tensors) == 1:
        return tensors[0]
    dtype = tensors[0].dtype
    wide = accumulator(dtype)
    first, second, *rest = tensors if wide is dtype else [tensor.to(wide) for tensor in tensors]
    so_far = add(first, second)
    for tensor in rest:
        so_far = add_to(so_far, tensor)
    return so_far if wide is dtype else so_far.to(dtype)
