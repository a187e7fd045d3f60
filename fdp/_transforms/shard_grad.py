"""The losses and gradients of single shards: by plain autograd, or by torch.func where a transform is active."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._transforms.around import Around
from fdp._transforms.call import State
from fdp._transforms.dropped_buffers import RETURNED, Returned, say_dropped
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.registry import flattened
from fdp._trees.tracebacks import text_of
from fdp._trees.tree import flatten, tensors_in, unflatten
from fdp._trees.types import Tree


class Inputs(NamedTuple):
    """The tensors that a shard is differentiated in: `at` are the leaves of the shard that hold them."""

    column: Sequence[Any]
    at: Sequence[int]
    tensors: list[Tensor]
    structure: Any  # of these leaves; None if each is a tensor

    def build(self, tensors: Iterable[Any]) -> list[Any]:
        """The leaves of the shard, with other tensors."""
        column = list(self.column)
        parts = tensors if self.structure is None else self.structure.unflatten(tensors)
        for i, part in zip(self.at, parts, strict=True):
            column[i] = part
        return column

    def aliases(self, attached: bool) -> "Inputs":
        """The same as other tensors; `attached` ones lead back to the caller's graph.

        One for each position: a tensor that stands in two is two arguments, as in torch.func.
        """
        if not attached:
            return self._replace(tensors=[t.detach().requires_grad_() for t in self.tensors])
        with torch.enable_grad():
            return self._replace(
                tensors=[_alias(t) if t.requires_grad else t.detach().requires_grad_() for t in self.tensors]
            )


def inputs_of(column: Sequence[Any], at: Sequence[int], are_tensors: bool) -> Inputs:
    """What a shard is differentiated in."""
    parts = [column[i] for i in at]
    if are_tensors:
        return Inputs(column, at, parts, None)
    return Inputs(column, at, *flattened(parts, "an argument"))


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor with the same values, and a graph. Sparse ones have no views."""
    return tensor.view_as(tensor) if tensor.layout in (torch.strided, torch.jagged) else tensor.clone()


class Out(NamedTuple):
    """What a function returned for a shard."""

    loss: Tensor
    aux: Tree


class ShardResult(NamedTuple):
    """The same with the gradients of its inputs, None where it has none."""

    out: Out
    grads: list[Tensor | None]
    aliases: Sequence[Tensor] = ()
    """What the graph of the others leads to: they stand for the leaves."""


class Forward(NamedTuple):
    """What a function returned for a shard, with what it is differentiated in."""

    out: Out
    inputs: Inputs


def transformed(
    state: State,
    inputs: Sequence[Inputs],
    seeds: Sequence[float],
    create_graph: bool | None,
    run: Callable[[Sequence[Callable[[], Any]]], list[Any]],
) -> list[ShardResult]:
    """Losses and gradients of shards by one `torch.func.vjp` around all of them; `run` has what each calls."""
    plain: list[Any] = []  # torch.func lets tensors through as aux, and nothing else
    peers = state.peers

    def losses(start: Tensor, *leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        peers.begins_with(leaves)
        rest = iter(leaves)
        columns = [own.build(list(islice(rest, len(own.tensors)))) for own in inputs]
        outs: list[Out] = run([partial(loss_of, state, column) for column in columns])
        flat = flatten([out.aux for out in outs], "aux", where=state.where)
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in flat.leaves]
        plain[:] = [flat.structure, others]
        counted = [out.loss for out, seed in zip(outs, seeds, strict=True) if seed != 0]  # the others are left out
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
        return [start, *peers.ends(), *counted], [*(out.loss for out in outs), *tensors]

    with recording(state.around):
        leaves = [leaf for own in inputs for leaf in own.tensors]
        made: Any = torch.func.vjp(losses, torch.zeros(0, device="cpu"), *leaves, has_aux=True)
        roots, vjp, rest = made
        given = [seed for seed in seeds if seed != 0]
        ends = roots[: len(roots) - len(given)]
        _, *grads = vjp([*ends, *map(torch.full_like, roots[len(ends) :], given)])
    values, found, each = rest[: len(inputs)], iter(rest[len(inputs) :]), iter(grads)
    structure, others = plain
    auxes = unflatten(structure, [next(found) if other is None else other[0] for other in others])
    results = []
    for own, loss, aux in zip(inputs, values, auxes, strict=True):
        gradients: list[Any] = list(islice(each, len(own.tensors)))
        if create_graph is False:
            gradients, loss, aux = [x.detach() for x in gradients], loss.detach(), _detached(aux, state.where)
        results.append(ShardResult(Out(loss, aux), gradients))
    return results


