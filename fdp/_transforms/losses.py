"""The losses and gradients of single shards: by plain autograd, or by torch.func where a transform is active."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fdp._placement.plan import Plan
from fdp._transforms.around import Around
from fdp._transforms.call import State
from fdp._transforms.dropped_buffers import RETURNED, Returned, say_dropped
from fdp._transforms.sums import GradientPlan
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.registry import flattened
from fdp._trees.tracebacks import text_of
from fdp._trees.tree import flatten, map_tensors, tensors_in, unflatten
from fdp._trees.types import Tree


class Shard:
    """A shard, and the tensors that it is differentiated in.

    Attributes:
        column: Its leaves, as they were placed.
        tensors: What it is differentiated in.
        loss, aux: What the function returned for it.
        grads: The gradient of each of the tensors, None where it has none. None before the backward.
    """

    loss: Any = None
    aux: Tree = None
    grads: Any = None

    def __init__(self, index: int, column: Sequence[Any], own: GradientPlan) -> None:
        self.index, self.column, self._at, self._structure = index, column, own.at, None
        self.tensors: list[Any] = list(map(column.__getitem__, own.at))
        if not own.are_tensors:
            self.tensors, self._structure = flattened(self.tensors, "an argument")

    def leaves(self, tensors: Iterable[Any]) -> list[Any]:
        """The leaves with other tensors in their place."""
        column = list(self.column)
        parts = tensors if self._structure is None else self._structure.unflatten(tensors)
        for i, part in zip(self._at, parts, strict=True):
            column[i] = part
        return column


def aliases(tensors: Sequence[Tensor], attached: bool) -> list[Tensor]:
    """Other tensors with the same values; `attached` ones lead back to the caller's graph.

    One for each position: a tensor that stands in two is two arguments, as in torch.func.
    """
    if not attached:
        return list(map(Tensor.requires_grad_, map(Tensor.detach, tensors)))
    with torch.enable_grad():
        return [_alias(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor with the same values, and a graph. Sparse ones have no views."""
    return tensor.view_as(tensor) if tensor.layout in (torch.strided, torch.jagged) else tensor.clone()


def transformed(state: State, shards: Sequence[Shard], run: Callable[[Sequence[Callable[[], Any]]], list[Any]]) -> None:
    """Losses and gradients of shards by one `torch.func.vjp` around all of them; `run` has what each calls."""
    plain: list[Any] = []  # torch.func lets tensors through as aux, and nothing else
    peers, seeds = state.peers, [state.counts.share(shard.index) for shard in shards]

    def losses(start: Tensor, *leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        peers.begins_with(leaves)
        rest = iter(leaves)
        columns = [shard.leaves(list(islice(rest, len(shard.tensors)))) for shard in shards]
        outs = run([partial(loss_of, state, column) for column in columns])
        flat = flatten([aux for _, aux in outs], "aux", where=state.where)
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in flat.leaves]
        plain[:] = [flat.structure, others]
        counted = [loss for (loss, _), seed in zip(outs, seeds, strict=True) if seed != 0]  # the others are left out
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
        return [start, *peers.ends(), *counted], [*(loss for loss, _ in outs), *tensors]

    with recording(state.around):
        leaves = [leaf for shard in shards for leaf in shard.tensors]
        made: Any = torch.func.vjp(losses, torch.zeros(0, device="cpu"), *leaves, has_aux=True)
        roots, vjp, rest = made
        given = [seed for seed in seeds if seed != 0]
        ends = roots[: len(roots) - len(given)]
        _, *grads = vjp([*ends, *map(torch.full_like, roots[len(ends) :], given)])
    values, found, each = rest[: len(shards)], iter(rest[len(shards) :]), iter(grads)
    structure, others = plain
    auxes = unflatten(structure, [next(found) if other is None else other[0] for other in others])
    for shard, loss, aux in zip(shards, values, auxes, strict=True):
        shard.grads, shard.loss, shard.aux = list(islice(each, len(shard.tensors))), loss, aux
        if state.kind.create_graph is False:
            shard.grads, shard.loss, shard.aux = [x.detach() for x in shard.grads], loss.detach(), _detached(aux)


