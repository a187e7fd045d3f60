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
from fdp._placement.transfer_log import Named
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
        in_parts: Those of which each shard has the gradient of a part of its own. Of the others they are summed.
        usual: What each gradient usually is, if all are summed, in their own dtype.
        are_small: All are added in one call. Else one by one, so that each can be let go.
        needs_func: Gradients are taken by torch.func.
        is_attached: Results are differentiable in what was given.
    """

    leaves: tuple[LeafPlan, ...]
    at: tuple[int, ...]
    structures: tuple[Any, ...]
    are_tensors: bool
    in_parts: tuple[int, ...]
    usual: list[Any] | None
    are_small: bool
    needs_func: bool
    is_attached: bool


def gradient_plan(
    leaves: Sequence[LeafPlan],
    values: Sequence[Any],
    structures: Sequence[Any],
    target: torch.device | None,
    *,
    needs_func: bool,
    is_attached: bool,
) -> GradientPlan:
    """How a call is differentiated in leaves with these values; gradients go to a target, if there is one."""
    places, usual = range(len(leaves)), None
    in_parts = tuple([i for i in places if leaves[i].summed(values[i]) is None])
    are_plain = _PLAIN.issuperset(map(type, values)) and not (needs_func or in_parts)
    if are_plain and all(accumulator(value.dtype) is value.dtype for value in values):
        usual = [(value.dtype, target or value.device, torch.strided, False) for value in values]
    are_small = are_plain and all(value.layout is torch.strided and value.nbytes < LARGE for value in values)
    at, are_tensors = tuple([leaf.index for leaf in leaves]), all(isinstance(value, Tensor) for value in values)
    own = tuple(leaves), at, tuple(structures), are_tensors, in_parts, usual, are_small
    return GradientPlan(*own, needs_func, is_attached)


_home_of: Any = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_dtype_of: Any = operator.attrgetter("dtype")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Gradients:
    """Takes the gradients of the shards as they come: what is to be summed is summed at once, and not kept.

    A sum of two is a new tensor, which nobody else has: what comes later is added in its memory. Small ones that are as
    usual are added in one call.
    """

    is_used = False  # some tensor has a gradient

    def __init__(self, own: GradientPlan, values: Sequence[Any], shards: int, kind: Any) -> None:
        self._own, self._values = own, values
        self._device, self.sent_as, self._unused = kind.target, kind.reduce_dtype, kind.unused
        self._is_usual = own.usual is not None
        self._known_homes: list[tuple[Tensor, Named, int]] | None = None
        self._totals: list[Grad] = []
        self._added: list[float] = []  # how many gradients each is the sum of
        self._parts: dict[int, list[Any]] = {}
        for i in own.in_parts:
            self._parts[i] = [None] * shards
        self._packed: Packed = {}  # copies at home of gradients that are being added

    @property
    def _homes(self) -> list[tuple[Tensor, Named, int]]:
        """What each sum belongs to, and where that stands."""
        if self._known_homes is None:  # no `cached_property`, whose lock torch.compile does not trace
            each = zip(self._own.leaves, self._values, strict=True)
            self._known_homes = [home for leaf, value in each for home in leaf.summed(value) or ()]
        return self._known_homes

    def _are_usual(self, grads: Sequence[Grad]) -> bool:
        try:
            return list(map(_home_of, grads)) == self._own.usual and _PLAIN.issuperset(map(type, grads))
        except AttributeError:  # one is None
            return False

    def add(self, shard: int, grads: list[Grad], column: Sequence[Any]) -> None:
        """Add the gradients of a shard, None where it has none; `column` has its leaves. The list is emptied."""
        if self._parts:
            self._take_parts(shard, grads, column)
        self._is_usual = self._is_usual and self._are_usual(grads)
        if self._is_usual and not self._totals:
            self._totals, self._added = grads.copy(), [1] * len(grads)
        elif self._is_usual and self._own.are_small:
            self._totals = list(torch_private.foreach_add(self._totals, grads))
            self._added = [count + 1 for count in self._added]
        else:
            self._begin()
            self._packed = {} if self._is_usual else self._brought_home(grads)
            for i in range(len(grads)):
                grad, grads[i] = grads[i], None  # let go when it is added
                if grad is not None:
                    self._add_one(i, grad)
            self._packed = {}
        self.is_used = self.is_used or any(self._added)
        grads.clear()

    def _begin(self) -> None:
        if not self._totals:
            self._totals, self._added = [None] * len(self._homes), [0] * len(self._homes)

    def _take_parts(self, shard: int, grads: list[Grad], column: Sequence[Any]) -> None:
        """Keep what is a part of a shard's own; what is to be summed is left."""
        each = iter(grads.copy())
        grads.clear()
        for i, leaf in enumerate(self._own.leaves):
            if i not in self._parts:
                grads += islice(each, len(leaf.summed(self._values[i]) or ()))
                continue
            leaves, structure = flattened(column[leaf.index], "an argument")
            own = list(islice(each, len(leaves)))
            self.is_used = self.is_used or any(grad is not None for grad in own)
            self._parts[i][shard] = structure.unflatten(map(_filled, own, leaves))

    def _brought_home(self, grads: Sequence[Grad]) -> Packed:
        """Copies of small gradients that are elsewhere, if all belong to one device."""
        targets = {self._device or home.device for home, *_ in self._homes}
        away = [grad for grad in grads if grad is not None and grad.device not in targets]
        return packed_copies(away, targets) if len(away) > 1 and len(targets) == 1 else {}

    def _add_one(self, i: int, grad: Tensor) -> None:
        home, flat, index = self._homes[i]
        grad, total, wide = self._home(grad, home, flat, index), self._totals[i], accumulator(home.dtype)
        if total is not None:
            grad = grad.to(wide)
            grad = add_to(total, grad) if self._added[i] > 1 else add(total.to(wide), grad)
        self._totals[i] = grad
        self._added[i] += 1

    def sums(self) -> list[Tensor]:
        """What is summed over the shards so far, and if that is wanted, how often each was used."""
        totals: list[Any] = self._totals
        is_whole = self._is_usual and len(totals) > 0 and self._unused == "zeros"
        if is_whole and all(accumulator(dtype) is dtype for dtype in set(map(_dtype_of, totals))):
            return totals.copy()
        self._begin()
        found: list[Tensor] = []
        for total, (home, *_) in zip(self._totals, self._homes, strict=True):
            wide = accumulator(home.dtype)  # in all processes, however many shards each has
            empty = torch.zeros_like(home, dtype=wide, device=self._device) if total is None else total.to(wide)
            found.append(empty)
        return found if self._unused == "zeros" else [*found, found[0].new_tensor(self._added, dtype=torch.float32)]

    def replace_sums(self, sums: Sequence[Tensor]) -> None:
        """Put others in their place."""
        if self._unused == "none":
            *sums, added = sums
            if not all(self._added):  # else it is known: to read it would wait for the device
                self._added = added.tolist()
        self._totals[:] = sums
        self._is_usual = self._is_usual and self._are_usual(self._totals)

    def finish(self) -> list[Tree]:
        """The gradient of each leaf, zeros or None where it is not used."""
        found = self._totals if self._is_usual else self._finish_each()
        if self._unused == "zeros":
            return found
        return [x if added else None for x, added in zip(found, self._added, strict=True)]  # all leaves are whole

    def _finish_each(self) -> list[Tree]:
        self._begin()
        totals = zip(self._totals, self._homes, strict=True)
        sums = iter([self._home(_filled(total, home), home, flat, i) for total, (home, flat, i) in totals])
        found: list[Tree] = []
        for k, (leaf, value) in enumerate(zip(self._own.leaves, self._values, strict=True)):
            own = list(islice(sums, len(leaf.summed(value) or ())))
            found.append(leaf.gradient(value, own, self._parts.get(k, ()), self._home))
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
