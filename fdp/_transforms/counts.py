"""What each shard counts in the mean that a loss is: the steps that weigh them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdp._execution.executor import run_all
from fdp._placement.moves import layers, promoted, to_device
from fdp._placement.plan import Plan
from fdp._transforms.call import State
from fdp._transforms.losses import Shard, recording
from fdp._trees import torch_private


class Counts:
    """What each shard of this process counts in the loss, and all of them: others are asked when that is wanted."""

    _whole: float | None = None

    def __init__(self, own: Sequence[float], ask: Callable[[float], float], nothing: str = "") -> None:
        self.own, self._ask, self._nothing = own, ask, nothing
        if sum(own) == 0:
            self._ask_all()

    def share(self, index: int) -> float:
        """The part of a shard in the whole."""
        return self.own[index] / (self._whole or self._ask_all())

    def _ask_all(self) -> float:
        self._whole = self._ask(sum(self.own))
        if self._whole == 0:
            raise ValueError(self._nothing)
        return self._whole


def each_is_one(plan: Plan, state: State) -> None:
    """The losses are added up."""
    state.counts = Counts([1] * len(state.columns), _one)


def _one(own: float) -> float:
    return 1


def count_rows(plan: Plan, state: State) -> None:
    """Each shard counts as many as it has rows."""
    sizes, where = state.pieces.sizes, state.where
    if sizes is None and len(state.columns) > 1:
        raise ValueError(f"{where}: the rows of the shards are not known; pass count, or reduction='sum'")
    nothing = f"{where}: there are no rows, and the mean over zero rows is not defined"
    ask = partial(state.peers.whole, counts=False)
    state.counts = Counts([1], _one) if sizes is None else Counts(sizes, ask, nothing)


def ask_count(plan: Plan, state: State) -> None:
    """Each shard counts what `count` says of it."""
    tasks = [partial(_count_of, plan, state, i) for i in range(len(state.columns))]
    own = _read(run_all(tasks, state.places, peers=state.peers))
    if not all(math.isfinite(weight) and weight >= 0 for weight in own):
        raise ValueError(f"{state.where}: count must return a finite number that is not negative, got {own}")
    nothing = f"{state.where}: count is zero on all shards, and the mean over nothing is not defined"
    state.counts = Counts(own, partial(state.peers.whole, counts=True), nothing)


def _count_of(plan: Plan, state: State, i: int) -> float | Tensor:
    """What a shard counts in the mean. It must be a constant: the weights of the shards are not differentiated."""
    shard, around = Shard(i, state.columns[i], plan.gradients), state.around
    if torch_private.fake_mode() is not None:
        return _count_of_fakes(state, shard)
    found: list[float | Tensor] = []

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        value = state.run_shard(shard.leaves(leaves), state.kind.count)
        found.append(_as_constant(value, state.where, is_compiling=around.is_compiling))
        return leaves

    # Differentiated, to see whether it depends on the leaves.
    if around.is_compiling or not shard.tensors:
        call(*shard.tensors)
    elif around.needs_func:
        with recording(around):
            torch.func.vjp(call, *shard.tensors)
    else:
        with torch.enable_grad():
            call(*(leaf.detach().requires_grad_() for leaf in shard.tensors))
    return found[0]


def _count_of_fakes(state: State, shard: Shard) -> float | Tensor:
    """What a shard without values counts nobody can know: only whether it is a tensor."""
    try:
        value = state.run_shard(shard.leaves(shard.tensors), state.kind.count)
    except RuntimeError:  # it asks for values
        return 1.0
    return value if isinstance(value, Tensor) and value.numel() == 1 else 1.0


def _as_constant(value: Any, where: str, *, is_compiling: bool) -> float | Tensor:
    """A number, or the tensor that holds it: it is read later, with those of the other shards."""
    if isinstance(value, Tensor):
        if is_compiling:
            raise RuntimeError(f"{where}: inside torch.compile count must return a number, not a tensor")
        # Whether something differentiates through it. Forward mode cannot be asked, and counts as yes.
        is_forward = torch_private.forward_level() >= 0
        if value.is_floating_point() and (is_forward or any(layer.requires_grad for layer in layers(value))):
            raise ValueError(
                f"{where}: what count returned depends on something that is differentiated, but shards are weighted by "
                "constants. If it may be taken for one, return a number: count.item()"
            )
        own = layers(value)
        if value.numel() == 1 and not (value.is_complex() or any(map(torch_private.is_batched, own))):
            return torch_private.outside_transforms(own[-1].clone)  # the next shard may write to it
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: count must return a number or a tensor with one, got {value!r}") from error


def _read(values: Sequence[float | Tensor]) -> list[float]:
    """What shards count. The host waits for their devices once."""
    tensors = [x.detach().reshape(()) for x in values if isinstance(x, Tensor)]
    if not tensors:
        return list(map(float, values))
    moved = [to_device(x, tensors[0].device, "count") for x in tensors]
    if torch_private.fake_mode() is not None:
        return [1.0] * len(values)
    found = iter(torch.stack(promoted(moved)).tolist())
    return [float(next(found)) if isinstance(x, Tensor) else x for x in values]
