"""The losses and gradients of all shards of a call: all forwards, then one backward with the shares as seeds.

A loss that has met nobody is differentiated at once, in its slot: so its graph is gone before the next.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fdp._execution.executor import Mode, run, run_all
from fdp._placement.partition import Partition
from fdp._placement.slot import AXES, Slot, outside_slots
from fdp._transforms.call import Shard
from fdp._transforms.shard_grad import (
    Forward,
    Problem,
    ShardResult,
    forward,
    inputs_of,
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
        """Let `take` have what comes of each, in order: the first microbatches of all slots, then the second ones."""
        is_inside = not torch.compiler.is_compiling() and len(AXES.get()) > 0
        differentiate = self._transformed if is_inside or needs_transform(given) else self._by_autograd
        is_attached = not torch.compiler.is_compiling() and True in map(_requires_grad, given)
        attached = is_attached and is_tracking() and self.create_graph is not False
        rounds = _rounds(self.partition.slots)
        for batch in rounds:
            mode = self.mode._replace(lacks_slots=len(batch) < len(rounds[0]))
            differentiate(batch, mode, take, attached=attached)

    def _transformed(self, batch: list[int], mode: Mode, take: Take, *, attached: bool) -> None:
        """By one `torch.func.vjp` around the call."""
        slots = [self.slots[i] for i in batch]

        def losses(forwards: Sequence[Callable[[], object]]) -> list[object]:
            return run_all(forwards, slots, mode)

        shards, shares = [self.shards[i] for i in batch], [self.shares[i] for i in batch]
        with _noting(slots):
            results = transformed(self.problem, shards, shares, self.create_graph, losses, mode.peers)
        for i, result in zip(batch, results, strict=True):
            take(i, result)

    def _by_autograd(self, batch: list[int], mode: Mode, take: Take, *, attached: bool) -> None:
        where, slots, peers = self.problem.where, [self.slots[i] for i in batch], mode.peers
        aliases = [inputs_of(self.problem, self.shards[i]).aliases(attached) for i in batch]
        with torch.enable_grad():
            peers.begins_with([x for own in aliases for x in own.leaves])
        graph = True if attached else self.create_graph

        def differentiated(k: int) -> ShardResult | Forward:
            found = forward(self.problem, self.shards[batch[k]], aliases[k])
            if AXES.get()[-1].run.has_met or peers.ends():
                return found
            with outside_slots():
                return joint(where, [found], [self.shares[batch[k]]()], graph, [])[0]

        met: list[Forward] = []

        def sort(k: int, found: ShardResult | Forward) -> None:
            if isinstance(found, Forward):
                met.append(found)
            else:
                take(batch[k], found)

        run([partial(differentiated, k) for k in range(len(batch))], slots, mode, sort)
        if not met:
            return
        with _noting(slots):
            results = joint(where, met, [self.shares[i]() for i in batch], graph, peers.ends())[::-1]
        met.clear()
        for i in batch:
            take(i, results.pop())  # which lets go of each: it may then be added to in place


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
