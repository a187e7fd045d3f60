"""Where a collective meets: the axis, and what its slots bring to one meeting and take from it.

What holds at any time:

- Every slot comes with tensors. Slot 0 alone computes, in its thread, when all are there (`_Exchange`); the others wait
  in `Rendezvous.meet` meanwhile.
- It computes without their graphs, and packs them where they are small. Under torch.func from outside they keep their
  graph and are not packed: the graph of all slots is one then.
- No memory of a result is that of another slot's, nor of what a slot has brought. So slots may write to what they get.
- Sums are made in slot order, one slot after the other, packed or not: the same bits in each run.
- What is left out of a gradient is decided for all slots and processes from the same marks, so that all come to the
  next meeting, or none.

`meet` is called in the thread of a slot, while it has its turn. No lock is held where tensors are moved or added up, so
that errors of torch's arise like any other: in slot 0, as they are, and in the others as what they waited for.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._collectives.anchors import are_from_outside
from fdp._collectives.operations import Kinds, Operation
from fdp._collectives.packing import Layout, layout_of
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
    if not axes:
        raise NameError(
            f"{where}: this code runs in no slot. Call it inside the function that dp_apply, shard_map, parallel_apply "
            "or a gradient function runs on each"
        )
    known = ", ".join(repr(axis.slot.axis_name) for axis in axes)
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
        raise Together(axis.wanted)
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
    brought = _Brought(
        operation,
        tensors,
        torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)),
        are_from_outside(tensors),
        [True] * len(tensors) if given is None else given,
    )
    kinds = operation.kinds(tensors)
    exchange = _Exchange(rendezvous, key, kinds, partial(_said, operation, tensors, same))
    what = Signature(operation.name, (same, kinds), exchange.say)
    if given is None:
        return rendezvous.meet(index, key, what, brought, exchange.forward)
    return rendezvous.meet(index, key, what._replace(advice=_IN_A_GRADIENT), brought, exchange.gradient)


def _said(operation: Operation, tensors: Sequence[Tensor], same: Any) -> str:
    each = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors]
    return f"{said_of(same, each)}\n{operation.options()}"


_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_IS_CPU = operator.attrgetter("is_cpu")  # quicker to ask for than the device


class _Brought(NamedTuple):
    """What a slot comes with, whether it needs a gradient, and what says whether from leaves outside."""

    operation: Operation
    tensors: Sequence[Tensor]
    needs: bool
    is_from_outside: Callable[[], bool]
    given: Sequence[bool]


class _Exchange(NamedTuple):
    """What slot 0 does for all, when all are there; other processes come under the same key, with the same kinds."""

    rendezvous: Rendezvous
    key: Any
    kinds: Kinds
    say: Callable[[], str]

    def forward(self, brought: Sequence[_Brought]) -> list["Met"]:
        """The results for each slot."""
        with stage(brought[0].operation.name):
            is_needed, _ = self._agreed(brought)
            is_from_outside = self._is_from_outside(brought)
            return [
                Met(found, is_needed, own.given, is_from_outside)
                for found, own in zip(self._dealt(brought), brought, strict=True)
            ]

    def gradient(self, brought: Sequence[_Brought]) -> list["Met"]:
        """`forward`, of which some results are made of nothing: none are found where all are, in all slots."""
        peers, count = self.rendezvous.settings.peers, len(brought)
        with stage(brought[0].operation.name):
            is_needed, all_given = self._agreed(brought)
            is_from_outside = self._is_from_outside(brought)
            everybody = _reached(brought[0].operation, [own.given for own in brought], peers, all_given)
            if not any(map(any, everybody)):  # everywhere, or some would wait for the others
                return [Met([], is_needed, [False] * len(own.given), is_from_outside) for own in brought]
            reached = everybody[peers.slots_before() :][:count]
            return [
                Met(found, is_needed, each, is_from_outside)
                for found, each in zip(self._dealt(brought), reached, strict=True)
            ]

    def _agreed(self, brought: Sequence[_Brought]) -> tuple[bool, bool]:
        """Whether some slot needs a gradient, and whether all tensors are given: in all processes."""
        own = any(each.needs for each in brought), all(all(each.given) for each in brought)
        settings, operation = self.rendezvous.settings, brought[0].operation
        same = self.key, self.kinds, operation.options()
        table = settings.peers.agree(operation.name, same, self.say, own, joint=settings.joint)
        return any(row[0] for row in table), all(row[1] for row in table)

    def _is_from_outside(self, brought: Sequence[_Brought]) -> bool:
        """Whether a gradient that some need, and others do not, goes to leaves outside."""
        if self.rendezvous.settings.peers.has_others():  # of which it is not known
            return True
        needs = [each for each in brought if each.needs]
        return 0 < len(needs) < len(brought) and any(each.is_from_outside() for each in needs)

    def _dealt(self, brought: Sequence[_Brought]) -> list[list[Tensor]]:
        """The results, each on the device of its slot, and each in memory of its own: slots may write to theirs."""
        operation, rows = brought[0].operation, [each.tensors for each in brought]
        devices, names = [slot.device for slot in self.rendezvous.slots], _Leaves(operation.name)
        is_graph_kept = self.rendezvous.settings.joint or depth() > 0
        packs = operation.elementwise and not is_graph_kept
        layout = layout_of(self.kinds.shapes, self.kinds.dtypes, rows) if packs else None
        if layout is not None:
            rows = [_packed(layout, row, device, names) for row, device in zip(rows, devices, strict=True)]
        if not is_graph_kept:
            rows = [[x.detach() for x in row] for row in rows]
        columns = list(zip(*rows, strict=True))
        moved = [_Moved(xs, devices[0], names, leaf) for leaf, xs in enumerate(columns)]
        results: list[list[Tensor]] = [[] for _ in brought]
        for leaf, made in enumerate(self.rendezvous.settings.peers.combine(operation, moved)):
            seen = {id(x) for x in columns[leaf]}
            for result, x, device in zip(results, made, devices, strict=True):
                result.append(copy(x, device, names, leaf, always=id(x) in seen))
                seen.add(id(x))
        for other in brought[1:]:
            vars(other.operation).update(vars(operation))  # the sizes that it has seen
        return results if layout is None else [layout.unpacked(each) for each in results]


def _packed(layout: Layout, tensors: Sequence[Tensor], device: torch.device, names: "_Leaves") -> list[Tensor]:
    """What a slot has brought, in buffers on one device."""
    if not all(map(_IS_CPU, tensors)) and len({x.device for x in tensors}) > 1:
        tensors = [copy(x, device, names, i) for i, x in enumerate(tensors)]
    with torch.no_grad():
        return layout.packed(tensors)


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
    """What the log of `transfers` calls what is exchanged."""

    name: str

    def path(self, index: int, /) -> str:
        return f"{self.name}[{index}]"
