"""The steps of a gradient function: losses and gradients of the shards, and what becomes of them.

All forwards, then one backward with the shares as seeds. A loss that has met nobody is differentiated at once, in its
slot: so its graph is gone before the next.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, repeat

import torch
from torch import Tensor
from torch.autograd import profiler

from fdp._execution.executor import run, run_all
from fdp._placement.join import mean
from fdp._placement.moves import promoted, to_device, total
from fdp._placement.peers import Joined
from fdp._placement.plan import Plan
from fdp._placement.slot import AXES, Slot
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.call import State
from fdp._transforms.losses import Shard, aliases, backward, loss_of, transformed
from fdp._transforms.sums import Gradients
from fdp._trees import torch_private
from fdp._trees.profiling import stage
from fdp._trees.tracebacks import warn
from fdp._trees.types import Tree


def differentiate_by_autograd(plan: Plan, state: State) -> None:
    """Each loss, and its gradients by plain autograd."""
    options, is_attached = state.call.options, plan.gradients.is_attached
    for batch, lacks_slots in _rounds(plan, state):
        shards, leaves = list[Shard](), list[Tensor]()
        for i in batch:
            shard = Shard(i, state.columns[i], plan.gradients)
            shard.tensors = aliases(shard.tensors, is_attached)
            shards.append(shard)
            leaves += shard.tensors
        state.peers.begins_with(leaves)  # collectives from here on are functions of these
        slots, met = list(map(state.places.__getitem__, batch)), list[Shard]()
        tasks = list(map(partial, repeat(_differentiated), repeat(plan), repeat(state), shards))
        take = partial(_take, state, met)
        run(tasks, slots, take, options.executor, state.seed, state.peers, lacks_slots=lacks_slots)
        if met:
            with _noting(slots):
                backward(plan, state, met, state.peers.ends())
            for i, shard in enumerate(met):
                _take(state, [], i, shard)


def _differentiated(plan: Plan, state: State, shard: Shard) -> Shard:
    """The loss of a shard, with its gradients if it has met nobody."""
    torch_private.set_grad_enabled(True)  # until the slot ends
    shard.loss, shard.aux = loss_of(state, shard.leaves(shard.tensors))
    if AXES.get()[-1].run.has_met or state.peers.ends():
        return shard
    token = AXES.set(())  # in no slot: the backward may compute anew what was outside
    try:
        backward(plan, state, [shard], ())
        return shard
    finally:
        AXES.reset(token)


def differentiate_by_func(plan: Plan, state: State) -> None:
    """All losses, and their gradients by one `torch.func.vjp` around the call."""
    how = {"executor": state.call.options.executor, "seed": state.seed, "peers": state.peers}
    for batch, lacks_slots in _rounds(plan, state):
        slots = [state.places[i] for i in batch]
        shards = [Shard(i, state.columns[i], plan.gradients) for i in batch]
        with _noting(slots):
            run_these = partial(run_all, slots=slots, lacks_slots=lacks_slots, **how)
            transformed(state, shards, run_these)
        for i, shard in enumerate(shards):
            _take(state, [], i, shard)


def _take(state: State, met: list[Shard], _: int, shard: Shard) -> None:
    """Add what has come of a shard; those without gradients have `met` others."""
    if shard.grads is None:
        met.append(shard)
        return
    state.outputs[shard.index] = shard.loss, shard.aux
    if profiler._is_profiler_enabled:
        with stage("reduce"):
            state.gradients.add(shard.index, shard.grads, shard.column)
    else:
        state.gradients.add(shard.index, shard.grads, shard.column)


def _rounds(plan: Plan, state: State) -> list[tuple[list[int], bool]]:
    """Shards in groups that have one of every slot: the first microbatch of each, then the second, and so on.

    For each, whether some slots have none.
    """
    kind, slots, values = state.kind, state.pieces.slots, list(map(state.values.__getitem__, plan.gradients.at))
    state.gradients = Gradients(plan.gradients, values, len(slots), kind)
    state.outputs, state.aliases = [None] * len(slots), []
    number = dict.fromkeys(slots, 0)
    rounds: list[list[int]] = []
    for i, slot in enumerate(slots):
        if number[slot] == len(rounds):
            rounds.append([])
        rounds[number[slot]].append(i)
        number[slot] += 1
    return [(batch, len(batch) < len(rounds[0])) for batch in rounds]


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


# ---- what becomes of them


def warn_of_unused(plan: Plan, state: State) -> None:
    """Say that a loss leads to nothing that it is differentiated in, unless it leads to other arguments."""
    if state.gradients.is_used or not state.aliases or not any(loss.requires_grad for loss, _ in state.outputs):
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
    kind, device = state.kind, state.kind.target or state.device
    losses, auxes = zip(*state.outputs, strict=True)
    value = _loss_of(losses, state.counts.own, device, is_mean=kind.reduction == "mean")
    aux = _aux_of(state, auxes).tree(device, state.where) if kind.has_aux else None
    state.result = value, aux, _gradients(plan, state.gradients)


def sum_over_processes(plan: Plan, state: State) -> None:
    """The same over all processes."""
    kind, own, around = state.kind, state.counts.own, plan.around
    is_mean, device = kind.reduction == "mean", kind.target or state.device
    losses, auxes = zip(*state.outputs, strict=True) if state.outputs else ((), ())
    weight, weights = sum(own), own if any(own) else [1] * len(own)  # without weight only others count
    loss = _loss_of(losses, weights, device, is_mean=is_mean) if losses else None
    aux, gradients = _aux_of(state, auxes) if kind.has_aux else None, state.gradients
    value, rest = state.peers.reduce(loss, weight if is_mean else None, aux, gradients, device, state.where)
    found = value, rest, _gradients(plan, gradients)
    is_asked = around.needs_grad and around.is_tracking and kind.create_graph is None
    state.result = state.peers.last(found, state.given) if is_asked else found


def _loss_of(losses: Sequence[Tensor], own: Sequence[float], device: torch.device, *, is_mean: bool) -> Tensor:
    if any(loss.device != device for loss in losses):
        losses = [to_device(loss, device, "loss") for loss in losses]
    losses = promoted(losses)
    return mean(losses, own) if is_mean else total(losses)


def _aux_of(state: State, auxes: Sequence[Tree]) -> Joined:
    kind, counts = state.kind, state.counts
    rows, hint = state.pieces.sizes, ""
    if kind.aux_weight == "count" or (kind.count is None and kind.reduction == "mean"):
        rows = counts.own
    if rows is None:
        hint = "aux_dims says how each leaf is joined; aux_weight='count' weights it as the loss is"
    dims = dims_of(auxes[0] if auxes else None, kind.aux_dims, state.where)
    return Joined(auxes, dims, rows, "aux", hint)


def _gradients(plan: Plan, gradients: Gradients) -> list[Tree]:
    """Those of each argument."""
    each = iter(gradients.finish())
    return [own.unflatten(islice(each, own.num_leaves)) for own in plan.gradients.structures]
