"""The graph of a call whose slots meet in collectives: each slot has its own, stitched to the caller's at both ends.

A gradient that comes from outside goes back through all slots at once, each in a thread of its own, because the
gradients of collectives meet as the collectives did. One graph over all slots would be wrong inside: what a slot
differentiates by itself would reach into the others.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._reach import captured, refuse_batched
from fdp._tree import map_tensors
from fdp._typing import Tree

Tasks = Sequence[Callable[[], Any]]
RunAll = Callable[[Tasks], list[Any]]
"""Runs a task for each slot, and raises what one of them raises."""


_C: Any = torch._C  # a part of it has no types


class Ends(NamedTuple):
    """Where the graph of a slot begins: tensors of the caller that need gradients, and what the slot has for them."""

    outer: list[Tensor]
    inner: list[Tensor]


def isolated(tree: Tree) -> tuple[Tree, Ends]:
    """The tree with leaves of its own in place of tensors that lead on into the caller's graph."""
    ends = Ends([], [])
    made: dict[int, Tensor] = {}

    def isolate(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or tensor.is_leaf:  # a leaf is found where a slot's graph ends
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_()
            ends.outer.append(tensor)
            ends.inner.append(made[id(tensor)])
        return made[id(tensor)]

    new = map_tensors(isolate, tree)
    return (new, ends) if ends.outer else (tree, ends)  # containers stay the same objects if they can


def stitched(results: Sequence[Tree], ends: Sequence[Ends], run_all: RunAll) -> list[Tree]:
    """The results of all slots, as functions of the caller's tensors."""
    outs = [_differentiable(result) for result in results]
    outer: dict[int, Tensor] = {id(x): x for each in ends for x in each.outer}
    inputs, targets = [], []
    for out, each in zip(outs, ends, strict=True):
        captured = _captured(out, each.inner)
        outer |= {id(x): x for x in captured}
        inputs.append([*each.inner, *captured])
        targets.append([id(x) for x in (*each.outer, *captured)])
    if not outer or not any(outs):
        return list(results)
    places = {key: i for i, key in enumerate(outer)}
    graph = _Graph(outs, inputs, [[places[key] for key in keys] for keys in targets], len(outer), run_all)
    found = iter(_Stitch.apply(graph, *outer.values()))
    new = [{id(x): next(found) for x in out} for out in outs]
    return [map_tensors(lambda x, own=own: own.get(id(x), x), result) for own, result in zip(new, results, strict=True)]


def _differentiable(tree: Tree) -> list[Tensor]:
    found: dict[int, Tensor] = {}

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    map_tensors(look, tree)
    return list(found.values())


class _Graph:
    """The graphs of all slots, and which of the caller's tensors each input stands for."""

    def __init__(
        self,
        outs: list[list[Tensor]],
        inputs: list[list[Tensor]],
        targets: list[list[int]],
        count: int,
        run_all: RunAll,
    ) -> None:
        self.outs, self.inputs, self.targets, self.count, self.run_all = outs, inputs, targets, count, run_all


class _Stitch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *outer: Tensor) -> Any:
        ctx.graph = graph
        ctx.save_for_backward(*outer)
        return tuple(x.detach() for out in graph.outs for x in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        graph: _Graph | None = ctx.graph
        if graph is None:
            raise RuntimeError(
                "Trying to backward through the graph of a mapped function a second time, after it has been freed. "
                "Specify retain_graph=True if you need to"
            )
        refuse_batched(grads, "a mapped function with collectives")
        create = torch.is_grad_enabled()
        if not (create or _C._autograd._get_current_graph_task_keep_graph()):
            ctx.graph = None
        rest = iter(grads)
        given = [[next(rest) for _ in out] for out in graph.outs]
        if create:
            given = [[grad.detach().requires_grad_() for grad in each] for each in given]
        with _without_hooks(ctx.saved_tensors):
            found = graph.run_all([_differentiate(graph, i, each, create) for i, each in enumerate(given)])
        if create:
            places = iter(range(graph.count, graph.count + len(grads)))
            inputs = [[*own, *each] for own, each in zip(graph.inputs, given, strict=True)]
            targets = [[*own, *(next(places) for _ in each)] for own, each in zip(graph.targets, given, strict=True)]
            twice = _Graph(found, inputs, targets, graph.count + len(grads), graph.run_all)
            rest = iter(_Stitch.apply(twice, *ctx.saved_tensors, *grads))
            found = [[next(rest) for _ in each] for each in found]
        sums: list[Any] = [None] * graph.count
        for each, targets in zip(found, graph.targets, strict=True):
            for grad, place in zip(each, targets, strict=True):
                sums[place] = grad if sums[place] is None else sums[place] + grad.to(sums[place].device)
        return None, *sums


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[Any]) -> Iterator[None]:
    """Hooks of a tensor see its gradient once, as the sum over slots, and not what comes from each."""
    held = {id(x._backward_hooks): x._backward_hooks for x in tensors if x._backward_hooks}
    kept = [(hooks, dict(hooks)) for hooks in held.values()]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _differentiate(graph: _Graph, slot: int, grads: list[Tensor], create: bool) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        outs, inputs = graph.outs[slot], graph.inputs[slot]
        if not outs:
            return [torch.zeros_like(x) for x in inputs]
        with torch.set_grad_enabled(create):
            if create:
                _count_on(outs)
            # Kept, since tensors from outside may have a graph that the slots share; it goes when nobody holds it.
            found = torch.autograd.grad(outs, inputs, grads, retain_graph=True, create_graph=create, allow_unused=True)
            return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, inputs, strict=True)]

    return run


def _count_on(outs: Sequence[Tensor]) -> None:
    """Number what this thread records from here on after all that has been recorded, in whichever thread.

    Autograd goes back by numbers that each thread counts for itself. Where the parts of a graph are those of several
    threads, the slots would come to their collectives in different orders.
    """
    behind = max((x.grad_fn._sequence_nr() for x in outs if x.grad_fn is not None), default=-1) + 1
    empty = torch.zeros(0, device="cpu", requires_grad=True)
    while (missing := behind - _C._autograd._get_sequence_nr()) > 0:
        empty.tensor_split(min(missing, 1000))  # a node for each part


def _captured(outs: Sequence[Tensor], inner: Sequence[Tensor]) -> list[Tensor]:
    """Leaves of the caller's that a slot depends on without having been given them."""
    return list({id(x): x for x in captured(outs, inner)}.values())
