"""Collectives inside transforms of torch.func: each level that is inside of the call is peeled by itself.

At the level of the call a collective is ordinary operations, and what is around the call needs nothing special. Further
in, `vmap` adds a dimension to what is exchanged. `grad` needs a node whose backward is the transposed collective, where
the slots meet again. A backward takes the node with the highest number first. These have low ones, the same in all
slots: so each slot first does what needs nobody, and then all come to their meetings in one order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._collectives.axes import check_can_meet, inside
from fdp._collectives.combine import Taken
from fdp._collectives.meeting import exchange
from fdp._collectives.operations import Operation
from fdp._execution.thread_pool import advance
from fdp._placement.slot import Axis
from fdp._trees import torch_private

Grad = Tensor | None
_PLACES = 64


class Place(NamedTuple):
    """A collective of one slot: `given` are the gradients that there are, if it is one of gradients.

    `numbers` say which one it is: a gradient of one collective must not meet that of another.
    """

    axis: Axis
    operation: Operation
    same: Any
    given: Sequence[bool] | None = None
    numbers: tuple[int, ...] = ()

    def exchanged(self, tensors: Sequence[Tensor]) -> Taken:
        """What becomes of the tensors, at the level of torch.func that is active here."""
        if torch_private.depth() <= self.axis.run.depth:
            return exchange(self.axis, self.operation, tensors, self.same, self.given, self.numbers)
        level = torch_private.current_interpreter()
        kind = level.key().name
        if kind == "Vmap":
            return self._mapped(level, tensors)
        if kind == "Grad":
            return self._differentiated(level, tensors)
        check_can_meet(self.axis, self.operation.name)  # forward mode, functionalization
        raise RuntimeError(f"{self.operation.name}: inside torch.func's {kind}, which is not supported")

    def _mapped(self, level: Any, tensors: Sequence[Tensor]) -> Taken:
        number, size = level.level(), level.batch_size()
        pairs = [torch_private.unwrap_batched(x, number) for x in tensors]
        # Of all slots alike: what is not mapped in one may be in others.
        moved = [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]
        found = torch_private.outside_transforms(lambda: self.exchanged(moved), 1)
        return found._replace(tensors=[torch_private.add_batch_dim(x, 0, number) for x in found.tensors])

    def _differentiated(self, level: Any, tensors: Sequence[Tensor]) -> Taken:
        reached: list[bool] = []
        key, met = (self.axis.slot.index, inside(self.axis)), self.axis.run.met
        count = met[key] = met.get(key, 0) + 1
        with torch_private.enable_single_level_function():
            found: Any = _Linear.apply(self._replace(numbers=(*self.numbers, count)), level, reached, *tensors)
        node = next((x.grad_fn for x in found if x.grad_fn is not None), None)
        if node is not None:
            torch_private.set_sequence_nr(node, self._number(count))
        return Taken(list(found), reached)

    def _number(self, count: int) -> int:
        """Below those of all that is made of it."""
        at = 0
        for index in inside(self.axis):
            at = at * 8 + index + 1
        number = count * _PLACES + at % _PLACES
        advance(number + 1)
        return number

    def transposed(self, given: Sequence[bool]) -> "Place":
        """Where the gradients meet."""
        return self._replace(operation=_named(self.operation), given=given)


def _named(operation: Operation) -> Operation:
    transposed = operation.transpose()
    transposed.name = type(transposed).name or operation.name
    return transposed


class _Linear(torch_private.SingleLevelFunction):
    """A collective at one level of `torch.func.grad`."""

    apply: Any

    @staticmethod
    def forward(place: Place, level: Any, reached: list[bool], *tensors: Tensor) -> Any:
        number = level.level()
        inner = [torch_private.unwrap_for_grad(x, number) for x in tensors]
        with torch.set_grad_enabled(level.prev_grad_mode()), torch_private.forward_mode_enabled(True):
            found = torch_private.outside_transforms(lambda: place.exchanged(inner), 1)
        reached[:] = found.reached
        return tuple(torch_private.wrap_for_grad(x, number) for x in found.tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.place, *_ = inputs
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        pairs = zip(grads, ctx.kinds, strict=True)
        filled = [torch.zeros(s, dtype=t, device=d) if x is None else x for x, (s, t, d) in pairs]
        tensors, reached = ctx.place.transposed([x is not None for x in grads]).exchanged(filled)
        return None, None, None, *(x if is_there else None for x, is_there in zip(tensors, reached, strict=True))
