"""What the slots of a call draw from: a seed, and who draws the same."""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fdp._execution.baton import HERE, TurnState
from fdp._execution.fold_in import fold_in
from fdp._execution.generators import OwnGenerators
from fdp._execution.guards import refuse_beside
from fdp._execution.process_lock import Hold
from fdp._placement.slot import Slot
from fdp._trees.types import Randomness


class SlotDraws(Protocol):
    """What knows the draws of a whole batch; `ended` checks what a shard has returned."""

    def mode(self, seed: int, slot: Slot) -> contextlib.AbstractContextManager[Any]:
        """As a context: a shard draws."""
        ...


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

    def run(self, slot: Slot, call: Callable[[], Any]) -> Any:
        """Run a shard that draws from it. The generators of the caller are as before afterwards."""
        refuse_beside("another one with a seed")
        own, around, hold = OwnGenerators(self.of(slot), slot.device), HERE.states, Hold()
        try:
            hold.take()
            own.resume()
            HERE.states = (*around, own)
            if self.draws is None:
                return call()
            with self.draws.mode(self.of(slot), slot) as draws:
                return draws.ended(call())
        finally:
            try:
                _put_back(own, around, hold)
            except BaseException:  # an interrupt came in it
                _put_back(own, around, hold)
                raise


def _put_back(own: OwnGenerators, around: tuple[TurnState, ...], hold: Hold) -> None:
    own.pause()
    HERE.states = around
    hold.leave()


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
