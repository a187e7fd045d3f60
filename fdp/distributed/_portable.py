"""Trees as values that torch loads without running code, and back."""

from collections import OrderedDict
from itertools import zip_longest
from typing import Any

import torch

from fdp._trees.describe import first_difference
from fdp._trees.listing import listed
from fdp._trees.tree import Flat, flatten, unflatten
from fdp._trees.types import Tree

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def pack(tree: Tree, where: str) -> dict[str, Any]:
    """Copies of the leaves on the CPU, and where they stand."""
    flat = flatten(tree, "tree", where=where)
    leaves = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    refused = [i for i, leaf in enumerate(leaves) if type(leaf) not in (torch.Tensor, *_PLAIN)]
    if refused:
        each = listed(refused, lambda i: f"{flat.path(i)} is a {type(leaves[i]).__name__}", "; ")
        raise TypeError(
            f"{where}: {each}. A checkpoint holds tensors, numbers, strings, bytes, dtypes, devices and sizes, so that "
            "loading it runs no code: torch.as_tensor(array), float(scalar), enum.name"
        )
    indices = unflatten(flat.structure, range(len(leaves)))
    return {"leaves": leaves, "paths": _paths(flat), "indices": indices if _is_plain(indices) else None}


def unpack(packed: dict[str, Any], like: Tree | None, where: str) -> Tree:
    """Inverse of `pack`; with `like`, in its containers and on its devices."""
    leaves, indices = packed["leaves"], packed["indices"]
    saved = flatten(indices, "tree", where=where) if indices is not None else None
    if like is None:
        if saved is None:
            raise ValueError(
                f"{where}: the tree has containers other than dict, list and tuple, which only a tree like it can "
                "give: restore(like=tree)"
            )
        return unflatten(saved.structure, (leaves[i] for i in saved.leaves))
    flat = flatten(like, "tree", where=where)
    _check_structure(packed["paths"], saved, flat, where)
    _check_leaves(leaves, flat, where)
    return unflatten(flat.structure, map(_placed, leaves, flat.leaves))


def _copy(x: torch.Tensor) -> torch.Tensor:
    # A copy also of what is on the CPU: of a view torch would save all the memory that it is a view of.
    return x.detach().resolve_conj().resolve_neg().to("cpu", copy=True)


def _placed(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or like.device.type == "meta":
        return leaf
    return leaf.to(like.device).requires_grad_(like.requires_grad and like.is_leaf)


def _paths(flat: Flat) -> list[str]:
    return [accessor.codify("tree") for accessor in flat.structure.accessors()]


def _is_plain(node: Any) -> bool:
    """Whether a tree of indices has containers and keys only that load without running code."""
    if type(node) in (dict, OrderedDict):
        return all(type(key) in (str, int, float, bool) and _is_plain(child) for key, child in node.items())
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
