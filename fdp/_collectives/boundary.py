"""The graph of a call whose slots meet in collectives: each slot has its own, stitched to the caller's at both ends.

A gradient that comes from outside goes back through all slots at once, each in a thread of its own, because the
gradients of collectives meet as the collectives did. One graph over all slots would be wrong inside: what a slot
differentiates by itself would reach into the others.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fdp._collectives.anchors import add_ends, leaf_like, starts
from fdp._collectives.graph import (
    MET,
    ONLY_MEETS,
    Grad,
    Meeting,
    SlotGraph,
    edge_of,
    kinds_of,
    note_nodes,
    refuse_batched,
    waited_for,
)
from fdp._trees import torch_private
from fdp._trees.tree import map_tensors, needing_gradients
from fdp._trees.types import Tree


class Made(NamedTuple):
    """What a slot has made, the number of the last node of autograd in it, and nodes where the slots have met."""

    result: Tree
    last: int
    met: Sequence[Any] = ()


def made(call: Callable[[], Tree], token: object) -> Made:
    """What the call with this token makes in this thread, and where it has met slots of calls around it."""
    met: list[Any] = []
    before = MET.set(met)
    try:
        result = call()
    finally:
        MET.reset(before)
    elsewhere = [node for node in met if node.meeting is not None and node.meeting.token is not token]
    return Made(result, torch_private.get_sequence_nr(), elsewhere)


class Runs(NamedTuple):
    """How slots run again: `rounds` of those that meet, and not `alone` if they meet those of other processes."""

    all: Callable[[Sequence[Callable[[], Made]]], list[Made]]
    rounds: Sequence[Sequence[int]]
    token: object
    is_alone: Callable[[], bool]


class Ends(NamedTuple):
    """Where the graph of a slot begins: tensors of the caller that need gradients, and what the slot has for them."""

    outer: list[Tensor]
    inner: list[Tensor]


def isolated(tree: Tree) -> tuple[Tree, Ends]:
    """The tree with leaves of its own in place of tensors that lead on into the caller's graph."""
    ends = Ends([], [])
    if all(x.is_leaf for x in needing_gradients(tree)):
        return tree, ends
    own: dict[int, Tensor] = {}

    def isolate(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or tensor.is_leaf:  # a leaf is found where a slot's graph ends
            return tensor
        if id(tensor) not in own:
            own[id(tensor)] = tensor.detach().requires_grad_()
            ends.outer.append(tensor)
            ends.inner.append(own[id(tensor)])
        return own[id(tensor)]

    return map_tensors(isolate, tree), ends


def stitched(made: Sequence[Made], ends: Sequence[Ends], runs: Runs) -> list[Tree]:
    """The results of all slots, as functions of the caller's tensors."""
    results = [each.result for each in made]
    parts = [
        SlotGraph.of(needing_gradients(each.result), own.inner, each.met) for each, own in zip(made, ends, strict=True)
    ]
    meets_elsewhere = any(part.calls() - {runs.token} for part in parts)
    if meets_elsewhere:  # slots of calls around this one come to its backward, also where it has nothing to give
        parts[0] = parts[0].ending_in(leaf_like(torch.zeros(0)))
    outer: dict[int, Tensor] = {id(x): x for each in ends for x in each.outer}
    targets = []
    for part, own in zip(parts, ends, strict=True):
        captured = part.captured(own.inner)
        outer |= {id(x): x for x in captured}
        targets.append([id(x) for x in (*own.outer, *captured)])
    if not outer or not any(part.outs for part in parts):
        return results
    places = {key: i for i, key in enumerate(outer)}
    lasts = [each.last for each in made]
    graph = _Graph(parts, [[places[key] for key in keys] for keys in targets], lasts, runs, meets_elsewhere, len(outer))
    found = _Boundary.apply(graph, *outer.values(), *(starts() if meets_elsewhere else ()))
    if meets_elsewhere:
        count = sum(len(part.outs) for part in parts)
        note_nodes(found[:count])
        add_ends(found[count:])
    rest = iter(found)
    new = [{id(x): next(rest) for x in part.outs} for part in parts]
    return [map_tensors(lambda x, own=own: own.get(id(x), x), each) for own, each in zip(new, results, strict=True)]


class _Graph(NamedTuple):
    """The graphs of all slots, and for each which of the caller's tensors its inputs stand for."""

    parts: list[SlotGraph]
    targets: list[list[int]]
    lasts: list[int]
    runs: Runs
    meets_elsewhere: bool  # slots of other calls, around this one
    width: int  # how many tensors of the caller

    def waited_for(self, given: Sequence[Sequence[Grad]]) -> list[list[Any]]:
        """For each slot, the nodes where others wait for it though no gradient leads there."""
        parts = self.parts
        if self.meets_elsewhere or not self.runs.is_alone():  # others are not to be seen here: wherever they may wait
            return [part.beside(each, part.meetings) for part, each in zip(parts, given, strict=True)]
        found: dict[int, list[Any]] = {}
        for together in self.runs.rounds:
            nodes = waited_for([parts[i] for i in together], [given[i] for i in together])
            found |= zip(together, nodes, strict=True)
        return [found[i] for i in range(len(parts))]

    def ends(self, slot: int, outer: Sequence[Tensor], theirs: Sequence[Grad], ours: Sequence[Grad]) -> Ends:
        """Where the graph of a slot's gradients begins."""
        targets = [outer[place] for place in self.targets[slot]]
        return Ends([*targets, *_there(theirs)], [*self.parts[slot].inputs, *_there(ours)])


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *tensors: Tensor) -> Any:
        outer, more = tensors[: graph.width], tensors[graph.width :]
        ctx.graph, ctx.kept = graph, None
        ctx.save_for_backward(*outer)
        ctx.set_materialize_grads(False)  # what has no part in a loss gets no gradient: 0 times inf is NaN
        found = tuple(x.detach() for part in graph.parts for x in part.outs)
        ctx.meeting = Meeting(None, object(), kinds_of(found)) if graph.meets_elsewhere else None
        return *found, *(x.clone() for x in more)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        graph: _Graph | None = ctx.graph
        if graph is None:
            raise RuntimeError(
                "Trying to backward through the graph of a mapped function a second time, after it has been freed. "
                "Specify retain_graph=True if you need to"
            )
        refuse_batched(grads, "a mapped function with collectives")
        create = torch.is_grad_enabled()
        if not (create or torch_private.get_current_graph_task_keep_graph()):
            ctx.graph = None
        count = sum(len(part.outs) for part in graph.parts)
        rest = iter([None] * count if ctx in ONLY_MEETS.get() else grads)
        outer = [[next(rest) for _ in part.outs] for part in graph.parts]
        given = outer
        if create:
            given = [[None if grad is None else grad.detach().requires_grad_() for grad in each] for each in outer]
        only = graph.waited_for(given)
        places, saved, parents = range(len(graph.parts)), ctx.kept or ctx.saved_tensors, ctx.next_functions
        with _without_hooks(saved):
            found = graph.runs.all([_differentiate(graph, i, given[i], only[i], create) for i in places])
        results = [each.result for each in found]
        if create:
            results = stitched(found, [graph.ends(i, saved, outer[i], given[i]) for i in places], graph.runs)
        sums: list[Any] = [None] * len(saved)
        for each, targets in zip(results, graph.targets, strict=True):
            for grad, place in zip(each, targets, strict=True):
                if grad is not None:
                    sums[place] = grad if sums[place] is None else sums[place] + grad.to(sums[place].device)
        sums += grads[count:]  # of anchors
        if all(grad is None for grad, (node, _) in zip(sums, parents, strict=True) if _is_wanted(node)):
            ctx.graph, ctx.kept = graph, saved  # on one device, autograd would not have come here
        return None, *sums


