"""How gradients go through collectives: as collectives, by a meeting of the same slots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._collectives.anchors import add_ends, leaf_like, starts
from fdp._collectives.graph import ONLY_MEETS, Grad, Meeting, kinds_of, note_nodes, refuse_batched
from fdp._collectives.meeting import OF, meet
from fdp._collectives.operations import Extreme, Operation
from fdp._collectives.rendezvous import Rendezvous
from fdp._placement.moves import is_inexact
from fdp._placement.slot import AXES


def attached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, as leaves where they have no part in a gradient yet."""
    return [leaf_like(x) if is_inexact(x) and not x.requires_grad else x for x in tensors]


class Handle:
    """Which collective of which call a gradient belongs to."""

    def __init__(self, token: object, key: Any, same: Any) -> None:
        self.token, self.key, self.same = token, key, same

    def rendezvous(self, name: str) -> tuple[Rendezvous, int]:
        """Where the slots of that call are now: still running, or running its backward."""
        for axis in reversed(AXES.get()):
            if axis.rendezvous is not None and axis.rendezvous.token is self.token:
                return axis.rendezvous, axis.rendezvous.place(axis.slot)
        raise RuntimeError(
            f"{name}: its gradient was asked for where the slots of its call do not run. Differentiate inside the "
            "mapped function, or what the call returned"
        )

    def of_transpose(self) -> "Handle":
        """That of the gradient, which is a collective too."""
        return Handle(self.token, (OF, self.key), (OF, self.same))


class Note:
    """What the levels of torch.func tell each other of a collective: its number, and what it is made of."""

    def __init__(self, given: Sequence[bool] | None = None) -> None:
        self.given = given
        self.reached: Sequence[bool] = ()
        self.number: Any = None


def _meeting(ctx: Any, number: Any, found: Sequence[Tensor]) -> Meeting | None:
    """Where the gradient will meet those of the others; what has none meets nobody."""
    if isinstance(ctx.operation, Extreme):
        return None
    return Meeting(ctx.handle.token, number, kinds_of(found))


def _some(found: Sequence[Tensor], reached: Sequence[bool]) -> list[Grad]:
    """The results, None where they are made of nothing: 0 has no part in a product with what is infinite."""
    if found and all(reached):
        return list(found)
    return [found[i] if is_reached else None for i, is_reached in enumerate(reached)]


class Linear(torch.autograd.Function):
    """A collective of slots that run: its gradient is its transpose, by another meeting of the same slots.

    The last of its tensors are those of so many anchors; they come out as they went in.
    """

    @staticmethod
    def forward(handle: Handle, operation: Operation, note: Note, anchors: int, *tensors: Tensor) -> Any:
        count = len(tensors) - anchors
        tensors, more = tensors[:count], tensors[count:]
        rendezvous, index = handle.rendezvous(operation.name)
        key = rendezvous.number(index, handle.key)
        met = meet(rendezvous, index, key, operation, tensors, handle.same, note.given)
        note.number, note.reached = (rendezvous.run, key), met.reached
        return *(met.found or (x.clone() for x in tensors)), *(x.clone() for x in more)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.handle, ctx.operation, note, anchors, *_ = inputs
        ctx.meeting = _meeting(ctx, note.number, output[: len(output) - anchors])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        if isinstance(ctx.operation, Extreme):
            return None, None, None, None, *_refused(ctx.operation.name, grads)
        grads, more = _cut(ctx, grads)
        note = Note([grad is not None for grad in grads])
        found = linked(ctx.handle.of_transpose(), ctx.operation.transpose(), note, ctx.meeting.filled(grads))
        note_nodes(found)
        return None, None, None, None, *_some(found, note.reached), *more

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.operation.name}: forward-mode differentiation inside a mapped function")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        handle, operation, note, anchors, *tensors = args
        count = len(tensors) - anchors
        moved = [
            x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip(tensors[:count], in_dims[4:], strict=False)
        ]
        found = Linear.apply(handle, operation, note, anchors, *moved, *tensors[count:])
        return found, (*(0,) * count, *in_dims[4 + count :])


