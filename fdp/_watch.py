"""Writes in place to what a function was given, found by the versions of tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from fdp._place import Memo
from fdp._slots import Slots
from fdp._tensor import layers
from fdp._tree import Flat, flatten, tensors_in
from fdp._untraced import leave_alone


class Watch(NamedTuple):
    """The tensors that the function can reach, the leaf that each belongs to, and the versions that they had."""

    owners: list[tuple[Flat, int]]
    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def over(cls, flats: Sequence[Flat], memo: Memo) -> Self:
        """Watch the caller's tensors and the copies made of them."""
        if torch.compiler.is_compiling():  # reading versions breaks the graph
            return cls([], [], [])
        owners, tensors = [], []
        transformed = torch._C._are_functorch_transforms_active()
        for flat in flats:
            for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
                copies = memo[id(leaf), spec] if isinstance(leaf, torch.Tensor) else ()
                # Views share the version of what they are views of.
                moved = [tensor for tensor in copies if tensor.device != leaf.device]
                own = [tensor for tensor in (*leaf_tensors(leaf), *moved) if not tensor.is_inference()]
                if transformed:  # a write under vmap shows in the version of what is batched
                    own = [layer for tensor in own for layer in layers(tensor)]
                owners += [(flat, i)] * len(own)
                tensors += own
        return cls(owners, tensors, [tensor._version for tensor in tensors])

    def check(self, where: str) -> None:
        """Raise if the function wrote in place to an argument, as far as version counters tell."""
        versions = [tensor._version for tensor in self.tensors]
        if versions == self.versions:
            return
        written = [i for i, (old, new) in enumerate(zip(self.versions, versions, strict=True)) if old != new]
        paths = ", ".join(dict.fromkeys(path for i in written for path in _paths_of(self.tensors[i], *self.owners[i])))
        raise RuntimeError(
            f"{where}: the function wrote in place to {paths}. It must be pure: work on x.clone(), or return the new "
            "value. The tensors that were passed may hold the change already"
        )


def _paths_of(tensor: torch.Tensor, flat: Flat, index: int) -> list[str]:
    """Where a tensor stands, also inside a leaf that holds several."""
    leaf, path = flat.leaves[index], flat.path(index)
    if isinstance(leaf, torch.Tensor):
        return [path]
    inner = flatten(leaf.shards if isinstance(leaf, Slots) else leaf, path)
    return [inner.path(i) for i, other in enumerate(inner.leaves) if other is tensor] or [path]


def leaf_tensors(leaf: Any) -> Sequence[torch.Tensor]:
    """The tensors in a leaf of the arguments: itself, those on all slots, those of a list under 'items'."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    return tensors_in(leaf.shards if isinstance(leaf, Slots) else leaf)


leave_alone(globals())