def recording(around: Around) -> contextlib.AbstractContextManager[object]:
    """As a context: torch.func differentiates, in inference mode too. In that of torch 2.11 it would find zeros."""
    if _DIFFERENTIATES_IN_INFERENCE_MODE or not around.has_inference:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # what is outside is not to be tracked
    return stack


_DIFFERENTIATES_IN_INFERENCE_MODE = torch.__version__ >= "2.12"


def joint(
    state: State,
    forwards: Sequence[Forward],
    seeds: Sequence[float],
    create_graph: bool | None,
    ends: Sequence[Tensor],
) -> list[ShardResult]:
    """One backward through the losses of shards, in this thread; `ends` are more to begin with, without elements."""
    graph = bool(create_graph)
    if create_graph is None:
        graph = torch.is_grad_enabled() and _reaches_outside(forwards)
    roots: list[Tensor] = []
    given: list[Tensor] = []
    inputs: list[Tensor] = []
    for (out, own), seed in zip(forwards, seeds, strict=True):
        inputs += own.tensors
        if seed != 0 and out.loss.requires_grad:
            roots.append(out.loss)
            given.append(torch.full_like(out.loss, seed))
    for end in ends:
        roots.append(end)
        given.append(end.detach())
    grads: Any = [None] * len(inputs)
    if roots and inputs:
        has_threads = torch_private.is_multithreading_enabled()
        try:
            torch_private.set_multithreading_enabled(False)
            grads = torch_private.gradients(roots, inputs, given, create_graph=graph)
        except BaseException:
            _drop_what_is_left()
            raise
        finally:  # not torch's context: an interrupt might come before it ends
            torch_private.set_multithreading_enabled(has_threads)
    torch.clear_autocast_cache()  # else it keeps a cast copy of every alias until the caller leaves autocast
    found, results = iter(grads), []
    for out, own in forwards:
        if not graph:  # without one the gradients are detached as they are
            out = Out(out.loss.detach(), _detached(out.aux, state.where))
        results.append(ShardResult(out, list(islice(found, len(own.tensors))), own.tensors if graph else ()))
    return results


def _drop_what_is_left() -> None:
    """After a backward that failed torch keeps the nodes that are still to be visited, until the next one here."""
    if torch_private.current_graph_task_id() == -1:
        with torch.enable_grad():
            nothing = torch.zeros(0, device="cpu", requires_grad=True)
            torch.autograd.grad(nothing.neg(), nothing, nothing.detach())


def forward(state: State, inputs: Inputs) -> Forward:
    """The loss of a shard."""
    before = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(True)
        return Forward(loss_of(state, inputs.build(inputs.tensors)), inputs)
    finally:
        torch_private.set_grad_enabled(before)


def loss_of(state: State, leaves: Sequence[Any]) -> Out:
    """What the function returns for a shard."""
    if state.around.is_compiling:
        return _checked(state, state.run_shard(leaves))
    returned: list[Returned] = []
    token = RETURNED.set(returned)
    try:
        out = _checked(state, state.run_shard(leaves))
    except RuntimeError as error:
        if not _A_WRITE.match(text_of(error)):
            raise
        raise RuntimeError(f"{state.where}: {_NO_WRITE}") from error
    finally:
        RETURNED.reset(token)
    if returned:
        say_dropped(returned, out.aux, state.where)
    return out


_A_WRITE = re.compile("a (view of a )?leaf Variable that requires grad is being used in an in-place operation")
_NO_WRITE = (
    "the function writes in place to a tensor that requires gradients. It must be pure: work on x.clone(), or return "
    "the new value"
)


def _checked(state: State, out: Any) -> Out:
    where, has_aux = state.where, state.kind.has_aux
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
    return Out(loss, aux)


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _reaches_outside(forwards: Sequence[Forward]) -> bool:
    """Whether a loss or aux depends on a leaf that is no input of any: then results stay differentiable."""
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for out, own in forwards:
        inputs += own.tensors
        outputs.append(out.loss)
        if out.aux is not None:
            outputs += tensors_in(out.aux)
    return bool(captured(outputs, inputs))


def _detached(aux: Tree, where: str) -> Tree:
    if aux is None:
        return None
    flat = flatten(aux, "aux", where=where)
    return unflatten(flat.structure, [t.detach() if isinstance(t, Tensor) else t for t in flat.leaves])
