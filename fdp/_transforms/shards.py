"""The losses and gradients of all shards of a call: each by itself, or in one backward for all."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fdp._collectives.lockstep import Task
from fdp._collectives.run import run, run_all
from fdp._execution.executor import Mode
from fdp._execution.function_traits import meets
from fdp._execution.restart import Again
from fdp._placement.partition import Partition
from fdp._placement.slot import Slot
from fdp._transforms.call import Shard
from fdp._transforms.shard_grad import (
    Problem,
    ShardResult,
    forward,
    is_tracking,
    joint,
    needs_transform,
    transformed,
)

Take = Callable[[int, ShardResult], None]


class ShardGradients(NamedTuple):
    """Shards to be differentiated, the share of each in the whole loss, and how they run."""

    problem: Problem
    partition: Partition
    shards: Sequence[Shard]
    shares: Sequence[Callable[[], float]]
    slots: Sequence[Slot]
    mode: Mode
    create_graph: bool | None

    def run(self, given: Sequence[torch.Tensor], take: Take) -> None:
        """Let `take` have what comes of each, in order."""
        if needs_transform(given):
            return self._run(take, [partial(transformed, self.problem, x, self.create_graph) for x in self.shares])
        attached = is_tracking() and self.create_graph is not False and True in map(_requires_grad, given)
        graph = True if attached else self.create_graph
        seed, devices = self.mode.seed, self.partition.devices
        draws_rows = seed is not None and seed.draws is not None  # also in a backward, which is then the shard's own
        if draws_rows or meets(self.mode.fn) or all(device.type in ("cpu", "meta") for device in devices):
            # Backwards on the CPU run in the calling thread anyway, and so a shard's graph is gone before the next.
            alone = partial(_alone, self.problem, attached, graph)
            return self._run(take, [partial(alone, share) for share in self.shares])
        if not self._in_one_backward(take, attached=attached, graph=graph):
            self.run(given, take)

    def _run(self, take: Take, runs: Sequence[Callable[[Shard], ShardResult]]) -> None:
        tasks = [Task(each, shard) for each, shard in zip(runs, self.shards, strict=True)]
        run(tasks, self.slots, self.mode, take)

    def _in_one_backward(self, take: Take, *, attached: bool, graph: bool | None) -> bool:
        """All forwards, then one backward; False if slots meet, for whom it would wait."""
        where, slots = self.problem.where, self.slots
        own = partial(forward, self.problem, attached=attached, graph=graph)
        forwards = [Task(own, shard) for shard in self.shards]
        taken, name = False, ""
        try:
            for batch in _rounds(self.partition.slots):
                own_slots = [slots[i] for i in batch]
                losses = run_all([forwards[i] for i in batch], own_slots, self.mode._replace(apart=True))
                with _noting(own_slots):
                    seeds = [self.shares[i]() for i in batch]
                    results = joint(where, losses, seeds, graph)[::-1]
                taken = True
                for i in batch:
                    take(i, results.pop())  # which lets go of each: it may then be added to in place
            return True
        except Again as need:  # one backward for all would wait for itself
            name = need.name
        if taken:
            raise RuntimeError(f"{where}: {name} is called in some microbatches and not in the first")
        return False


def _alone(
    problem: Problem,
    attached: bool,
    create_graph: bool | None,
    share: Callable[[], float],
    shard: Shard,
) -> ShardResult:
    found = forward(problem, shard, attached=attached, graph=create_graph)
    return joint(problem.where, [found], [share()], create_graph)[0]


@contextlib.contextmanager
def _noting(slots: Sequence[Slot]) -> Iterator[None]:
    """A failure in the backward of several shards says so: which of them it was in, autograd does not tell."""
    try:
        yield
    except Exception as error:
        where = ", ".join(dict.fromkeys(str(slot.device) for slot in slots))
        with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
            error.add_note(
                str(slots[0]) if len(slots) == 1 else f"in the one backward of {len(slots)} shards, on {where}"
            )
        raise


_requires_grad: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")


def _rounds(slots: Sequence[int]) -> list[list[int]]:
    """Shards in groups that have one of every slot: the first microbatch of each, then the second, and so on."""
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for i, slot in enumerate(slots):
        number = seen.get(slot, 0)
        seen[slot] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(i)
    return rounds
