"""What each shard counts in the mean that a loss is."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fdp._execution.executor import Mode, run_all
from fdp._placement.moves import layers
from fdp._transforms.call import Call, Shard
from fdp._transforms.shard_grad import Problem, args_with, inputs_of, needs_transform, recording
from fdp._trees import torch_private
from fdp._trees.types import Function, Reduction


class Counts(NamedTuple):
    """What each shard of this process counts in the loss, and all of them; others are waited for when it is needed."""

    own: Sequence[float]
    whole: Callable[[], float]

    def share(self, index: int) -> float:
        """The part of a shard in the whole."""
        return self.own[index] / self.whole()


def weights_of(
    problem: Problem, call: Call, shards: Sequence[Shard], reduction: Reduction, count: Function | None
) -> Counts:
    """What each shard counts in the loss: its rows, or what `count` says."""
    sizes = call.partition.sizes
    if reduction == "sum":
        return Counts([1] * len(shards), lambda: 1)
    if count is None:
        if sizes is None and len(shards) > 1:
            raise ValueError(f"{problem.where}: the rows of the shards are not known; pass count, or reduction='sum'")
        own: Sequence[float] = sizes if sizes is not None else [1]

        def rows() -> float:
            whole = 1 if sizes is None else call.peers.rows(sum(sizes))
            if whole == 0:
                raise ValueError(f"{problem.where}: there are no rows, and the mean over zero rows is not defined")
            return whole

        if sum(own) == 0:
            rows()
        return Counts(own, rows)
    tasks = [functools.partial(count_of, problem, count, shard) for shard in shards]
    slots = call.places()
    own = run_all(tasks, slots, Mode(peers=call.peers))
    if not all(math.isfinite(weight) and weight >= 0 for weight in own):
        raise ValueError(f"{problem.where}: count must return a finite number that is not negative, got {own}")
    whole = call.peers.total(sum(own), f"count of {problem.where}")
    if whole == 0:
        raise ValueError(f"{problem.where}: count is zero on all shards, and the mean over nothing is not defined")
    return Counts(own, lambda: whole)


def count_of(problem: Problem, count: Function, shard: Shard) -> float:
    """What a shard counts in the mean. It must be a constant: the weights of the shards are not differentiated."""
    inputs = inputs_of(problem, shard)
    found: list[float] = []

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = count(*args_with(problem, shard, inputs.build(leaves)), **shard.kwargs)
        found.append(_as_constant(value, problem.where))
        return leaves

    # Differentiated, to see whether it depends on the leaves.
    if torch.compiler.is_compiling() or not inputs.leaves:
        call(*inputs.leaves)
    elif needs_transform(inputs.leaves):
        with recording():
            torch.func.vjp(call, *inputs.leaves)
    else:
        with torch.enable_grad():
            call(*(leaf.detach().requires_grad_() for leaf in inputs.leaves))
    return found[0]


def _as_constant(value: Any, where: str) -> float:
    if isinstance(value, torch.Tensor):
        if torch.compiler.is_compiling():
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


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether something differentiates through a tensor. Forward mode cannot be asked, and counts as yes."""
    return torch_private.is_forward_mode() or any(layer.requires_grad for layer in layers(tensor))
