"""The loss and gradients of single shards: by plain autograd, or by torch.func where a transform is active."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from fdp._collectives.anchors import Anchor, may_meet, no_elements
from fdp._collectives.transpose import Gate
from fdp._execution.patches import is_forward_mode
from fdp._execution.returned import noting
from fdp._transforms.call import Shard, call_shard
from fdp._trees import torch_private
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


class Out(NamedTuple):
    """What a function returned for a shard, and which leaves of aux are new buffers that `functional` returned."""

    loss: torch.Tensor
    aux: Tree
    buffers: frozenset[int] = frozenset()


class ShardResult(NamedTuple):
    """The same with the gradients of the leaves of each differentiated argument, None where it has none."""

    out: Out
    grads: list[list[torch.Tensor | None]]
    aliases: Sequence[torch.Tensor] = ()
    """What the graph of the others leads to: they stand for the leaves."""


class Forward(NamedTuple):
    """What a function returned for a shard, with the tensors that it is differentiated in."""

    out: Out
    aliases: list[torch.Tensor]
    inputs: Inputs
    anchor: Anchor


def needs_transform(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether gradients must be taken by torch.func: under its transforms, in inference mode, while compiling.

    Inside `forward_ad.dual_level` too: `detach`, which plain autograd needs here, would drop the tangents.
    """
    if torch.compiler.is_compiling():
        return True
    active = torch_private.is_transformed() or torch.is_inference_mode_enabled()
    return active or is_forward_mode() or True in map(torch.Tensor.is_inference, tensors)


def transformed(problem: Problem, share: Callable[[], float], create_graph: bool | None, shard: Shard) -> ShardResult:
    """Loss and gradients of one shard by `torch.func.vjp`."""
    inputs = inputs_of(problem, shard)
    plain: list[Any] = []  # torch.func lets tensors through as aux, and nothing else
    is_open = [True]

    def loss_of(start: torch.Tensor, *leaves: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        anchor = Anchor(start)
        call = functools.partial(_call, problem, shard, inputs.build(leaves))
        loss, aux, buffers = anchor.within(call, around=create_graph is not False)
        flat = flatten(aux, "aux", where=problem.where)
        tensors = [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)]
        others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in flat.leaves]
        plain[:] = [flat.structure, others, buffers]
        ends = anchor.ends()
        return (Gate.apply(is_open, loss)[0] if ends else loss, ends), tensors

    with recording():
        made: Any = torch.func.vjp(loss_of, no_elements(), *inputs.leaves, has_aux=True)
        (loss, ends), vjp, tensors = made
        seed = share()
        is_open[0] = seed != 0
        _, *grads = vjp((torch.full_like(loss, seed), ends)) if seed != 0 or ends else [None] * (1 + len(inputs.leaves))
    structure, others, buffers = plain
    rest = iter(tensors)
    aux = unflatten(structure, [next(rest) if other is None else other[0] for other in others])
    if create_graph is False:
        grads = [None if grad is None else grad.detach() for grad in grads]
        loss, aux = loss.detach(), _detached(aux, problem.where)
    return ShardResult(Out(loss, aux, buffers), inputs.cut(grads))


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
) -> list[ShardResult]:
    """One backward through the losses of several shards, which lets autograd serve each accelerator by a thread."""
    graph = bool(create_graph)
    if create_graph is None:
        graph = torch.is_grad_enabled() and any(map(_reaches_outside, forwards))
    roots: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    live = []
    for (out, aliases, _, anchor), seed in zip(forwards, seeds, strict=True):
        ends = anchor.ends()
        counts = seed != 0 and out.loss.requires_grad
        live.append(bool(ends or (counts and aliases)))
        if not live[-1]:
            continue
        if counts:
            roots.append(out.loss)
            given.append(torch.full_like(out.loss, seed))
        roots += ends
        given += map(torch.zeros_like, ends)
        inputs += aliases if anchor.start is None else (*aliases, anchor.start)
    found = iter(torch_private.gradients(roots, inputs, given, create_graph=graph) if inputs else ())
    torch.clear_autocast_cache()  # else it keeps a cast copy of every alias until the caller leaves autocast
    results = []
    for is_live, (out, aliases, own, anchor) in zip(live, forwards, strict=True):
        grads = list(islice(found, len(aliases))) if is_live else [None] * len(aliases)
        if is_live and anchor.start is not None:
            next(found)
        if not graph:  # without one the gradients are detached as they are
            out = Out(out.loss.detach(), _detached(out.aux, where), out.buffers)
        results.append(ShardResult(out, own.cut(grads), aliases if graph else ()))
    return results


def forward(problem: Problem, shard: Shard, *, attached: bool, graph: bool | None = None) -> Forward:
    """The loss of a shard on aliases of its inputs; `attached` ones lead back to the caller's graph.

    If there will be no `graph` of its gradients, a gradient of something around it does not go through it.
    """
    inputs = inputs_of(problem, shard)
    before = torch.is_grad_enabled()
    torch_private.set_grad_enabled(True)
    try:
        # An alias for each position: a tensor that stands in two is two arguments, as in torch.func.
        aliases = [_alias(t) if attached and t.requires_grad else t.detach().requires_grad_() for t in inputs.leaves]
        anchor = Anchor(no_elements().requires_grad_() if may_meet() else None, aliases)
        call = functools.partial(_call, problem, shard, inputs.build(aliases))
        return Forward(anchor.within(call, around=graph is not False), aliases, inputs, anchor)
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
    if not problem.has_aux or torch.compiler.is_compiling():
        return _checked(problem, call_shard(problem.fn, shard))
    with noting() as returned:
        out = _checked(problem, call_shard(problem.fn, shard))
    if not returned:
        return out
    leaves = enumerate(flatten(out.aux, "aux", where=problem.where).leaves)
    return out._replace(buffers=frozenset(i for i, leaf in leaves if returned.get(id(leaf)) is leaf))


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


def _reaches_outside(forward: Forward) -> bool:
    """Whether loss or aux depend on a leaf that is not one of the inputs: then results stay differentiable."""
    out = forward.out
    return forward.anchor.is_passed((out.loss,) if out.aux is None else (out.loss, *tensors_in(out.aux)))


def _detached(aux: Tree, where: str) -> Tree:
    if aux is None:
        return None
    flat = flatten(aux, "aux", where=where)
    return unflatten(flat.structure, [t.detach() if isinstance(t, torch.Tensor) else t for t in flat.leaves])
