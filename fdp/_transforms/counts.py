"""What each shard counts in the mean that a loss is."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._execution.executor import Mode, run_all
from fdp._placement.moves import layers
from fdp._placement.plan import Plan
from fdp._transforms.call import State, call_shard
from fdp._transforms.shard_grad import inputs_of, recording
from fdp._trees import torch_private


class Counts(NamedTuple):
    """What each shard of this process counts in the loss, and all of them; others are waited for when it is needed."""

    own: Sequence[float]
    whole: Callable[[], float]

    def share(self, index: int) -> float:
        """The part of a shard in the whole."""
        return self.own[index] / self.whole()


def each_is_one(plan: Plan, state: State) -> None:
    """The losses are added up."""
    state.counts = Counts([1] * len(state.columns), lambda: 1)


def count_rows(plan: Plan, state: State) -> None:
    """Each shard counts as many as it has rows."""
    sizes, peers, where = state.pieces.sizes, state.peers, state.where  # no cycle: the state refers to what is below
    if sizes is None and len(state.columns) > 1:
        raise ValueError(f"{where}: the rows of the shards are not known; pass count, or reduction='sum'")

    def rows() -> float:
        whole = 1 if sizes is None else peers.rows(sum(sizes))
        if whole == 0:
            raise ValueError(f"{where}: there are no rows, and the mean over zero rows is not defined")
        return whole

    state.counts = Counts(sizes if sizes is not None else [1], rows)
    if sum(state.counts.own) == 0:
        rows()


def ask_count(plan: Plan, state: State) -> None:
    """Each shard counts what `count` says of it."""
    where = state.where
    tasks = [partial(_count_of, plan, state, column) for column in state.columns]
    own = run_all(tasks, state.places, Mode(peers=state.peers))
    if not all(math.isfinite(weight) and weight >= 0 for weight in own):
        raise ValueError(f"{where}: count must return a finite number that is not negative, got {own}")
    whole = state.peers.total(sum(own), f"count of {where}")
    if whole == 0:
        raise ValueError(f"{where}: count is zero on all shards, and the mean over nothing is not defined")
    state.counts = Counts(own, lambda: whole)


def _count_of(plan: Plan, state: State, column: Sequence[Any]) -> float:
    """What a shard counts in the mean. It must be a constant: the weights of the shards are not differentiated."""
    inputs = inputs_of(column, plan.gradients.at, plan.gradients.are_tensors)
    found: list[float] = []

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        value = call_shard(state.kind.count, *state.arguments(inputs.build(leaves)))
        found.append(_as_constant(value, state.where, is_compiling=state.around.is_compiling))
        return leaves

    # Differentiated, to see whether it depends on the leaves.
    if state.around.is_compiling or not inputs.tensors:
        call(*inputs.tensors)
    elif plan.gradients.needs_func:
        with recording(state.around):
            torch.func.vjp(call, *inputs.tensors)
    else:
        with torch.enable_grad():
            call(*(leaf.detach().requires_grad_() for leaf in inputs.tensors))
    return found[0]


def _as_constant(value: Any, where: str, *, is_compiling: bool) -> float:
    if isinstance(value, Tensor):
        if is_compiling:
            raise RuntimeError(f"{where}: inside torch.compile count must return a number, not a tensor")
        if value.is_floating_point() and _is_differentiated(value):
            raise ValueError(
                f"{where}: what count returned depends on something that is differentiated, but shards are weighted by "
                "constants. If it may be taken for one, return a number: count.item()"
            )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: count must return a number or a tensor with one, got {value!r}") from error


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether something differentiates through a tensor. Forward mode cannot be asked, and counts as yes."""
    return torch_private.is_forward_mode() or any(layer.requires_grad for layer in layers(tensor))
