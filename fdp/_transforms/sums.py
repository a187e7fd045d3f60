"""Gradients of shards, put together as gradients of the arguments: the adjoint of placing them."""

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.moves import LARGE, accumulator, add, add_to
from fdp._placement.packing import Packed, copy_or_packed, packed_copies
from fdp._placement.transfers import Named
from fdp._trees import torch_private
from fdp._trees.registry import flattened
from fdp._trees.types import Tree

Grad = Tensor | None
Unused = Literal["zeros", "none"]
"""What the gradient of a leaf is that nothing uses."""


class GradientPlan(NamedTuple):
    """Which leaves a call is differentiated in, and how.

    Attributes:
        leaves: These leaves, and `at`: their positions among all.
        structures: Those of the arguments that they are in.
        are_tensors: Each is a tensor.
        usual: What the gradient of each usually is: see `usual_of`.
        large: Those that are added one by one, so that each can be let go.
        needs_func: Gradients are taken by torch.func.
        is_attached: Results are differentiable in what was given.
    """

    leaves: tuple[LeafPlan, ...]
    at: tuple[int, ...]
    structures: tuple[Any, ...]
    are_tensors: bool
    usual: list[Any]
    large: frozenset[int]
    needs_func: bool
    is_attached: bool


def usual_of(leaf: LeafPlan, value: Tensor, device: torch.device | None) -> Any:
    """What the gradient of a leaf usually is; None if it is not summed, or in another dtype."""
    is_same = leaf.dim is None and accumulator(value.dtype) is value.dtype
    return (value.dtype, device or value.device, torch.strided, False) if is_same else None


def are_large(values: Sequence[Any]) -> frozenset[int]:
    """The positions of large tensors."""
    dense = {i: x for i, x in enumerate(values) if isinstance(x, Tensor) and x.layout is torch.strided}
    return frozenset([i for i, x in dense.items() if x.nbytes >= LARGE])


_home_of: Any = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_PLAIN = frozenset({Tensor})


class Gradients:
    """Takes the gradients of the shards as they come: what is to be summed is summed at once, and not kept.

    A sum of two is a new tensor, which nobody else has: what comes later is added in its memory. As long as all are as
    usual they are summed in few calls; from the first that is not on, each by itself.
    """

    def __init__(
        self,
        own: GradientPlan,
        values: Sequence[Any],
        shards: int,
        device: torch.device | None,
        sent_as: torch.dtype | None,
        unused: Unused,
    ) -> None:
        self._own, self._values, self._shards, self._device, self.sent_as = own, values, shards, device, sent_as
        self._is_usual = bool(own.usual)
        self._added = 0
        # How often each was used, where that is asked for; then all leaves are whole.
        self._used = [0.0] * len(values) if unused == "none" else None
        self._totals: list[Grad] = []
        self._homes: list[tuple[Tensor, Named, int]] = []  # what each sum belongs to, and where that stands
        self._is_own: list[bool] = []
        self._packed: Packed = {}  # copies at home of gradients that are being added
        self._parts: list[list[Any] | None] = []  # of leaves whose gradients are not summed

    def _are_usual(self, grads: Sequence[Grad]) -> bool:
        try:
            return list(map(_home_of, grads)) == self._own.usual and _PLAIN.issuperset(map(type, grads))
        except AttributeError:  # one is None
            return False

    def add(self, shard: int, grads: list[Grad], column: Sequence[Any]) -> None:
        """Add the gradients of a shard, None where it has none; `column` has its leaves. The list is emptied."""
        if self._used is not None:
            self._used = [n + (grad is not None) for n, grad in zip(self._used, grads, strict=True)]
        if not self._is_usual or not self._are_usual(grads):
            self._begin_each()
            self._add_each(shard, grads, column)
            return
        self._added += 1
        if self._added == 1:
            self._totals = grads.copy()
        elif not self._own.large:
            self._totals = list(torch_private.foreach_add(self._totals, grads))
        else:
            self._add_large(grads)
        grads.clear()

    def _add_large(self, grads: list[Any]) -> None:
        totals: list[Any] = self._totals
        small = [i for i in range(len(grads)) if i not in self._own.large]
        if small:
            sums = torch_private.foreach_add([totals[i] for i in small], [grads[i] for i in small])
            for i, total in zip(small, sums, strict=True):
                totals[i] = total
        for i in self._own.large:
            grad, grads[i] = grads[i], None
            totals[i] = add(totals[i], grad) if self._added == 2 else add_to(totals[i], grad)

    def _begin_each(self) -> None:
        """From here on each is added by itself."""
        if self._parts:
            return
        self._is_usual = False
        for leaf, value in zip(self._own.leaves, self._values, strict=True):
            homes = leaf.summed(value)
            self._parts.append([None] * self._shards if homes is None else None)
            self._homes += homes or ()
        self._is_own = [self._added > 1] * len(self._homes)
        self._totals = self._totals or [None] * len(self._homes)

    def _add_each(self, shard: int, grads: list[Grad], column: Sequence[Any]) -> None:
        whole: list[Grad] = []
        grads.reverse()
        for i, leaf in enumerate(self._own.leaves):
            parts = self._parts[i]
            if parts is None:
                whole += [grads.pop() for _ in leaf.summed(self._values[i]) or ()]
                continue
            leaves, structure = flattened(column[leaf.index], "an argument")
            parts[shard] = structure.unflatten([_filled(grads.pop(), part) for part in leaves])
        self._packed = self._brought_home(whole) if len(whole) > 1 else {}
        for number in range(len(whole)):
            grad, whole[number] = whole[number], None  # let go when it is added
            if grad is not None:
                self._add_one(number, grad)
        self._packed = {}

    def _brought_home(self, grads: Sequence[Grad]) -> Packed:
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
        if not self._is_usual or not self._added:
            self._begin_each()
        for i, (home, *_) in enumerate(self._homes):
            wide, found = accumulator(home.dtype), self._totals[i]  # in all processes, however many shards each has
            empty = torch.zeros_like(home, dtype=wide, device=self._device) if found is None else found.to(wide)
            self._totals[i] = empty
        found = [total for total in self._totals if total is not None]
        return found if self._used is None else [*found, found[0].new_tensor(self._used, dtype=torch.float32)]

    def replace_sums(self, sums: Sequence[Tensor]) -> None:
        """Put others in their place."""
        if self._used is not None:
            *sums, used = sums
            if not all(self._used):  # else it is known: to read it would wait for the device
                self._used = used.tolist()
        self._totals[:] = sums
        if not (self._is_usual and self._are_usual(self._totals)):
            self._begin_each()

    def finish(self) -> list[Tree]:
        """The gradient of each leaf, zeros or None where it is not used."""
        found = self._totals if self._added and self._is_usual else self._finish_each()
        return found if self._used is None else [x if used else None for x, used in zip(found, self._used, strict=True)]

    def _finish_each(self) -> list[Tree]:
        self._begin_each()
        totals = zip(self._totals, self._homes, strict=True)
        sums = iter([self._home(_filled(total, home), home, flat, i) for total, (home, flat, i) in totals])
        found: list[Tree] = []
        for leaf, value, parts in zip(self._own.leaves, self._values, self._parts, strict=True):
            own = [] if parts is not None else list(islice(sums, len(leaf.summed(value) or ())))
            found.append(leaf.gradient(value, own, parts or [], self._home))
        return found

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


def _filled(grad: Grad, value: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(value)
    return grad if grad.dtype is value.dtype else grad.to(value.dtype)
