"""What the graph of a tensor leads back to: leaves, where slots meet, and gradients that cannot go there."""

import contextvars
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fdp._collectives.anchors import DIFFERENTIATED
from fdp._trees import torch_private

Grad = Tensor | None

ONLY_MEETS: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar("fdp_only_meets", default=frozenset())
"""Nodes that have a part in a backward only because other slots wait for them there: they bring no gradient."""

MET: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("fdp_met", default=None)
"""Takes the nodes that are made where slots meet: others may wait for this slot there in a gradient."""


class Meeting(NamedTuple):
    """Of a node of autograd that meets those of other slots: in which call, in which exchange, and with what."""

    token: object
    number: Any
    kinds: list[tuple[Any, torch.dtype, torch.device]]

    def filled(self, grads: Sequence[Grad]) -> list[Tensor]:
        """The gradients, with zeros in the place of those that there are not."""
        pairs = zip(grads, self.kinds, strict=True)
        return [torch.zeros(s, dtype=t, device=d) if grad is None else grad for grad, (s, t, d) in pairs]


def note_nodes(made: Sequence[Tensor]) -> None:
    """Keep the node that has just made these."""
    met = MET.get()
    if met is not None:
        met += {x.grad_fn for x in made if x.grad_fn is not None}  # integers have none


def kinds_of(tensors: Iterable[Tensor]) -> list[tuple[Any, torch.dtype, torch.device]]:
    """What zeros like these are made of."""
    return [(x.shape, x.dtype, x.device) for x in tensors]


def _meets(node: Any) -> bool:
    return isinstance(getattr(node, "meeting", None), Meeting)


def _is_of_leaf(node: Any) -> bool:
    return not node.next_functions and node.name() == "torch::autograd::AccumulateGrad"


def _nodes(ends: Iterable[Any], seen: set[Any]) -> list[Any]:
    """The nodes of autograd that some lead back to, and they themselves; they are `seen` then."""
    stack, found = list(ends), []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(node)
        stack.extend(parent for parent, _ in node.next_functions)
    return found


