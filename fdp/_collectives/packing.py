"""Many small tensors as one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._trees import torch_private

_SMALL = 2**16  # bytes


def layout_of(tensors: Sequence[Tensor]) -> list[list[int]] | None:
    """Which small tensors travel as one: groups of the same dtype and device. None if there are none."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        if x.layout is torch.strided and x.nbytes < _SMALL:
            groups.setdefault((x.dtype, x.device), []).append(i)
        else:
            groups[i] = [i]
    return None if len(groups) == len(tensors) else list(groups.values())


def packed(tensors: Sequence[Tensor], layout: list[list[int]]) -> list[Tensor]:
    """One tensor for each group."""
    return [
        tensors[group[0]] if len(group) == 1 else torch_private.flatten_dense_tensors([tensors[i] for i in group])
        for group in layout
    ]


def unpacked(packed: Sequence[Tensor], like: Sequence[Tensor], layout: list[list[int]]) -> list[Tensor]:
    """Inverse of `packed`; the tensors are shaped as those that they are `like`.

    Each has a version of its own, so that a write to one is none to the others: `unsafe_split_with_sizes` and `.data`
    make no views of what they are given.
    """
    found: list[Any] = [None] * len(like)
    for group, x in zip(layout, packed, strict=True):
        if len(group) == 1:
            found[group[0]] = x
            continue
        parts = torch.unsafe_split_with_sizes(x, [like[i].numel() for i in group])
        for i, part in zip(group, parts, strict=True):
            found[i] = part if like[i].ndim == 1 else part.view(like[i].shape).data
    return found
