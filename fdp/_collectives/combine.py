"""What a collective makes of the tensors of all slots: ordinary differentiable operations, and so one graph."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._collectives.operations import Operation
from fdp._execution.run import Run
from fdp._placement.moves import copy
from fdp._placement.packing import Layout, layout_of
from fdp._trees import torch_private

Grad = Tensor | None
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
Value = tuple[Operation, Sequence[Tensor], Sequence[bool] | None]
"""An operation, its tensors, and of gradients which are given: the others are zeros that stand for nothing."""


class Taken(NamedTuple):
    """What a slot takes; what is not `reached` is made of nothing that some slot has given."""

    tensors: list[Tensor]
    reached: list[bool]


def combined(
    run: Run, values: Sequence[Value], are_recorded: Sequence[bool], key: Any, say: Callable[[], str]
) -> list[Taken]:
    """What each slot takes, on its device, and in memory of its own: slots may write to it."""
    if torch.is_inference_mode_enabled():  # that of the slot that computes, and not of all
        with torch.inference_mode(False):
            return combined(run, values, are_recorded, key, say)
    operation, reached = values[0][0], [[True] * len(tensors) for _, tensors, _ in values]
    if values[0][2] is not None:
        everybody = run.peers.everywhere([given for *_, given in values], operation.name)
        columns, before = [operation.reached(each) for each in zip(*everybody, strict=True)], run.first
        reached = [[column[before + i] for column in columns] for i in range(len(values))]
    rows = [tensors for _, tensors, _ in values]
    has_graph = run.depth > 0 or run.level >= 0 or run.peers.has_others()
    if not has_graph and not any(True in map(_REQUIRES_GRAD, row) for row in rows):
        found = _dealt(run, operation, rows, key, say, packs=operation.elementwise)
    else:
        pairs = zip(rows, are_recorded, strict=True)
        rows = [tensors if is_recorded else [x.detach() for x in tensors] for tensors, is_recorded in pairs]
        with torch.set_grad_enabled(any(are_recorded)):
            found = _dealt(run, operation, rows, key, say)
            for i, is_recorded in enumerate(are_recorded):
                found[i] = list(Fence.apply(run, *found[i])) if is_recorded else [x.detach() for x in found[i]]
    for other, _, _ in values[1:]:
        vars(other).update(vars(operation))  # the sizes that it has seen
    return [Taken(*pair) for pair in zip(found, reached, strict=True)]


def _dealt(
    run: Run,
    operation: Operation,
    rows: list[Sequence[Tensor]],
    key: Any,
    say: Callable[[], str],
    *,
    packs: bool = False,
) -> list[list[Tensor]]:
    devices, names = [slot.device for slot in run.slots], _Leaves(operation.name)
    layout = layout_of([x.shape for x in rows[0]], [x.dtype for x in rows[0]], rows) if packs else None
    if layout is not None:
        rows = [_packed(layout, row, device, names) for row, device in zip(rows, devices, strict=True)]
    columns = list(zip(*rows, strict=True))
    moved = [_Moved(xs, devices[0], names, leaf) for leaf, xs in enumerate(columns)]
    results: list[list[Tensor]] = [[] for _ in rows]
    for leaf, made in enumerate(run.peers.combine(operation, moved, key, say)):
        seen = {id(x) for x in columns[leaf]}
        for result, x, device in zip(results, made, devices, strict=True):
            result.append(_sent(x, device, names, leaf, always=id(x) in seen))
            seen.add(id(x))
    return results if layout is None else [layout.unpacked(each) for each in results]


def _packed(layout: Layout, tensors: Sequence[Tensor], device: torch.device, names: "_Leaves") -> list[Tensor]:
    """What a slot has brought, in buffers on one device."""
    if len({x.device for x in tensors}) > 1:
        tensors = [copy(x, device, names, i) for i, x in enumerate(tensors)]
    return layout.packed(tensors)


class _Moved(Sequence[Tensor]):
    """The tensors of a leaf on the first device: each when it is asked for, so that few are there at a time."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, names: "_Leaves", leaf: int) -> None:
        self._tensors, self._device, self._names, self._leaf = tensors, device, names, leaf

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        return _sent(self._tensors[index], self._device, self._names, self._leaf)


def _sent(x: Tensor, device: torch.device, names: "_Leaves", leaf: int, *, always: bool = False) -> Tensor:
    """`copy`, of which the gradient is one too, and in the log of `transfers`."""
    if x.device == device or not (x.requires_grad or torch_private.is_transformed()):
        return copy(x, device, names, leaf, always=always)
    return _Sent.apply(x, device, names, leaf)


class _Sent(torch.autograd.Function):
    """A tensor on another device."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, device: torch.device, names: "_Leaves", leaf: int) -> Tensor:
        return copy(x, device, names, leaf)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.to, ctx.names, ctx.leaf = inputs
        ctx.device = x.device
        ctx.set_materialize_grads(False)  # zeros would be multiplied with what is further back

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None if grad is None else _sent(grad, ctx.device, ctx.names, ctx.leaf), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].to(ctx.to)


class _Leaves(NamedTuple):
    """What the log of `transfers` calls what is exchanged."""

    name: str

    def path(self, index: int, /) -> str:
        return f"{self.name}[{index}]"


class Identity(torch.autograd.Function):
    """The tensors as they are, with something that the gradient is to know."""

    generate_vmap_rule = True

    @staticmethod
    def forward(known: Any, *tensors: Tensor) -> Any:
        return tuple(x.detach() for x in tensors)  # a view could not be written to

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.known, *_ = inputs
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _all_there(tangents[1:], ctx.kinds)


def _all_there(tangents: Sequence[Grad], kinds: Sequence[Any]) -> Any:
    """Zeros for those that are missing: of floats torch takes no None."""
    pairs = zip(tangents, kinds, strict=True)
    made = [torch.zeros(s, dtype=t, device=d) if x is None else x.view_as(x) for x, (s, t, d) in pairs]
    return tuple(x if x.is_floating_point() or x.is_complex() else None for x in made)


class Undifferentiable(torch.autograd.Function):
    """The first `count` tensors, as functions of the others that have no gradient; `name` is that of the collective."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> Any:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, ctx.count, *_ = inputs
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        return None, None, *_refused(ctx.name, grads), *(None for _ in grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _all_there(_refused(ctx.name, tangents[2:])[: ctx.count], ctx.kinds)


def _refused(name: str, grads: Sequence[Grad]) -> Sequence[Grad]:
    """No gradients, of what has none to give."""
    if any(grad is not None for grad in grads):
        raise RuntimeError(f"{name} cannot be differentiated; detach its argument")
    return grads


class Fence(Identity):
    """No gradient goes through while the slots of a run are under way: the graph behind it is that of all of them."""

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        if not ctx.known.is_over:
            raise RuntimeError(
                "torch.autograd.grad or .backward() inside a mapped function goes through a collective, whose graph is "
                "that of all slots. Inside, use torch.func.grad or fdp.grad"
            )
        return None, *grads
