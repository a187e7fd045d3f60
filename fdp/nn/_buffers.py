"""The buffers of a module after its replicas have run."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fdp._placement.moves import copy
from fdp.nn._copies import Names

Buffer = tuple[nn.Module, str, Any]
"""The part of the user's module that has a buffer, its name there, and what a replica has in its place."""


class Lent(Protocol):
    """A replica, of which ids of buffers are those of copies."""

    copy_of: dict[int, Tensor]

    def buffers_now(self) -> Iterator[Buffer]:
        """All buffers as they are now."""
        ...


def write_first(lent: Lent, device: torch.device) -> None:
    """Give the module what a replica has in place of its buffers.

    What was written in place is there already, unless the replica has copies.
    """
    for part, key, value in lent.buffers_now():
        own = _own(part, key)
        if value is own or key not in part._buffers:  # what forward registers goes with the replica
            continue
        if own is None or lent.copy_of.get(id(value)) is not own:
            setattr(part, key, None if value is None else copy(value, device, Names([key]), 0))
        elif not is_same(own, moved := copy(value.detach(), own.device, Names([key]), 0)):
            write(own, moved)


def _own(part: nn.Module, key: str) -> Tensor | None:
    return part._buffers.get(key)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta:
        return a.is_meta
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN here


def write(own: Tensor, value: Tensor) -> None:
    """Give a buffer other values, in place."""
    with torch.inference_mode(own.is_inference()), torch.no_grad():
        if value.shape != own.shape:
            own.resize_(value.shape)
        own.copy_(value)
