"""Gradients of shards, put together as gradients of the arguments: the adjoint of placing them."""

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.moves import LARGE, accumulator, add, add_to
from fdp._placement.packing import copy_or_packed, packed_copies
from fdp._placement.transfers import Named
from fdp._trees import torch_private
from fdp._trees.profiling import staged
from fdp._trees.registry import flattened
from fdp._trees.types import Tree

Grad = Tensor | None
Unused = Literal["zeros", "none"]
"""What the gradient of a leaf is that nothing uses."""


class Gradients:
    """Takes the gradients of the shards as they come: what is to be summed is summed at once, and not kept.

    A sum of two is a new tensor, which nobody else has: what comes later is added in its memory. `usual` is what the
    gradient of each leaf usually is, if all are whole: see `usual`.
    """

    def __init__(
        self,
        leaves: Sequence[LeafPlan],
        values: Sequence[Any],
        usual: list[Any] | None,
        shards: int,
        device: torch.device | None,
        sent_as: torch.dtype | None,
        unused: Unused = "zeros",
    ) -> None:
        self._leaves, self._values, self._usual = leaves, values, usual
        self._device, self.sent_as = device, sent_as
        # What each sum belongs to, and where that stands.
        self._homes: list[tuple[Tensor, Named, int]] = []
        self._counts: list[int | None] = []
        for leaf, value in zip(leaves, values, strict=True):
            homes = [(value, leaf.flat, leaf.index)] if usual else leaf.summed(value)
            self._counts.append(None if homes is None else len(homes))
            self._homes += homes or ()
        # How often each was used, where that is asked for; then all leaves are whole.
        self._used = [0.0] * len(self._homes) if unused == "none" else None
        self._totals: list[Grad] = [None] * len(self._homes)
        self._is_own = [False] * len(self._homes)
        self._packed: dict[Any, Tensor] = {}  # copies at home of gradients that are being added
        self._parts: list[list[Any]] = [[None] * shards if count is None else [] for count in self._counts]

    @staged("reduce")
    def add(self, shard: int, grads: list[Grad], parts: Sequence[Tree]) -> None:
        """Add the gradients of a shard, None where it has none; `parts` is what the shard had of the leaves.

        The list is emptied.
        """
        if None not in self._counts:
            self._add_whole(grads)
            return
        rest = iter(grads)
        whole: list[Grad] = []
        for i, (count, part) in enumerate(zip(self._counts, parts, strict=True)):
            if count is not None:
                whole += islice(rest, count)
                continue
            leaves, structure = flattened(part, "an argument")
            filled = map(_filled, islice(rest, len(leaves)), leaves)
            self._parts[i][shard] = structure.unflatten(filled)
        grads.clear()
        self._add_whole(whole)

    def _add_whole(self, grads: list[Grad]) -> None:
        totals = self._totals
        small: list[int] = []
        if self._used is not None:
            self._used = [n + (grad is not None) for n, grad in zip(self._used, grads, strict=True)]
        if self._are_usual(grads):
            if {type(None)}.issuperset(map(type, totals)):  # by types: `==` would compare the values of tensors
                totals[:] = grads
                grads.clear()
                return
            if self._are_usual(totals):
                small = [i for i, grad in enumerate(grads) if grad is not None and grad.nbytes < LARGE]
        if small:
            sums = torch_private.foreach_add([totals[i] for i in small], [grads[i] for i in small])
            for i, total in zip(small, sums, strict=True):
                totals[i] = total
        rest = sorted(set(range(len(grads))).difference(small))
        self._packed = self._brought_home(grads) if len(rest) > 1 else {}
        for i in rest:
            grad, grads[i] = grads[i], None
            if grad is not None:
                self._add_one(i, grad)
        self._packed = {}

    def _brought_home(self, grads: Sequence[Grad]) -> dict[Any, Tensor]:
        """Copies of small gradients that are elsewhere, if all belong to one device."""
        targets = {self._device or home.device for home, *_ in self._homes}
        away = [grad for grad in grads if grad is not None and grad.device not in targets]
        return packed_copies(away, targets) if away and len(targets) == 1 else {}

    def _add_one(self, i: int, grad: Tensor) -> None:
        home, flat, index = self._homes[i]
        grad, so_far, wide = self._home(grad, home, flat, index), self._totals[i], accumulator(home.dtype)
        if so_far is None:
            self._totals[i] = grad
        elif self._is_own[i]:
            self._totals[i] = add_to(so_far, grad if grad.dtype is wide else grad.to(wide))
        else:
            self._totals[i], self._is_own[i] = add(so_far.to(wide), grad.to(wide)), True

    def sums(self) -> list[Tensor]:
        """What is summed over the shards so far, and how often each was used."""
        if not self._are_usual(self._totals):
            for i, (home, *_) in enumerate(self._homes):
                wide, found = accumulator(home.dtype), self._totals[i]  # in all processes, however many shards each has
                empty = torch.zeros_like(home, dtype=wide, device=self._device) if found is None else found.to(wide)
                self._totals[i] = empty
        found = [total for total in self._totals if total is not None]
        return found if self._used is None else [*found, found[0].new_tensor(self._used, dtype=torch.float32)]

    def ours(self) -> list[bool]:
        """Which of them nobody else refers to, so that they may be written to."""
        return self._is_own if self._used is None else [*self._is_own, False]

    def replace_sums(self, sums: Sequence[Tensor]) -> None:
        """Put others in their place."""
        if self._used is not None:
            *sums, used = sums
            self._used = used.tolist()
        self._totals[:] = sums

    @staged("reduce")
    def finish(self) -> list[Tree]:
        """The gradient of each leaf, zeros or None where it is not used."""
        found = self._finished()
        return found if self._used is None else [x if used else None for x, used in zip(found, self._used, strict=True)]

    def _finished(self) -> list[Tree]:
        if self._are_usual(self._totals):
            return self._totals
        totals = zip(self._totals, self._homes, strict=True)
        sums = iter([self._home(_filled(total, home), home, flat, i) for total, (home, flat, i) in totals])
        each = zip(self._leaves, self._values, self._counts, self._parts, strict=True)
        return [
            leaf.gradient(value, list(islice(sums, count or 0)), parts, self._home)
            for leaf, value, count, parts in each
        ]

    def _are_usual(self, grads: Sequence[Grad]) -> bool:
        """Whether all gradients are there, and as is usual."""
        if self._usual is None:
            return False
        try:
            return list(map(_home_of, grads)) == self._usual and _PLAIN.issuperset(map(type, grads))
        except AttributeError:  # one is None
            return False

    def _home(self, grad: Tensor, value: Tensor, flat: Named, index: int) -> Tensor:
        """A gradient on the output device, else where the tensor is that it belongs to."""
        device = self._device or value.device
        if grad.device == device:
            return grad
        return copy_or_packed(grad, device, _GradientOf(flat), index, self._packed)


class _GradientOf(NamedTuple):
    """The names of the gradients of a flat tree, for the log of transfers."""

    flat: Named

    def path(self, index: int, /) -> str:
        return f"grad of {self.flat.path(index)}"


def usual(value: Tensor, device: torch.device | None) -> Any:
    """What the gradient of a leaf usually is; None if it is summed in another dtype."""
    is_same = accumulator(value.dtype) is value.dtype
    return (value.dtype, device or value.device, torch.strided, False) if is_same else None


_home_of: Any = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_PLAIN = frozenset({Tensor})


def _filled(grad: Grad, value: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(value)
    return grad if grad.dtype is value.dtype else grad.to(value.dtype)