def linked(handle: Handle, operation: Operation, note: Note, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`Linear`, with the anchors that there are."""
    more = _more(operation)
    found = Linear.apply(handle, operation, note, len(more), *tensors, *more)
    return _without(found, len(tensors))


def _more(operation: Operation) -> list[Tensor]:
    """What an operation takes for anchors. One that has no gradient needs none."""
    return [] if isinstance(operation, Extreme) else starts()


def _without(found: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """The results, without what was made of anchors, which is kept there."""
    if len(found) > count:
        add_ends(found[count:])
    return found[:count]


def _cut(ctx: Any, grads: tuple[Grad, ...]) -> tuple[tuple[Grad, ...], tuple[Grad, ...]]:
    """The gradients of what was exchanged, and those of anchors."""
    count = len(ctx.meeting.kinds)
    return (None,) * count if ctx in ONLY_MEETS.get() else grads[:count], grads[count:]


class Known(torch.autograd.Function):
    """`Linear`, for results that are known. Tensors beyond as many as there are results are those of anchors."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, operation: Operation, number: Any, found: Any, *tensors: Tensor) -> Any:
        ctx.handle, ctx.operation = handle, operation
        ctx.meeting = _meeting(ctx, number, found)
        ctx.set_materialize_grads(False)
        return *found, *(x.clone() for x in tensors[len(found) :])

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        refuse_batched(grads, ctx.operation.name)
        if isinstance(ctx.operation, Extreme):
            return None, None, None, None, *_refused(ctx.operation.name, grads)
        grads, more = _cut(ctx, grads)
        filled, given = ctx.meeting.filled(grads), [grad is not None for grad in grads]
        found = exchanged(ctx.handle.of_transpose(), ctx.operation.transpose(), filled, given)
        return None, None, None, None, *found, *more


def exchanged(
    handle: Handle, operation: Operation, tensors: Sequence[Tensor], given: Sequence[bool] | None = None
) -> Sequence[Any]:
    """A collective outside of torch.func: its results, functions of the tensors if some slot needs a gradient."""
    rendezvous, index = handle.rendezvous(operation.name)
    key = rendezvous.number(index, handle.key)
    met = meet(rendezvous, index, key, operation, tensors, handle.same, given)
    if not met.found or not met.is_needed:
        return _some(met.found, met.reached)
    # On all slots, if on one: a gradient meets the others as the collective did.
    more = _more(operation)
    # A leaf stands for those outside that others lead to, so that all keep a graph if one does.
    tensors = attached(tensors) if met.is_from_outside or not more else tensors
    is_recorded = torch.is_grad_enabled()
    with torch.set_grad_enabled(is_recorded or bool(more)):  # where the gradients of other slots will meet
        found = _without(
            Known.apply(handle, operation, (rendezvous.run, key), met.found, *tensors, *more), len(tensors)
        )
    note_nodes(found)
    return _some(found if is_recorded else [x.detach() for x in found], met.reached)


def _refused(name: str, grads: Sequence[Grad]) -> Sequence[Grad]:
    """No gradients, of what has none to give."""
    if any(grad is not None for grad in grads):
        raise RuntimeError(f"{name} cannot be differentiated; detach its argument")
    return grads


class Identity(torch.autograd.Function):
    """The tensors as they are, with something that the gradient is to know."""

    generate_vmap_rule = True

    @staticmethod
    def forward(known: Any, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.known, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(None if x is None else x.view_as(x) for x in tangents[1:])


class Gate(Identity):
    """What lets a gradient through only while it is open: `[True]`."""

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        return None, *(grads if ctx.known[0] else [None] * len(grads))


class Undifferentiable(Identity):
    """What has no gradient, by the name of the collective."""

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        return None, *_refused(ctx.known, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(_refused(ctx.known, tangents[1:]))


class Fence(Identity):
    """No gradient goes through while the slots of a call run: the graph behind it is that of all of them."""

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        if any(axis.rendezvous is not None and axis.rendezvous.token is ctx.known for axis in AXES.get()):
            raise RuntimeError(
                "a gradient was asked for inside a mapped function, through a collective, while the call is "
                "transformed by torch.func from outside, which is not supported. Transform on one side only: write the "
                "loss with fdp.dp_apply, and differentiate that twice from outside"
            )
        return None, *grads
