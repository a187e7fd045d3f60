"""The buffers of a module after its replicas have run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fdp._placement.join import mean
from fdp._placement.moves import copy, is_expanded, is_inexact
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


def write_means(
    lent: Sequence[Lent],
    given: Mapping[int, Tensor],
    weights: Sequence[float] | None,
    device: torch.device,
    where: str,
) -> None:
    """Give the module the means over all replicas, but where they have what was `given`, by the id of the buffer."""
    columns = [{(part, key): value for part, key, value in each.buffers_now()} for each in lent]
    found: list[tuple[nn.Module, str, Tensor | None, bool]] = []
    for part, key in columns[0]:
        if key not in part._buffers:
            continue
        values = [column.get((part, key)) for column in columns]
        own = _own(part, key)
        if all(value is None for value in values):
            found += [(part, key, None, False)] if own is not None else []
            continue
        moved = [copy(value.detach(), device, Names([key]), 0) for value in values if value is not None]
        if own is not None and all(is_same(value, given[id(own)]) for value in moved):
            continue  # the mean of equal numbers need not be that number
        in_place = all(each.copy_of.get(id(value)) is own for each, value in zip(lent, values, strict=True))
        found.append((part, key, _mean(moved, len(values), weights, key, where), in_place))
    for part, key, value, in_place in found:  # not before all are found: one that has no mean is an error
        own = _own(part, key)
        if in_place and own is not None and value is not None and not is_expanded(own):
            write(own, value)
        else:
            setattr(part, key, value)


def _mean(values: Sequence[Tensor], count: int, weights: Sequence[float] | None, key: str, where: str) -> Tensor:
    if len(values) < count or len({(tuple(value.shape), value.dtype) for value in values}) > 1:
        problem = "differs in shape or dtype between replicas, and has no mean"
    elif not is_inexact(values[0]) and not all(is_same(value, values[0]) for value in values):
        problem = f"is {values[0].dtype}, which has no mean, and differs between replicas"
    else:
        return mean(values, weights)
    raise ValueError(f"{where}: the buffer {key!r} {problem}. Pass buffers='first'")


def _own(part: nn.Module, key: str) -> Tensor | None:
    buffers: Any = part._buffers  # those of a scripted module have no `get`
    return buffers[key] if key in buffers else None  # noqa: SIM401


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
