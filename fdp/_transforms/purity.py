"""Writes in place to what a function was given, found by the versions of tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from fdp._placement.moves import Memo, layers
from fdp._placement.sharded import Slots, leaf_tensors
from fdp._trees import torch_private
from fdp._trees.listing import listed
from fdp._trees.tree import Flat, flatten


class MutationCheck(NamedTuple):
    """What was given, the copies made of it, all that the function can write to, and the versions that this had."""

    flats: Sequence[Flat]
    given: list[torch.Tensor]
    memo: Memo
    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def over(cls, flats: Sequence[Flat], memo: Memo, *, has_copies: bool) -> Self:
        """Remember the versions of the caller's tensors, and of the copies that were made of them."""
        given: list[torch.Tensor] = []
        for flat in flats:
            for leaf in flat.leaves:
                given += (leaf,) if isinstance(leaf, torch.Tensor) else leaf_tensors(leaf)
        if torch.compiler.is_compiling():  # reading versions breaks the graph
            return cls(flats, given, memo, [], [])
        tensors = given
        if True in map(torch.Tensor.is_inference, given):
            tensors = [x for x in given if not x.is_inference()]
        if has_copies:  # parts on the same device share the version of what they are views of
            copies = [x for found in memo.values() for x in _each(found) if not x.is_inference()]
            tensors = [*tensors, *copies]
        if torch_private.is_transformed():  # a write under vmap shows in the version of what is batched
            tensors = [layer for x in tensors for layer in layers(x)]
        return cls(flats, given, memo, tensors, list(map(torch_private.version, tensors)))

    def check(self, where: str) -> None:
        """Raise if the function wrote in place to an argument, as far as version counters tell."""
        versions = list(map(torch_private.version, self.tensors))
        if versions == self.versions:
            return
        changes = zip(self.tensors, self.versions, versions, strict=True)
        written = {id(tensor) for tensor, old, new in changes if old != new}
        owners = {
            number for (number, _), found in self.memo.items() if any(_is_among(x, written) for x in _each(found))
        }
        paths = [
            path
            for flat in self.flats
            for i, leaf in enumerate(flat.leaves)
            for tensor in leaf_tensors(leaf)
            if id(tensor) in owners or _is_among(tensor, written)
            for path in _paths_of(flat, i, tensor)
        ]
        raise RuntimeError(
            f"{where}: the function wrote in place to {listed(list(dict.fromkeys(paths)))}. It must be pure: work on "
            "x.clone(), or return the new value. The tensors that were passed may hold the change already"
        )


def _each(found: Any) -> Sequence[torch.Tensor]:
    return (found,) if isinstance(found, torch.Tensor) else found


def _is_among(tensor: torch.Tensor, written: set[int]) -> bool:
    return any(id(layer) in written for layer in layers(tensor))


def _paths_of(flat: Flat, index: int, tensor: torch.Tensor) -> list[str]:
    """Where a tensor stands, also inside a leaf that holds several."""
    leaf, path = flat.leaves[index], flat.path(index)
    if isinstance(leaf, torch.Tensor):
        return [path]
    inner = flatten(leaf.shards if isinstance(leaf, Slots) else leaf, path)
    return [inner.path(i) for i, other in enumerate(inner.leaves) if other is tensor]
