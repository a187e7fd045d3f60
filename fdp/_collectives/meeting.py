"""Where a collective meets: the axis, and one meeting of its slots."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._collectives.anchors import are_from_outside
from fdp._collectives.operations import Operation
from fdp._collectives.packing import layout_of, packed, unpacked
from fdp._collectives.rendezvous import Rendezvous, Signature
from fdp._execution.restart import Together
from fdp._placement.moves import copy
from fdp._placement.peers import PeerCall
from fdp._placement.slot import AXES, IN_PLACE, Axis
from fdp._placement.transfers import report_collective
from fdp._trees import torch_private
from fdp._trees.describe import lines_of
from fdp._trees.profiling import stage


def axis_of(where: str, name: str) -> Axis:
    """The innermost axis of a name."""
    if torch.compiler.is_compiling():  # under fullgraph an error with this text, else the code goes on uncompiled
        torch_private.graph_break("collectives and axis_index cannot be compiled; compile what is between them")
    axes = AXES.get()
    for axis in reversed(axes):
        if axis.slot.axis_name == name:
            return axis
    known = ", ".join(repr(axis.slot.axis_name) for axis in axes) or "none: this code runs in no mapped function"
    raise NameError(f"{where}: there is no axis {name!r} here. There is {known}")


def inside(axis: Axis) -> tuple[int, ...]:
    """Where in the calls inside of an axis this code runs: it meets those who are at the same place."""
    axes = AXES.get()
    return tuple(other.slot.index for other in axes[axes.index(axis) + 1 :])


def depth() -> int:
    """How many transforms of torch.func are active here."""
    stack = torch_private.get_interpreter_stack()
    return 0 if stack is None else len(stack)


def rendezvous_of(axis: Axis, where: str) -> Rendezvous:
    if IN_PLACE.get():
        raise RuntimeError(
            f"{where}: in a module that is called in place, because something in it leads back to it (a hook that "
            "closes over the module, a compiled module, ...), slots would wait for each other. Remove what leads back"
        )
    if axis.rendezvous is None:
        axis.wanted.append(where)
        raise Together(where, axis.wanted)
    return axis.rendezvous


def meet(
    rendezvous: Rendezvous,
    index: int,
    key: Any,
    operation: Operation,
    tensors: Sequence[Tensor],
    same: Any,
    given: Sequence[bool] | None = None,
) -> "Met":
    """Exchange the tensors of all slots; those that are not `given` are zeros that only stand for nothing."""
    if index == 0:
        report_collective(operation.name, tensors)
    kinds = [operation.kind(x, i) for i, x in enumerate(tensors)]
    packs = not rendezvous.settings.joint and operation.elementwise and len(tensors) > 1
    layout = layout_of(tensors) if packs else None
    sent = tensors if layout is None else packed(tensors, layout)

    names = _Leaves(operation.name)
    each = [(x.dtype, x.shape) for x in tensors]

    def say() -> str:
        return "\n".join(
            [
                said_of(same, [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in each]),
                operation.options(),
            ]
        )

    is_forward = given is None
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def combine(values: list[Any]) -> list[Met]:
        with stage(operation.name):
            return exchanged(values)

    def exchanged(values: list[Any]) -> list[Met]:
        devices = [slot.device for slot in rendezvous.slots]
        operations, columns, needed, outside, marks = zip(*values, strict=True)
        results: list[list[Tensor]] = [[] for _ in values]
        moved = [_Moved(xs, devices[0], names, leaf) for leaf, xs in enumerate(zip(*columns, strict=True))]
        peers, name = rendezvous.settings.peers, operation.name
        own = any(needed), all(map(all, marks))
        table = peers.agree(name, (key, kinds, operation.options()), say, own, joint=rendezvous.settings.joint)
        is_from_outside = peers.has_others()  # of which it is not known
        if any(needed) and not all(needed) and not is_from_outside:
            is_from_outside = any(ask() for ask, is_needed in zip(outside, needed, strict=True) if is_needed)
        needed = any(row[0] for row in table)
        reached: Sequence[Sequence[bool]] = marks
        if not is_forward:
            everybody = _reached(operations[0], marks, peers, all(row[1] for row in table))
            if not any(map(any, everybody)):  # everywhere, or some would wait for the others
                return [Met([], needed, [False] * len(tensors), is_from_outside) for _ in marks]
            first = peers.slots_before()
            reached = everybody[first : first + len(marks)]
        found = peers.combine(operations[0], moved)
        for leaf, (xs, made) in enumerate(zip(zip(*columns, strict=True), found, strict=True)):
            seen = {id(x) for x in xs}
            for result, x, device in zip(results, made, devices, strict=True):
                result.append(copy(x, device, names, leaf, always=id(x) in seen))  # each slot may write to its own
                seen.add(id(x))
        for other in operations[1:]:
            vars(other).update(vars(operations[0]))  # the sizes that it has seen
        return [Met(result, needed, each, is_from_outside) for result, each in zip(results, reached, strict=True)]

    own = [x.detach() for x in sent] if not rendezvous.settings.joint and depth() == 0 else sent
    value = operation, own, needs, are_from_outside(tensors), [True] * len(tensors) if given is None else given
    what = Signature(operation.name, (same, kinds), say)
    met = rendezvous.meet(index, key, what if is_forward else what._replace(advice=_IN_A_GRADIENT), value, combine)
    return met if layout is None or not met.found else met._replace(found=unpacked(met.found, tensors, layout))


def _reached(
    operation: Operation, given: Sequence[Sequence[bool]], peers: PeerCall, all_given: bool
) -> list[list[bool]]:
    """For each slot of all processes, which of its results are made of what some slot has given."""
    given = [given[0]] * peers.slots(len(given)) if all_given else peers.everywhere(list(given), operation.name)
    columns = [operation.reached(column) for column in zip(*given, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


class Met(NamedTuple):
    """The results for a slot, whether some slot needs a gradient, and which results are made of what was given.

    Where some need one and others do not: whether it goes to leaves outside of the function that is differentiated.
    """

    found: list[Tensor]
    is_needed: bool
    reached: Sequence[bool]
    is_from_outside: bool


OF = "gradient of"
_IN_A_GRADIENT = (
    "This is in a gradient. All shards must take the same gradients in the same order. torch.autograd.grad and "
    "torch.func.grad inside the function need a result that depends on what is differentiated in all shards; fdp.grad "
    "does not"
)


def said_of(same: Any, tensors: Sequence[str]) -> str:
    """The tree of a collective, or of its gradient, in lines that can be compared: what is said of its tensors."""
    while same[0] == OF:
        same = same[1]
    structure, are_tensors, _ = same
    texts = iter(tensors)
    lines = lines_of(structure, [next(texts) if each else "a number" for each in are_tensors], "tree")
    return "\n".join([*lines, str(structure).removeprefix("PyTreeSpec")])


class _Moved(Sequence[Tensor]):
    """The tensors of a leaf on the first device: each when it is asked for, so that few are there at a time."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, names: "_Leaves", leaf: int) -> None:
        self._tensors, self._device, self._names, self._leaf = tensors, device, names, leaf

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        return copy(self._tensors[index], self._device, self._names, self._leaf)


class _Leaves(NamedTuple):
    """Signature the log of `transfers` calls what is exchanged."""

    name: str

    def path(self, index: int, /) -> str:
        return f"{self.name}[{index}]"