def recording(around: Around) -> contextlib.AbstractContextManager[object]:
    """As a context: torch.func differentiates, in inference mode too. In that of torch 2.11 it would find zeros."""
    if torch.__version__ >= "2.12" or not around.has_inference:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # what is outside is not to be tracked
    return stack


def backward(plan: Plan, state: State, shards: Sequence[Shard], ends: Sequence[Tensor]) -> None:
    """One backward through the losses of shards, in this thread; `ends` are more to begin with, without elements."""
    losses: list[Tensor] = []
    roots: list[Tensor] = []
    seeds: list[Tensor] = []
    inputs: list[Tensor] = []
    for shard in shards:
        inputs += shard.tensors
        losses.append(shard.loss)
        share = state.counts.share(shard.index)
        if share != 0 and shard.loss.requires_grad:
            roots.append(shard.loss)
            seeds.append(torch.full_like(shard.loss, share))
        if shard.aux is not None:
            losses += tensors_in(shard.aux)
    graph = plan.gradients.is_attached or state.kind.create_graph
    if graph is None:  # if results depend on a leaf that is no input they stay differentiable
        graph = state.around.has_grad and bool(captured(losses, inputs))
    for end in ends:
        roots.append(end)
        seeds.append(end.detach())
    grads: Any = [None] * len(inputs)
    if roots and inputs:
        has_threads = torch_private.is_multithreading_enabled()
        try:
            torch_private.set_multithreading_enabled(False)
            grads = torch_private.gradients(roots, inputs, seeds, create_graph=graph)
        except BaseException:
            _drop_what_is_left()
            raise
        finally:  # not torch's context: an interrupt might come before it ends
            torch_private.set_multithreading_enabled(has_threads)
    torch.clear_autocast_cache()  # else it keeps a cast copy of every alias until the caller leaves autocast
    found = iter(grads)
    for shard in shards:
        shard.grads = list(islice(found, len(shard.tensors)))
        if graph:
            state.aliases += shard.tensors
        else:  # without one the gradients are detached as they are
            shard.loss, shard.aux = shard.loss.detach(), shard.aux if shard.aux is None else _detached(shard.aux)


def _drop_what_is_left() -> None:
    """After a backward that failed torch keeps the nodes that are still to be visited, until the next one here."""
    if torch_private.current_graph_task_id() == -1:
        with torch.enable_grad():
            nothing = torch.zeros(0, device="cpu", requires_grad=True)
            torch.autograd.grad(nothing.neg(), nothing, nothing.detach())


def loss_of(state: State, leaves: Sequence[Any]) -> tuple[Tensor, Tree]:
    """The loss and the aux that the function returns for a shard."""
    where, has_aux = state.where, state.kind.has_aux
    returned: list[Returned] = []
    if not state.around.is_compiling:
        RETURNED.set(returned)  # until the slot ends
    try:
        out = state.run_shard(leaves)
    except RuntimeError as error:
        if not _A_WRITE.match(text_of(error)):
            raise
        raise RuntimeError(f"{where}: {_NO_WRITE}") from error
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"{where}: with has_aux=True the function must return (loss, aux), got {_kind(out)}")
    loss, aux = out if has_aux else (out, None)
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        hint = "" if has_aux or not isinstance(out, tuple) else ". To return more than the loss pass has_aux=True"
        raise TypeError(f"{where}: the loss must be a real floating-point tensor, got {_kind(loss)}{hint}")
    if loss.ndim != 0:
        raise ValueError(
            f"{where}: the loss must be a 0-dim tensor, got shape {tuple(loss.shape)}; reduce it with .mean()"
        )
    if returned:
        say_dropped(returned, aux, where)
    return loss, aux


_A_WRITE = re.compile("a (view of a )?leaf Variable that requires grad is being used in an in-place operation")
_NO_WRITE = (
    "the function writes in place to a tensor that requires gradients. It must be pure: work on x.clone(), or return "
    "the new value"
)


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _detached(aux: Tree) -> Tree:
    return map_tensors(Tensor.detach, aux)
