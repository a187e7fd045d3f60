"""The steps of a gradient function: the losses and gradients of all shards, and what becomes of them.

All forwards, then one backward with the shares as seeds. A loss that has met nobody is differentiated at once, in its
slot: so its graph is gone before the next.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._execution.executor import Mode, run, run_all
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.moves import promoted
from fdp._placement.peers import Joined, PeerCall
from fdp._placement.plan import Plan
from fdp._placement.slot import AXES, Slot
from fdp._transforms.accumulate import Gradients
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.call import State
from fdp._transforms.shard_grad import Forward, Inputs, ShardResult, forward, inputs_of, joint, transformed
from fdp._trees import torch_private
from fdp._trees.tracebacks import warn
from fdp._trees.types import Tree


class GradientPlan(NamedTuple):
    """Which leaves a call is differentiated in, and how.

    Attributes:
        leaves: These leaves, and `at`: their positions among all.
        structures: Those of the arguments that they are in.
        are_tensors: Each is a tensor.
        usual: What the gradient of each usually is, if all are whole: see `accumulate.usual`.
        needs_func: Gradients are taken by torch.func.
        is_attached: Results are differentiable in what was given.
    """

    leaves: tuple[LeafPlan, ...]
    at: tuple[int, ...]
    structures: tuple[Any, ...]
    are_tensors: bool
    usual: list[Any] | None
    needs_func: bool
    is_attached: bool


def differentiate_by_autograd(plan: Plan, state: State) -> None:
    """Each loss, and its gradients by plain autograd."""
    own, graph = plan.gradients, True if plan.gradients.is_attached else state.kind.create_graph
    _prepare(plan, state)
    for batch, mode in _rounds(plan, state):
        inputs = [inputs_of(state.columns[i], own.at, own.are_tensors).aliases(own.is_attached) for i in batch]
        _begins_with(state.peers, [x for each in inputs for x in each.tensors])
        met: list[Forward] = []

        def take(k: int, found: ShardResult | Forward, batch: list[int] = batch, met: list[Forward] = met) -> None:
            if isinstance(found, Forward):
                met.append(found)
            else:
                _take(plan, state, batch[k], found)

        slots = [state.places[i] for i in batch]
        pairs = zip(batch, inputs, strict=True)
        run([partial(_differentiated, state, i, each, graph) for i, each in pairs], slots, mode, take)
        if not met:
            continue
        with _noting(slots):
            seeds = [state.counts.share(i) for i in batch]
            results = joint(state, met, seeds, graph, state.peers.ends())[::-1]
        met.clear()
        for i in batch:
            _take(plan, state, i, results.pop())  # which lets go of each


def _begins_with(peers: PeerCall, leaves: Sequence[Tensor]) -> None:
    """Collectives from here on are functions of these leaves."""
    before = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(True)
        peers.begins_with(leaves)
    finally:
        torch_private.set_grad_enabled(before)


def _differentiated(state: State, i: int, inputs: Inputs, graph: bool | None) -> ShardResult | Forward:
    """The loss of a shard, with its gradients if it has met nobody."""
    found = forward(state, inputs)
    if AXES.get()[-1].run.has_met or state.peers.ends():
        return found
    token = AXES.set(())  # in no slot: the backward may compute anew what was outside
    try:
        return joint(state, [found], [state.counts.share(i)], graph, [])[0]
    finally:
        AXES.reset(token)


def differentiate_by_func(plan: Plan, state: State) -> None:
    """All losses, and their gradients by one `torch.func.vjp` around the call."""
    own = plan.gradients
    _prepare(plan, state)
    for batch, mode in _rounds(plan, state):
        slots = [state.places[i] for i in batch]
        inputs = [inputs_of(state.columns[i], own.at, own.are_tensors) for i in batch]
        seeds = [state.counts.share(i) for i in batch]
        with _noting(slots):
            run_these = partial(run_all, slots=slots, mode=mode)
            results = transformed(state, inputs, seeds, state.kind.create_graph, run_these)
        for i, result in zip(batch, results, strict=True):
            _take(plan, state, i, result)


def _prepare(plan: Plan, state: State) -> None:
    own, kind = plan.gradients, state.kind
    values = [state.values[i] for i in own.at]
    state.gradients = Gradients(
        own.leaves, values, own.usual, len(state.columns), kind.target, kind.reduce_dtype, kind.unused
    )
    state.outputs, state.aliases, state.is_used = [None] * len(state.columns), [], False


def _take(plan: Plan, state: State, i: int, result: ShardResult) -> None:
    state.outputs[i] = result.out
    state.is_used = state.is_used or not {type(None)}.issuperset(map(type, result.grads))
    state.aliases += result.aliases
    state.gradients.add(i, result.grads, [state.columns[i][k] for k in plan.gradients.at])


def _rounds(plan: Plan, state: State) -> Iterator[tuple[list[int], Mode]]:
    """Shards in groups that have one of every slot: the first microbatch of each, then the second, and so on."""
    mode, slots = Mode(state.call.options.executor, state.seed, state.peers), state.pieces.slots
    if len(set(slots)) == len(slots):
        if slots:
            yield list(range(len(slots))), mode
        return
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for i, slot in enumerate(slots):
        number = seen.get(slot, 0)
        seen[slot] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(i)
    for batch in rounds:
        yield batch, mode._replace(lacks_slots=len(batch) < len(rounds[0]))


@contextlib.contextmanager
def _noting(slots: Sequence[Slot]) -> Iterator[None]:
    """A failure in the backward of several shards says so: which of them it was in, autograd does not tell."""
    try:
        yield
    except Exception as error:
        where = ", ".join(dict.fromkeys(str(slot.device) for slot in slots))
        with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
            if not getattr(error, "__notes__", ()):
                several = f"in the one backward of {len(slots)} shards, on {where}"
                error.add_note(several if len(slots) > 1 else str(slots[0]))
        raise


def warn_of_unused(plan: Plan, state: State) -> None:
    """Say that a loss leads to nothing that it is differentiated in, unless it leads to other arguments."""
    if state.is_used or not state.aliases or not any(out.loss.requires_grad for out in state.outputs):
        return
    at = set(plan.gradients.at)
    others = [leaf for leaf in plan.leaves if leaf.index not in at]
    if not any(x.requires_grad for leaf in others for x in leaf.tensors(state.values[leaf.index])):
        warn(_UNUSED.format(state.where))


_UNUSED = (
    "{}: all gradients are 0. The loss depends on no tensor that it is differentiated in, and on some that require "
    "gradients and are no arguments. With apply, (params, buffers) = fdp.functional(module), a loss of (params, x) "
    "calls apply((params, buffers), x), and not module(x)"
)


def join_losses(plan: Plan, state: State) -> None:
    """How the losses become one, and what else the shards have returned."""
    kind, outs, counts, sizes, peers = state.kind, state.outputs, state.counts, state.pieces.sizes, state.peers
    losses = promoted([out.loss for out in outs]) if outs else []
    loss, aux = Joined(losses, kind.reduction, counts.own, counts.whole, "loss"), None
    if kind.has_aux:
        rows, whole, hint = sizes, lambda: peers.rows(sum(sizes or ())), ""
        if kind.aux_weight == "count" or (kind.count is None and kind.reduction == "mean"):
            rows, whole = counts.own, counts.whole
        if rows is None:
            hint = "aux_dims says how each leaf is joined; aux_weight='count' weights it as the loss is"
        dims = dims_of(outs[0].aux if outs else None, kind.aux_dims, state.where)
        aux = Joined([out.aux for out in outs], dims, rows, whole, "aux", hint)
    found = peers.reduce(loss, aux, state.gradients, state.aliases, kind.target or state.device, state.where)

    gradients, structures = state.gradients, plan.gradients.structures

    def finish() -> tuple[Tensor, Tree, list[Tree]]:
        value, rest = found()
        grads = iter(gradients.finish())
        return value, rest, [own.unflatten(list(islice(grads, own.num_leaves))) for own in structures]

    state.finish = finish
