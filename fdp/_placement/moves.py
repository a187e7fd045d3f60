"""The four moves of a tensor, each beside its adjoint: split and concat, copy and total.

All are plain differentiable torch, so autograd and torch.func need nothing special here.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fdp._placement.transfers import Named, report
from fdp._trees import torch_private
from fdp._trees.tree import flatten, unflatten
from fdp._trees.types import Tree

Memo = dict[tuple[int, Any], Any]  # the pieces of a tensor along a dim, and its copies on devices


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
        return tensor.to(device)
    return tensor.clone() if always else tensor


def copy_once(tensor: torch.Tensor, device: torch.device, flat: Named, index: int, memo: Memo) -> torch.Tensor:
    """A whole tensor on a device: the copy that is there, if there is one."""
    if torch.compiler.is_compiling():
        return copy(tensor, device, flat, index)
    key = (id(tensor), device)
    if key not in memo:
        memo[key] = copy(tensor, device, flat, index)
    return memo[key]


def to_device(tree: Tree, device: torch.device, name: str, memo: Memo | None = None) -> Tree:
    """The tree, which is called `name`, with every tensor on a device."""
    flat, memo = flatten(tree, name), {} if memo is None else memo
    leaves = [
        copy_once(leaf, device, flat, i, memo) if isinstance(leaf, torch.Tensor) else leaf
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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in. Half precision has no room for sums: in bfloat16, 256 + 1 is 256."""
    return torch.promote_types(dtype, torch.float32) if dtype in _HALF else dtype


_HALF = frozenset({torch.bfloat16, torch.float16})


def promoted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the widest of their dtypes. Under autocast the dtype of a result may depend on its rows."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2:
        return list(tensors)
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of which either may be sparse."""
    return b + a if a.is_sparse and not b.is_sparse else a + b


def accumulate(held: list[torch.Tensor], index: int, tensor: torch.Tensor) -> None:
    """Add to a tensor in the list: in place if that saves memory and nobody can see it."""
    if _may_be_large(held[index], tensor) and is_ours(held, index):
        held[index].add_(tensor)
    else:
        held[index] = add(held[index], tensor)


def _may_be_large(total: torch.Tensor, tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():  # sizes may be symbols
        return False
    is_dense = tensor.layout is total.layout is torch.strided
    return is_dense and total.nbytes >= LARGE and total.dtype is tensor.dtype and not tensor.requires_grad


def is_ours(held: Sequence[Any], index: int = 0) -> bool:
    """Whether a large tensor is referred to by this list only, and its memory by the tensor only.

    A gradient may be that of another tensor too, or be kept by a hook: such a one must stay as it is.
    """
    if torch.compiler.is_compiling() or torch_private.is_transformed():
        return False
    tensor = held[index]
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return False
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    if tensor.nbytes < LARGE or storage.nbytes() != tensor.nbytes or not storage.resizable():
        return False  # what cannot be resized is memory of something else, such as a numpy array
    is_view = tensor._is_view()
    del tensor, storage
    return references(held, index) == _ALONE[is_view]


def references(held: Sequence[Any], index: int = 0) -> tuple[int, ...]:
    """How many refer to a tensor in Python, in C++, the same of its memory, and of the tensor that it is a view of."""
    tensor, base = held[index], torch_private.base(held[index])
    memory = sys.getrefcount(tensor.untyped_storage()), torch_private.storage_use_count(tensor)
    found = sys.getrefcount(tensor), torch_private.use_count(tensor), *memory
    return found if base is None else (*found, sys.getrefcount(base), torch_private.use_count(base))


LARGE = 2**18  # bytes: below, counting who refers to a tensor takes longer than allocating another
_ALONE = references([torch.empty(1)]), references([torch.empty(1, 2).t()])


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a contiguous tensor on the CPU holds. Not through numpy: torch can be installed without it."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adjoint of copying to several slots: the sum, in slot order."""
    if len(tensors) == 1:
        return tensors[0]
    dtype = tensors[0].dtype
    wide = accumulator(dtype)
    each = iter(tensors if wide is dtype else (tensor.to(wide) for tensor in tensors))
    held = [next(each)]
    for tensor in each:
        accumulate(held, 0, tensor)
    return held[0] if wide is dtype else held[0].to(dtype)
