"""Trees as values that torch loads without running code, and back."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fdp._trees.message_lists import listed
from fdp._trees.tree import Flat, flatten, unflatten
from fdp._trees.types import Tree

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Packed = dict[str, Any]


def pack(tree: Tree, where: str, room: Sequence[Any] | None = None) -> Packed:
    """The leaves on the CPU, and where they stand.

    They are copies where `room` is given, in its tensors where these fit, else in pinned memory where they come from an
    accelerator. Without it, some are the tensors themselves.
    """
    try:
        flat = flatten(tree, "tree", where=where)
    except TypeError as error:
        raise TypeError(f"{error}. In a checkpoint goes the state_dict() of a module or an optimizer") from None
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in flat.leaves]
    if refused := [i for i, leaf in enumerate(leaves) if type(leaf) not in _PLAIN]:
        each = listed(refused, lambda i: f"{flat.path(i)} is a {type(leaves[i]).__name__}", "; ")
        raise TypeError(
            f"{where}: {each}. A checkpoint holds tensors, numbers, strings, bytes, dtypes, devices and sizes, so that "
            "loading it runs no code: torch.as_tensor(array), float(scalar), enum.name"
        )
    seen: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        if room is None:
            leaves = [x if _is_alone(x, seen) else _copied(x) for x in leaves]
        else:
            leaves = [_copied_into(old, x) for x, old in zip_longest(leaves, room[: len(leaves)])]
    indices = unflatten(flat.structure, range(len(leaves)))
    return {"leaves": leaves, "paths": _paths(flat), "indices": indices if _is_usual(indices) else None}


def _is_alone(x: Any, seen: set[int]) -> bool:
    """Whether it is saved by itself: torch saves all of the memory that it is in, and who shares that."""
    if not isinstance(x, Tensor):
        return True
    if not (x.is_cpu and has_data(x) and x.is_contiguous()) or x.is_conj() or x.is_neg():
        return False
    storage = x.untyped_storage()
    is_new = storage.data_ptr() not in seen and storage.nbytes() == x.nbytes
    seen.add(storage.data_ptr())
    return is_new


def _copied(x: Any) -> Any:
    return x.resolve_conj().resolve_neg().to("cpu", copy=True) if isinstance(x, Tensor) else x


def _copied_into(room: Any, x: Any) -> Any:
    """A copy, in memory that is there if it fits: to take new memory is slower than to copy."""
    if has_data(x) and has_data(room) and (room.shape, room.dtype, room.stride()) == (x.shape, x.dtype, x.stride()):
        return room.copy_(x)
    copy = _copied(x)
    return copy.pin_memory() if has_data(x) and x.device.type not in ("cpu", "meta") else copy


def has_data(x: Any) -> bool:
    """Whether it is a tensor in one piece of memory."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized and x.nbytes > 0


def bytes_in(x: Tensor) -> Tensor:
    """The memory of a tensor, to be read or written."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())


def unpack(packed: Packed, like: Tree | None, where: str) -> Tree:
    """Inverse of `pack`; with `like`, in its containers and on its devices. What is not like it is named."""
    leaves, indices = packed["leaves"], packed["indices"]
    if like is None:
        if indices is None:
            raise ValueError(
                f"{where}: the tree has containers other than dict, list and tuple, which only a tree like it can "
                "give: restore(like=tree)"
            )
        saved = flatten(indices, "tree", where=where)
        return unflatten(saved.structure, [leaves[i] for i in saved.leaves])
    flat = flatten(like, "tree", where=where)
    for there, here in zip_longest(packed["paths"], _paths(flat)):
        if there != here:
            raise ValueError(f"{where}: the checkpoint has {there or 'no more'} where like has {here or 'no more'}")
    said = [(_said(leaf), _said(other), i) for i, (leaf, other) in enumerate(zip(leaves, flat.leaves, strict=True))]
    if wrong := [(there, here, i) for there, here, i in said if there != here]:
        each = listed(wrong, lambda one: f"{flat.path(one[2])} is {one[0]}, but {one[1]} in like", "; ")
        raise ValueError(f"{where}: in the checkpoint {each}")
    return unflatten(flat.structure, map(_placed, leaves, flat.leaves))


def _placed(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_meta or like.device.type == "meta":
        return leaf
    return leaf.to(like.device).requires_grad_(like.requires_grad and like.is_leaf)


def _paths(flat: Flat) -> list[str]:
    return [accessor.codify("tree") for accessor in flat.structure.accessors()]


def _is_usual(node: Any) -> bool:
    """Whether a tree of indices has containers and keys only that load without running code."""
    if type(node) in (dict, OrderedDict):
        return all(type(key) in (str, int, float, bool) for key in node) and all(map(_is_usual, node.values()))
    if type(node) in (list, tuple):
        return all(map(_is_usual, node))
    return type(node) in (int, type(None))


def _said(leaf: Any) -> str:
    """What has to be the same; a number may be any number."""
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return "a number" if isinstance(leaf, int | float | complex) else f"a {type(leaf).__name__}"