class SlotGraph(NamedTuple):
    """The graph of a slot: from outputs to inputs, with the nodes where it meets others, each by its exchange."""

    outs: list[Tensor]
    inputs: list[Tensor]
    meetings: dict[Any, Any]
    leads_to_all: bool  # a backward from all outputs comes to all meetings

    @staticmethod
    def of(outs: list[Tensor], inputs: Sequence[Tensor], met: Iterable[Any] = ()) -> "SlotGraph":
        """With what is used by another way than through the inputs as more inputs; it has `met` there too.

        That is leaves, and what a gradient function around the call differentiates in.
        """
        ids, stops = {id(x) for x in inputs}, {x.grad_fn: x for x in DIFFERENTIATED.get() if x.grad_fn is not None}
        seen = {x.grad_fn for x in inputs} | stops.keys()
        reached = _nodes((x.grad_fn for x in outs), seen)
        others = _nodes(met, seen)
        nodes = [*(x.grad_fn for x in outs), *(parent for x in (*reached, *others) for parent, _ in x.next_functions)]
        leaves = [x for x in outs if x.is_leaf] + [x.variable for x in (*reached, *others) if _is_of_leaf(x)]
        leaves += [stops[node] for node in nodes if node in stops]
        more = {id(x): x for x in leaves if x.requires_grad and id(x) not in ids}
        meetings = {x.meeting.number: x for x in (*reached, *others) if _meets(x)}
        return SlotGraph(outs, [*inputs, *more.values()], meetings, not any(map(_meets, others)))

    def ending_in(self, leaf: Tensor) -> "SlotGraph":
        """With one more output that depends on nothing."""
        return self._replace(outs=[*self.outs, leaf], inputs=[*self.inputs, leaf])

    def captured(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The leaves that are not among the inputs that it was made with."""
        return self.inputs[len(inputs) :]

    def calls(self) -> set[object]:
        """Which calls it meets others of."""
        return {node.meeting.token for node in self.meetings.values()}

    def ends(self, given: Sequence[Grad]) -> list[Any]:
        """Where a backward begins."""
        return [x.grad_fn for x, grad in zip(self.outs, given, strict=True) if grad is not None]

    def beside(self, given: Sequence[Grad], wanted: Iterable[Any]) -> list[Any]:
        """The nodes for what is wanted that no gradient leads to, nor another of these."""
        seen: set[Any] = set()
        _nodes(self.ends(given), seen)
        found: dict[Any, None] = {}
        for number in wanted:
            node = self.meetings[number]
            if node in seen:
                continue
            below = set(_nodes([node], seen.difference(found)))  # numbers of nodes do not tell: other threads made some
            seen.update(below)
            found = {other: None for other in found if other not in below} | {node: None}
        return list(found)

    def put_behind(self, ends: Iterable[Any], first: int, before: int) -> int:
        """Number the nodes that have just been made for gradients as if this thread had made the whole graph.

        A backward takes what has the highest number first, and each thread counts for itself: where the graph is of
        another thread, slots would come to their meetings in another order. Returns the number of the last.
        """
        last = torch_private.get_sequence_nr()
        if first >= before:
            return last
        theirs: set[Any] = set()
        _nodes([*(x.grad_fn for x in self.outs), *self.meetings.values()], theirs)
        for node in _nodes(ends, theirs):
            if first <= torch_private.sequence_nr(node) < last:
                torch_private.set_sequence_nr(node, torch_private.sequence_nr(node) + before - first)
        return last + before - first


def edge_of(node: Any) -> tuple[GradientEdge, Tensor]:
    """Where a backward may begin at a node, and a gradient of zero for it."""
    kinds = enumerate(node.meeting.kinds)
    i, (shape, dtype, device) = next((i, x) for i, x in kinds if x[1].is_floating_point or x[1].is_complex)
    return GradientEdge(node, i), torch.zeros(shape, dtype=dtype, device=device)


def waited_for(parts: Sequence[SlotGraph], given: Sequence[Sequence[Grad]]) -> list[list[Any]]:
    """For each slot, the nodes where others wait for it in a backward though no gradient of its own leads there.

    They meet where a backward of one device comes to, which has one graph of all.
    """
    has_all = all(grad is not None for each in given for grad in each)
    if has_all and all(part.leads_to_all and part.meetings.keys() == parts[0].meetings.keys() for part in parts):
        return [[] for _ in parts]
    seen: list[set[Any]] = [set() for _ in parts]
    ends = [part.ends(each) for part, each in zip(parts, given, strict=True)]
    wanted: set[Any] = set()
    while any(ends):
        fresh = set()
        for i, pair in enumerate(zip(ends, seen, strict=True)):
            meetings = {node.meeting.number: node for node in _nodes(*pair) if _meets(node)}
            for number, node in meetings.items():
                _check_all_have(parts, number, f"{node.operation.name}: a gradient goes through it in shard {i}")
            fresh |= meetings.keys() - wanted
        ends = [[part.meetings[number] for number in fresh] for part in parts]
        wanted |= fresh
    return [part.beside(each, wanted) for part, each in zip(parts, given, strict=True)]


def _check_all_have(parts: Sequence[SlotGraph], number: Any, what: str) -> None:
    for i, part in enumerate(parts):
        if number not in part.meetings:
            raise RuntimeError(
                f"{what}, but shard {i} has let go of the result, and of what it was made from. Return the result in "
                "all shards; it need not be used"
            )


def captured(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Leaves that outputs depend on by another way than through the inputs."""
    known = list(inputs)
    return SlotGraph.of(list(outputs), known).captured(known)


def refuse_batched(grads: Iterable[Any], what: str) -> None:
    """Raise for the batches of gradients that torch.autograd makes itself, which only its own operations know."""
    if any(isinstance(grad, Tensor) and torch_private.is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(
            f"{what}: batched gradients of torch.autograd (is_grads_batched, jacobian(..., vectorize=True)) cannot "
            "pass. Use torch.func: vmap of a vjp, jacrev"
        )
