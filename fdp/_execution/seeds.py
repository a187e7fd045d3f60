"""What the slots of a call draw from: a seed, and who draws the same."""

import contextlib
import hashlib
import numbers
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch

from fdp._execution.alone import be_alone
from fdp._execution.random import KeptGenerators, OwnGenerators
from fdp._execution.scheduler import this_participant
from fdp._placement.moves import bytes_of
from fdp._placement.slot import EXCLUSIVE, IN_ORDER, Slot, fold_in
from fdp._trees import torch_private
from fdp._trees.types import Randomness


class SlotDraws(Protocol):
    """What a shard of a call draws."""

    def mode(self, seed: int, slot: Slot) -> Any:
        """A context in which the shard runs; its `ended` takes what that has returned."""


class Seed(NamedTuple):
    """A seed of the caller's, with the draws of a whole batch where `randomness` is "rows"."""

    number: int
    randomness: Randomness = "different"
    draws: SlotDraws | None = None

    def of(self, slot: Slot) -> int:
        """What a shard begins with. The first microbatch draws as the whole shard would."""
        if self.randomness != "different":
            return fold_in(self.number, 0)
        own = fold_in(self.number, slot.index)
        return fold_in(own, slot.piece) if slot.piece else own

    def around(self, slot: Slot, call: Callable[[], Any]) -> Any:
        """Run a shard, whose generators have been seeded."""
        if self.draws is None:
            return call()
        with self.draws.mode(self.of(slot), slot) as draws:
            return draws.ended(call())


def seed_of(seed: int | Seed | None, randomness: Randomness, where: str) -> Seed | None:
    """The seed of a call, checked."""
    if randomness not in ("different", "same", "rows"):
        raise ValueError(f"{where}: there is no randomness {randomness!r}; expected 'different', 'same' or 'rows'")
    if seed is None:
        if randomness != "different":
            raise ValueError(
                f"{where}: randomness={randomness!r} needs a seed: pass seed=, an int that changes each step"
            )
        return None
    if isinstance(seed, Seed):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"{where}: seed must be an int, got {seed!r}")
    return Seed(int(seed), randomness)


def seed_options(seed: Seed | None) -> dict[str, Any]:
    """What has to be the same in all processes."""
    return {"seed": seed and seed.number, "randomness": seed and seed.randomness}


def seeded(seed: Seed, slot: Slot, call: Callable[[], Any]) -> Any:
    """Run a shard that draws from its seed; the generators of the caller are as before afterwards."""
    be_alone()
    generators, participant = OwnGenerators(seed.of(slot), slot.device), this_participant()
    with EXCLUSIVE.held():
        IN_ORDER.set(True)  # until the end of the shard's context
        restore = generators.remember()
        try:
            generators.put()
            with contextlib.nullcontext() if participant is None else participant.owning(generators):
                return seed.around(slot, call)
        finally:
            deque(restore, 0)  # one call of C, which no interrupt comes before or into


@final
class SlotSeeds:
    """What the slots of a call draw from that run together: a seed of the caller's, or one that is taken."""

    def __init__(self, seed: Seed | None, *, has_values: bool) -> None:
        self._seed, self._has_values, self._is_taken = seed, has_values, False  # what has no values draws none
        self._own: list[OwnGenerators] = []

    def take(self) -> None:
        """A seed for slots that take turns, from the state of the caller's generator."""
        if not self._has_values:
            return
        # Inside a transform the state has no memory to read.
        with EXCLUSIVE.held(), torch_private.without_transforms():
            state = bytes_of(torch.default_generator.get_state())
        self._seed, self._is_taken = Seed(int.from_bytes(hashlib.sha256(state).digest()[:8], "little")), True

    def of(self, slot: Slot) -> list[OwnGenerators]:
        """The generators of a slot, if there is a seed."""
        if self._seed is None or not self._has_values:
            return []
        own = OwnGenerators(self._seed.of(slot), slot.device)
        self._own.append(own)
        return [own]

    def run(self, slot: Slot, own: Sequence[OwnGenerators], task: Callable[[], Any]) -> Any:
        """Run a shard of a slot, which may have several, with generators of its own."""
        if self._seed is None or not own:
            return task()
        for generators in own:
            if slot.piece:
                generators.renew(self._seed.of(slot))
        return self._seed.around(slot, task)

    def kept(self, slot: Slot) -> list[OwnGenerators]:
        """Those of a slot that goes on with what it finds."""
        return [KeptGenerators(slot.device)] if self._has_values else []

    def leave(self) -> None:
        """Move the caller's generator if slots have drawn: the next call is to draw something else."""
        if self._is_taken and any(own.has_drawn() for own in self._own):
            with torch_private.without_transforms():
                torch.rand((), device="cpu")  # whatever the default device is