def _is_wanted(node: Any) -> bool:
    """Whether the backward that runs goes on to a node."""
    try:
        return torch_private.will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad is asked for
        return True


def _there(grads: Sequence[Grad]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[Any]) -> Iterator[None]:
    """Hooks of a tensor see its gradient once, as the sum over slots, and not what comes from each."""
    held = {id(hooks): hooks for hooks in map(torch_private.backward_hooks, tensors) if hooks}
    kept = [(hooks, dict(hooks)) for hooks in held.values()]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


@contextlib.contextmanager
def _naming_checkpoints() -> Iterator[None]:
    """Say what to do about reentrant checkpoints: torch advises to call `backward`, which is what the user has done."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise RuntimeError(
            "activation checkpointing with use_reentrant=True is not supported in parallel_apply and in calls whose "
            "slots meet in collectives: there torch.autograd.grad takes the gradient of each slot, which such a "
            "checkpoint refuses. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        ) from error


def _differentiate(
    graph: _Graph, slot: int, grads: Sequence[Grad], only: Sequence[Any], create: bool
) -> Callable[[], Made]:
    part, before = graph.parts[slot], graph.lasts[slot]

    def run() -> Made:
        roots = [x for x, grad in zip(part.outs, grads, strict=True) if grad is not None]
        met = list(part.meetings.values())
        if not roots and not only:
            return Made([None] * len(part.inputs), before, met)
        ONLY_MEETS.set(frozenset(only))
        MET.set(met if create else None)
        first = torch_private.get_sequence_nr()
        zeros = [edge_of(node) for node in only]
        with torch.set_grad_enabled(create), _naming_checkpoints():
            # Kept, since tensors from outside may have a graph that the slots share; it goes when nobody holds it.
            found = torch.autograd.grad(
                cast(Any, [*roots, *(edge for edge, _ in zeros)]),
                part.inputs,
                [*_there(grads), *(zero for _, zero in zeros)],
                retain_graph=True,
                create_graph=create,
                allow_unused=True,
            )
        last = part.put_behind([*(x.grad_fn for x in _there(found)), *met], first, before) if create else before
        return Made(list(found), last, met)

    return run
