"""Copies of tensors for other devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp._placement.moves import copy, is_expanded

Tensors = dict[str, Tensor]


class Names(NamedTuple):
    """What the log of `transfers` calls the tensors of a module."""

    names: Sequence[str]

    def path(self, index: int, /) -> str:
        """The name of a tensor."""
        return f"module.{self.names[index]}"


def copies_of(tensors: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device, as they are where they are there already."""
    names = Names(list(tensors))
    return {name: copy(tensor, device, names, i) for i, (name, tensor) in enumerate(tensors.items())}


def own_copies_of(tensors: Tensors, devices: Sequence[torch.device]) -> list[Tensors]:
    """Copies that share no memory; nobody can write to one that is expanded, so it serves as it is."""
    written = {name for name, tensor in tensors.items() if not is_expanded(tensor)}
    copies = [copies_of(tensors, device) for device in devices]
    return [
        {name: x.clone() if x is tensors[name] and name in written else x for name, x in held.items()}
        for held in copies
    ]
