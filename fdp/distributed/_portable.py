"""Trees as values that torch loads without running code, and back."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from fdp._trees.describe import first_difference
from fdp._trees.listing import listed
from fdp._trees.tree import Flat, flatten, unflatten
from fdp._trees.types import Tree

_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Packed = dict[str, Any]


def pack(tree: Tree, where: str, room: Sequence[Any] | None = None) -> Packed:
    """The leaves on the CPU, and where they stand.

    They are copies where `room` is given, in its tensors where these fit: new memory takes longer than to copy. Without
    it, some are the tensors themselves.
    """
    try:
        flat = flatten(tree, "tree", where=where)
    except TypeError as error:
        raise TypeError(f"{error}. In a checkpoint goes the state_dict() of a module or an optimizer") from None
    leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat.leaves]
    if refused := [i for i, leaf in enumerate(leaves) if type(leaf) not in _PLAIN]:
        each = listed(refused, lambda i: f"{flat.path(i)} is a {type(leaves[i]).__name__}", "; ")
        raise TypeError(
            f"{where}: {each}. A checkpoint holds tensors, numbers, strings, bytes, dtypes, devices and sizes, so that "
            "loading it runs no code: torch.as_tensor(array), float(scalar), enum.name"
        )
    seen: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        if room is None:
            leaves = [x if _is_alone(x, seen) else _copy(x) for x in leaves]
        else:
            leaves = [_copy(x, old) for x, old in zip_longest(leaves, room[: len(leaves)])]
    indices = unflatten(flat.structure, range(len(leaves)))
    return {"leaves": leaves, "paths": _paths(flat), "indices": indices if _is_usual(indices) else None}


def _is_alone(x: Any, seen: set[int]) -> bool:
    """Whether it is saved by itself: torch saves all of the memory that it is in, and who shares that."""
    if not isinstance(x, torch.Tensor):
        return True
    if not (x.is_cpu and _has_data(x) and x.is_contiguous()):
        return False
    storage = x.untyped_storage()
    is_new = storage.data_ptr() not in seen and storage.nbytes() == x.nbytes and not (x.is_conj() or x.is_neg())
    seen.add(storage.data_ptr())
    return is_new


def _copy(x: Any, room: Any = None) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if _has_data(x) and _has_data(room) and (room.shape, room.dtype, room.stride()) == (x.shape, x.dtype, x.stride()):
        return room.copy_(x)
    return x.resolve_conj().resolve_neg().to("cpu", copy=True)


def size_of(packed: Packed) -> int:
    """Bytes of the tensors."""
    return sum(x.nbytes for x in packed["leaves"] if isinstance(x, torch.Tensor) and x.layout == torch.strided)


def outline(packed: Packed) -> Packed:
    """What was packed, without the data of large tensors."""
    return {**packed, "leaves": [x.to("meta") if _has_data(x) else x for x in packed["leaves"]]}


def room_for(outline: Packed) -> Packed:
    """What was packed, with memory in which the data are to come."""
    leaves = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") if _has_data(x) and x.is_meta else x
        for x in outline["leaves"]
    ]
    return {**outline, "leaves": leaves}


def data_of(packed: Packed) -> Iterator[torch.Tensor]:
    """The data of large tensors, as bytes, to be read or written."""
    for x in filter(_has_data, packed["leaves"]):
        yield torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())


def _has_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_quantized and x.nbytes > 0


def unpack(packed: Packed, like: Tree | None, where: str) -> Tree:
    """Inverse of `pack`; with `like`, in its containers and on its devices."""
    flat, leaves = fitting(packed, like, where)
    return unflatten(flat.structure, leaves if like is None else map(_placed, leaves, flat.leaves))


def fitting(packed: Packed, like: Tree | None, where: str) -> tuple[Flat, list[Any]]:
    """The tree that gives the containers, and the leaves in its order; what is not like it is named with its path."""
    leaves, indices = packed["leaves"], packed["indices"]
    saved = flatten(indices, "tree", where=where) if indices is not None else None
    if like is None:
        if saved is None:
            raise ValueError(
                f"{where}: the tree has containers other than dict, list and tuple, which only a tree like it can "
                "give: restore(like=tree)"
            )
        return saved, [leaves[i] for i in saved.leaves]
    flat = flatten(like, "tree", where=where)
    if saved is not None and saved.structure != flat.structure:
        path, there, here = first_difference(saved.structure, flat.structure, "tree")
        raise ValueError(f"{where}: {path} is {there} in the checkpoint, but {here} in like")
    for there, here in zip_longest(packed["paths"], _paths(flat)):
        if there != here:
            raise ValueError(
                f"{where}: the checkpoint has {there or 'nothing'} where like has {here or 'nothing'}: their "
                "structures differ"
            )
    said = [(_said(leaf), _said(other), i) for i, (leaf, other) in enumerate(zip(leaves, flat.leaves, strict=True))]
    if wrong := [(there, here, i) for there, here, i in said if there != here]:
        each = listed(wrong, lambda one: f"{flat.path(one[2])} is {one[0]}, but {one[1]} in like", "; ")
        raise ValueError(f"{where}: in the checkpoint {each}")
    return flat, leaves


def _placed(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or like.device.type == "meta":
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
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return "a number" if isinstance(leaf, int | float | complex) else f"a {type(leaf).__name__}"
