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

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MOST_BITS = 2039  # of an int: torch does not load larger ones without running code


def pack(tree: Tree, where: str, room: Sequence[Any] | None = None) -> dict[str, Any]:
    """The leaves on the CPU, and where they stand.

    They are copies where `room` is given, in its tensors where these fit: new memory takes longer than to copy. Without
    it, some are the tensors themselves.
    """
    try:
        flat = flatten(tree, "tree", where=where)
    except TypeError as error:
        raise TypeError(f"{error}. In a checkpoint goes the state_dict() of a module or an optimizer") from None
    with torch.inference_mode(False), torch.no_grad():
        if room is None:
            leaves = _alone(flat.leaves)
        else:
            leaves = [_copy(leaf, old) for leaf, old in zip_longest(flat.leaves, room[: len(flat.leaves)])]
    refused = [i for i, leaf in enumerate(leaves) if _hindrance(leaf) is not None]
    if refused:
        each = listed(refused, lambda i: f"{flat.path(i)} is {_hindrance(leaves[i])}", "; ")
        raise TypeError(
            f"{where}: {each}. A checkpoint holds tensors, numbers, strings, bytes, dtypes, devices and sizes, so that "
            "loading it runs no code: torch.as_tensor(array), float(scalar), enum.name"
        )
    indices = unflatten(flat.structure, range(len(leaves)))
    return {"leaves": leaves, "paths": _paths(flat), "indices": indices if _is_plain(indices) else None}


def _hindrance(leaf: Any) -> str | None:
    """What torch would not load."""
    if type(leaf) is int and leaf.bit_length() > _MOST_BITS:
        return f"an int of {leaf.bit_length():,} bits, of at most {_MOST_BITS:,}"
    return None if type(leaf) in (torch.Tensor, *_PLAIN) else f"a {type(leaf).__name__}"


def outline(packed: dict[str, Any]) -> dict[str, Any]:
    """What was packed, without the data of large tensors."""
    return {**packed, "leaves": [x.to("meta") if _has_data(x) else x for x in packed["leaves"]]}


def room_for(outline: dict[str, Any]) -> dict[str, Any]:
    """What was packed, with memory in which the data are to come."""
    leaves = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") if _is_meta(x) else x
        for x in outline["leaves"]
    ]
    return {**outline, "leaves": leaves}


def data_of(packed: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The data of large tensors, as bytes, to be read or written."""
    for x in packed["leaves"]:
        if _has_data(x):
            yield torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())


def _is_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def _has_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_quantized and x.nbytes > 0


def check(packed: dict[str, Any], like: Tree | None, where: str) -> None:
    """Whether it can be unpacked; what is not like the tree is named with its path."""
    _fitting(packed, like, where)


def unpack(packed: dict[str, Any], like: Tree | None, where: str) -> Tree:
    """Inverse of `pack`; with `like`, in its containers and on its devices."""
    flat, leaves = _fitting(packed, like, where)
    return unflatten(flat.structure, leaves if like is None else map(_placed, leaves, flat.leaves))


def _fitting(packed: dict[str, Any], like: Tree | None, where: str) -> tuple[Flat, list[Any]]:
    """The tree that gives the containers, and the leaves in its order."""
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
    _check_structure(packed["paths"], saved, flat, where)
    _check_leaves(leaves, flat, where)
    return flat, leaves


def _copy(x: Any, room: Any = None) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    if type(room) is type(x) and _is_like(room, x):
        return room.copy_(x)
    return x.resolve_conj().resolve_neg().to("cpu", copy=True)


def _is_like(room: torch.Tensor, x: torch.Tensor) -> bool:
    plain = room.layout == x.layout == torch.strided and not x.is_quantized
    return plain and (room.shape, room.dtype, room.stride()) == (x.shape, x.dtype, x.stride())


def _alone(leaves: Sequence[Any]) -> list[Any]:
    """Each with memory of its own, which holds nothing else: torch would save that too, and who shares it."""
    seen: set[int] = set()

    def alone(x: Any) -> Any:
        x = x.detach() if isinstance(x, torch.Tensor) else x
        if type(x) is torch.Tensor and x.device.type == "cpu" and _has_data(x) and x.is_contiguous():
            storage = x.untyped_storage()
            if storage.nbytes() == x.nbytes and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                return x.resolve_conj().resolve_neg()
        return _copy(x)

    return [alone(x) for x in leaves]


def _placed(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or like.device.type == "meta":
        return leaf
    return leaf.to(like.device).requires_grad_(like.requires_grad and like.is_leaf)


def _paths(flat: Flat) -> list[str]:
    return [accessor.codify("tree") for accessor in flat.structure.accessors()]


def _is_plain(node: Any) -> bool:
    """Whether a tree of indices has containers and keys only that load without running code."""
    if type(node) in (dict, OrderedDict):
        keys = all(type(key) in (str, int, float, bool) and _hindrance(key) is None for key in node)
        return keys and all(map(_is_plain, node.values()))
    if type(node) in (list, tuple):
        return all(map(_is_plain, node))
    return type(node) in (int, type(None))


def _check_structure(paths: list[str], saved: Flat | None, like: Flat, where: str) -> None:
    if saved is not None and saved.structure != like.structure:
        path, there, here = first_difference(saved.structure, like.structure, "tree")
        raise ValueError(f"{where}: {path} is {there} in the checkpoint, but {here} in like")
    for there, here in zip_longest(paths, _paths(like)):
        if there != here:
            raise ValueError(
                f"{where}: the checkpoint has {there or 'nothing'} where like has {here or 'nothing'}: their "
                "structures differ"
            )


def _check_leaves(leaves: list[Any], like: Flat, where: str) -> None:
    said = [(_said(leaf), _said(other), i) for i, (leaf, other) in enumerate(zip(leaves, like.leaves, strict=True))]
    wrong = [f"{like.path(i)} is {there}, but {here} in like" for there, here, i in said if there != here]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{where}: in the checkpoint {'; '.join(wrong[:5])}{more}")


def _said(leaf: Any) -> str:
    """What has to be the same; a number may be any number."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return "a number" if isinstance(leaf, int | float | complex) else f"a {type(leaf).__name__}"
