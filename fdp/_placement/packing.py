"""Many small tensors as one.

Tensors that differ in their first dim only are one along it, and one dtype is one buffer in the end. So the tensors of
a tree are joined and taken apart by few calls of torch, and Python sees each of them hardly at all.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from fdp._placement.moves import Memo, copy
from fdp._placement.transfer_log import Named, report
from fdp._trees import torch_private

_LAYOUT = operator.attrgetter("layout")
_SMALL = 2**16  # bytes
_KEPT = 32  # of how many trees the layouts are kept


class Part(NamedTuple):
    """Places of tensors that differ in their first dim only: its sizes, and the dims behind; None if they have none."""

    places: list[int]
    sizes: list[int]
    tail: tuple[int, ...] | None

    def numel(self) -> int:
        """How many elements they have."""
        return sum(self.sizes) * math.prod(self.tail or ())

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Its tensors as one."""
        if len(self.places) == 1:
            return tensors[self.places[0]].reshape(-1)
        own = operator.itemgetter(*self.places)(tensors)
        return (torch.stack(own) if self.tail is None else torch.cat(own)).reshape(-1)

    def parted(self, x: Tensor) -> Sequence[Tensor]:
        """Inverse of `joined`; each has a version of its own."""
        if self.tail is None:
            return [each.data for each in x.unbind()]
        x = x.view(sum(self.sizes), *self.tail)
        return [x.data] if len(self.sizes) == 1 else torch.unsafe_split_with_sizes(x, self.sizes)


class Layout(NamedTuple):
    """Which tensors travel as one. What is alone in its buffer travels as it is.

    Each tensor that was unpacked has a version of its own, so that a write to one is none to the others:
    `unsafe_split_with_sizes` and `.data` make no views of what they are given.
    """

    buffers: list[list[Part]]
    order: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # those of all parts, as they were

    def packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each buffer, in memory of its own if several are in it."""
        return [self._buffer(parts, tensors) for parts in self.buffers]

    def _buffer(self, parts: list[Part], tensors: Sequence[Tensor]) -> Tensor:
        if _is_alone(parts):
            return tensors[parts[0].places[0]]
        return parts[0].joined(tensors) if len(parts) == 1 else torch.cat([part.joined(tensors) for part in parts])

    def unpacked(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of `packed`."""
        found: list[Tensor] = []
        for parts, x in zip(self.buffers, buffers, strict=True):
            if _is_alone(parts):
                found.append(x)
                continue
            pieces = [x] if len(parts) == 1 else torch.unsafe_split_with_sizes(x, [part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                found += part.parted(piece)
        return list(self.order(found))


def _is_alone(parts: list[Part]) -> bool:
    return len(parts) == 1 and len(parts[0].places) == 1


def layout_of(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], rows: Sequence[Sequence[Tensor]]
) -> Layout | None:
    """How tensors of these shapes and dtypes travel, of which each slot has a row.

    None if each travels by itself: where there is one, where none is small, and where one of them is sparse.
    """
    if len(shapes) == 1 or set(map(_LAYOUT, chain(*rows))) != {torch.strided}:
        return None
    return _layout_of(tuple(shapes), tuple(dtypes))


@functools.lru_cache(_KEPT)
def _layout_of(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Layout | None:
    groups: dict[torch.dtype, dict[tuple[int, ...] | None, Part]] = {}
    buffers: list[list[Part]] = []
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        size, tail = (shape[0], tuple(shape[1:])) if shape else (1, None)
        if math.prod(shape) * dtype.itemsize >= _SMALL:
            buffers.append([Part([i], [size], tail)])
            continue
        part = groups.setdefault(dtype, {}).setdefault(tail, Part([], [], tail))
        part.places.append(i)
        part.sizes.append(size)
    buffers += [list(parts.values()) for parts in groups.values()]
    if len(buffers) == len(shapes):
        return None
    places = [i for parts in buffers for part in parts for i in part.places]
    order = sorted(range(len(places)), key=places.__getitem__)
    return Layout(buffers, list if order == sorted(order) else operator.itemgetter(*order))


Packed = Mapping[tuple[int, torch.device], Tensor]
"""Copies that have been made already, by the id of the tensor and the device."""


def copy_or_packed(tensor: Tensor, device: torch.device, flat: Named, index: int, packed: Packed) -> Tensor:
    """The tensor on a device, which may have come in a buffer; the log of `transfers` has a line for it either way."""
    found = packed.get((id(tensor), device))
    if found is None:
        return copy(tensor, device, flat, index)
    report(tensor, device, flat, index)
    return found


def copy_all(leaves: Sequence[tuple[Tensor, Named, int]], devices: Sequence[torch.device], memo: Memo) -> None:
    """Copies of whole tensors on devices, into the memo: each is the leaf of a flat tree, which the log names."""
    packed = packed_copies([x for x, *_ in leaves], devices) if len(leaves) > 1 else {}
    for (x, flat, index), device in product(leaves, devices):
        if (x, device) not in memo:
            memo[x, device] = copy_or_packed(x, device, flat, index, packed)


def packed_copies(tensors: Iterable[Tensor], devices: Iterable[torch.device]) -> Packed:
    """Copies of small tensors on other devices.

    What is on one device and has one dtype travels in one buffer. Left out is what a graph leads through, or a
    transform of torch.func, and what only a copy of its own would keep as it is: strides, subclasses.
    """
    found: dict[tuple[int, torch.device], Tensor] = {}
    if torch.compiler.is_dynamo_compiling() or torch_private.is_transformed():
        return found
    sources: dict[torch.device, dict[int, Tensor]] = {}
    for tensor in tensors:
        if _may_travel(tensor):
            sources.setdefault(tensor.device, {})[id(tensor)] = tensor
    targets = list(dict.fromkeys(devices))
    for source, own in sources.items():
        each = list(own.values())
        layout = layout_of([x.shape for x in each], [x.dtype for x in each], [each])
        buffers = [] if layout is None else layout.packed(each)
        for target in targets:
            if layout is not None and target != source:
                moved = layout.unpacked([buffer.to(target) for buffer in buffers])
                found.update({(key, target): x for key, x in zip(own, moved, strict=True)})
    return found


PLAIN: set[type] = {Tensor, torch.nn.Parameter}
"""Tensors of these classes are nothing but their elements."""


def _may_travel(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN or (tensor.requires_grad and torch.is_grad_enabled()):
        return False
    is_small = tensor.layout is torch.strided and not tensor.is_nested and 0 < tensor.nbytes < _SMALL
    is_odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return is_small and not is_odd and tensor.is_contiguous()
