"""The loss and gradients of single shards: by plain autograd, or by torch.func where a transform is active."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from fdp._placement.peers import PeerCall
from fdp._placement.slot import text_of
from fdp._transforms.call import Shard, call_shard
from fdp._transforms.dropped_buffers import noting, say_dropped
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.registry import flattened
from fdp._trees.tree import flatten, tensors_in, unflatten
from fdp._trees.types import Function, Tree


class Problem(NamedTuple):
    """What is differentiated: a function, in which positional arguments, and whether it returns `(loss, aux)`."""

    where: str
    fn: Function
    argnums: tuple[int, ...]
    has_aux: bool


class Inputs(NamedTuple):
    """The leaves of the differentiated arguments of a shard, and how many each has."""

    leaves: list[torch.Tensor]
    structures: list[Any]

    def build(self, leaves: Iterable[Any]) -> list[Tree]:
        """The arguments, with other leaves."""
        return [unflatten(structure, part) for structure, part in zip(self.structures, self.cut(leaves), strict=True)]

    def cut(self, leaves: Iterable[Any]) -> list[list[Any]]:
        """A list for all arguments, as one for each."""
        if len(self.structures) == 1:
            return [list(leaves)]
        rest = iter(leaves)
        return [list(islice(rest, structure.num_leaves)) for structure in self.structures]

    def aliases(self, attached: bool) -> "Inputs":
        """The same as other tensors; `attached` ones lead back to the caller's graph.

        One for each position: a tensor that stands in two is two arguments, as in torch.func.
        """
        with torch.enable_grad():
            return self._replace(
                leaves=[_alias(t) if attached and t.requires_grad else t.detach().requires_grad_() for t in self.leaves]
            )


class Out(NamedTuple):
    """What a function returned for a shard."""

    loss: torch.Tensor
    aux: Tree


class ShardResult(NamedTuple):
    """The same with the gradients of the leaves of each differentiated argument, None where it has none."""

    out: Out
    grads: list[list[torch.Tensor | None]]
    aliases: Sequence[torch.Tensor] = ()
    """What the graph of the others leads to: they stand for the leaves."""


class Forward(NamedTuple):
    """What a function returned for a shard, with what it is differentiated in."""

    out: Out
    inputs: Inputs


def needs_transform(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether gradients must be taken by torch.func: under its transforms, in inference mode, while compiling.

    Inside `forward_ad.dual_level` too: `detach`, which plain autograd needs here, would drop the tangents.
    """
    if torch.compiler.is_compiling():
        return True
    active = torch_private.is_transformed() or torch.is_inference_mode_enabled()
    return active or torch_private.is_forward_mode() or True in map(torch.Tensor.is_inference, tensors)


def transformed(
    problem: Problem,
    shards: Sequence[Shard],
    shares: Sequence[Callable[[], float]],
    create_graph: bool | None,
    run: Callable[[Sequence[Callable[[], Any]]], list[Any]],
    peers: PeerCall,
) -> list[ShardResult]:
    """Losses and gradients of shards by one `torch.func.vjp` around all of them; `run` has what each calls."""
    inputs, seeds = [inputs_of(problem, shard) for shard in shards], [share() for share in shares]
    plain: list[Any] = []  # torch.func lets tensors through as aux, and nothing else

    def losses(start: torch.Tensor, *leaves: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        peers.begins_with(leaves)
        rest = iter(leaves)
        trees = [own.build(islice(rest, len(own.leaves))) for own in inputs]
        outs: list[Out] = run([functools.partial(_call, problem, *pair) for pair in zip(shards, trees, strict=True)])
        flat = flatten([out.aux for out in outs], "aux", where=problem.where)
        others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in flat.leaves]
        plain[:] = [flat.structure, others]
        counted = [out.loss for out, seed in zip(outs, seeds, strict=True) if seed != 0]  # the others are left out
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)]
        return [start, *peers.ends(), *counted], [*(out.loss for out in outs), *tensors]

    with recording():
        leaves = [leaf for own in inputs for leaf in own.leaves]
        made: Any = torch.func.vjp(losses, torch.zeros(0, device="cpu"), *leaves, has_aux=True)
        roots, vjp, rest = made
        given = [seed for seed in seeds if seed != 0]
        ends = roots[: len(roots) - len(given)]
        _, *grads = vjp([*ends, *map(torch.full_like, roots[len(ends) :], given)])
    values, found, each = rest[: len(shards)], iter(rest[len(shards) :]), iter(grads)
    structure, others = plain
    auxes = unflatten(structure, [next(found) if other is None else other[0] for other in others])
    results = []
    for own, loss, aux in zip(inputs, values, auxes, strict=True):
        gradients: list[Any] = list(islice(each, len(own.leaves)))
        if create_graph is False:
            gradients, loss, aux = [x.detach() for x in gradients], loss.detach(), _detached(aux, problem.where)
        results.append(ShardResult(Out(loss, aux), own.cut(gradients)))
    return results


def recording() -> contextlib.AbstractContextManager[object]:
    """As a context: torch.func differentiates, in inference mode too. In that of torch 2.11 it would find zeros."""
    if _DIFFERENTIATES_IN_INFERENCE_MODE or torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # what is outside is not to be tracked
    return stack


