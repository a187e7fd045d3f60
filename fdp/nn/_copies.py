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


def copies_of(tensors: Tensors, device: torch.device, *, always: bool = True) -> Tensors:
    """The tensors on a device; nobody can write to one that is expanded, so it serves there as it is."""
    names = Names(list(tensors))
    return {
        name: copy(tensor, device, names, i, always=always and not is_expanded(tensor))
        for i, (name, tensor) in enumerate(tensors.items())
    }
