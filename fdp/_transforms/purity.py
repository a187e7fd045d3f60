"""Writes in place to what a function was given, found by the versions of tensors."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from fdp._placement.moves import Memo, layers
from fdp._placement.sharded import Slots, leaf_tensors
from fdp._trees import torch_private
from fdp._trees.listing import listed
from fdp._trees.tree import Flat, flatten
from fdp._trees.untraced import leave_alone


class MutationCheck(NamedTuple):
    """The tensors that the function can reach, what each belongs to, a tensor in a leaf, and the versions they had."""

    owners: list[tuple[Flat, int, torch.Tensor]]
    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def over(cls, flats: Sequence[Flat], memo: Memo) -> Self:
        """MutationCheck the caller's tensors and the copies made of them."""
        if torch.compiler.is_compiling():  # reading versions breaks the graph
            return cls([], [], [])
        owners, tensors = [], []
        copies: dict[int, list[torch.Tensor]] = {}
        for (number, _), found in memo.items():
            copies.setdefault(number, []).extend([found] if isinstance(found, torch.Tensor) else found)
        transformed = torch_private.is_transformed()
        for flat in flats:
            for i, tensor in ((i, tensor) for i, leaf in enumerate(flat.leaves) for tensor in leaf_tensors(leaf)):
                # Views share the version of what they are views of.
                moved = [other for other in copies.get(id(tensor), ()) if other.device != tensor.device]
                own = [other for other in (tensor, *moved) if not other.is_inference()]
                if transformed:  # a write under vmap shows in the version of what is batched
                    own = [layer for other in own for layer in layers(other)]
                owners += [(flat, i, tensor)] * len(own)
                tensors += own
        return cls(owners, tensors, list(map(torch_private.version, tensors)))

    def check(self, where: str) -> None:
        """Raise if the function wrote in place to an argument, as far as version counters tell."""
        versions = list(map(torch_private.version, self.tensors))
        if versions == self.versions:
            return
        written = [i for i, (old, new) in enumerate(zip(self.versions, versions, strict=True)) if old != new]
        paths = dict.fromkeys(path for i in written for path in _paths_of(*self.owners[i]))
        raise RuntimeError(
            f"{where}: the function wrote in place to {listed(list(paths))}. It must be pure: work on x.clone(), or "
            "return the new value. The tensors that were passed may hold the change already"
        )


def _paths_of(flat: Flat, index: int, tensor: torch.Tensor) -> list[str]:
    """Where a tensor stands, also inside a leaf that holds several."""
    leaf, path = flat.leaves[index], flat.path(index)
    if isinstance(leaf, torch.Tensor):
        return [path]
    inner = flatten(leaf.shards if isinstance(leaf, Slots) else leaf, path)
    return [inner.path(i) for i, other in enumerate(inner.leaves) if other is tensor]


leave_alone(globals())