_DIFFERENTIATES_IN_INFERENCE_MODE = torch.__version__ >= "2.12"


def joint(
    where: str,
    forwards: Sequence[Forward],
    seeds: Sequence[float],
    create_graph: bool | None,
    ends: Sequence[torch.Tensor],
) -> list[ShardResult]:
    """One backward through the losses of shards, in this thread; `ends` are more to begin with, without elements."""
    graph = bool(create_graph)
    if create_graph is None:
        graph = torch.is_grad_enabled() and _reaches_outside(forwards)
    pairs = zip(forwards, seeds, strict=True)
    counted = [(found.out.loss, seed) for found, seed in pairs if seed != 0 and found.out.loss.requires_grad]
    roots = [*(loss for loss, _ in counted), *ends]
    given = [*(torch.full_like(loss, seed) for loss, seed in counted), *(end.detach() for end in ends)]
    inputs = [x for found in forwards for x in found.inputs.leaves]
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
            out = Out(out.loss.detach(), _detached(out.aux, where))
        results.append(ShardResult(out, own.cut(islice(found, len(own.leaves))), own.leaves if graph else ()))
    return results


def _drop_what_is_left() -> None:
    """After a backward that failed torch keeps the nodes that are still to be visited, until the next one here."""
    if torch_private.current_graph_task_id() == -1:
        with torch.enable_grad():
            nothing = torch.zeros(0, device="cpu", requires_grad=True)
            torch.autograd.grad(nothing.neg(), nothing, nothing.detach())


def forward(problem: Problem, shard: Shard, inputs: Inputs) -> Forward:
    """The loss of a shard."""
    before = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(True)
        return Forward(_call(problem, shard, inputs.build(inputs.leaves)), inputs)
    finally:
        torch_private.set_grad_enabled(before)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same values, and a graph. Sparse ones have no views."""
    return tensor.view_as(tensor) if tensor.layout in (torch.strided, torch.jagged) else tensor.clone()


def is_tracking() -> bool:
    """Whether autograd records what the caller does."""
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def inputs_of(problem: Problem, shard: Shard) -> Inputs:
    """What a shard is differentiated in."""
    if len(problem.argnums) == 1:
        leaves, structure = flattened(shard.args[problem.argnums[0]], "an argument")
        return Inputs(leaves, [structure])
    found = [flattened(shard.args[i], "an argument") for i in problem.argnums]
    return Inputs(list(chain.from_iterable(leaves for leaves, _ in found)), [structure for _, structure in found])


def args_with(problem: Problem, shard: Shard, trees: Sequence[Tree]) -> list[Tree]:
    """The arguments of a shard, with other trees where it is differentiated."""
    args = list(shard.args)
    for i, tree in zip(problem.argnums, trees, strict=True):
        args[i] = tree
    return args


def _call(problem: Problem, shard: Shard, trees: Sequence[Tree]) -> Out:
    shard = Shard(tuple(args_with(problem, shard, trees)), shard.kwargs)
    if torch.compiler.is_compiling():
        return _checked(problem, call_shard(problem.fn, shard))
    with noting() as returned:
        try:
            out = _checked(problem, call_shard(problem.fn, shard))
        except RuntimeError as error:
            if not _A_WRITE.match(text_of(error)):
                raise
            raise RuntimeError(f"{problem.where}: {_NO_WRITE}") from error
    if returned:
        say_dropped(returned, out.aux, problem.where)
    return out


_A_WRITE = re.compile("a (view of a )?leaf Variable that requires grad is being used in an in-place operation")
_NO_WRITE = (
    "the function writes in place to a tensor that requires gradients. It must be pure: work on x.clone(), or return "
    "the new value"
)


def _checked(problem: Problem, out: Any) -> Out:
    if problem.has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"{problem.where}: with has_aux=True the function must return (loss, aux), got {_kind(out)}")
    loss, aux = out if problem.has_aux else (out, None)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        hint = (
            "" if problem.has_aux or not isinstance(out, tuple) else ". To return more than the loss pass has_aux=True"
        )
        raise TypeError(f"{problem.where}: the loss must be a real floating-point tensor, got {_kind(loss)}{hint}")
    if loss.ndim != 0:
        raise ValueError(
            f"{problem.where}: the loss must be a 0-dim tensor, got shape {tuple(loss.shape)}; reduce it with .mean()"
        )
    return Out(loss, aux)


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _reaches_outside(forwards: Sequence[Forward]) -> bool:
    """Whether a loss or aux depends on a leaf that is no input of any: then results stay differentiable."""
    outputs = [x for out, _ in forwards for x in ([out.loss] if out.aux is None else [out.loss, *tensors_in(out.aux)])]
    return bool(captured(outputs, [x for found in forwards for x in found.inputs.leaves]))


def _detached(aux: Tree, where: str) -> Tree:
    if aux is None:
        return None
    flat = flatten(aux, "aux", where=where)
    return unflatten(flat.structure, [t.detach() if isinstance(t, torch.Tensor) else t for t in flat.leaves])
