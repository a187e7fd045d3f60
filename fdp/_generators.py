"""Random generators that a slot has to itself while it has its turn; torch has one of the CPU for all threads.

States are taken under one lock. torch holds one of its own while `get_state` makes a tensor, which may collect garbage
and so run Python in another thread: if that one asks for a state too, both wait for ever.
"""

from typing import final

import torch

from fdp._context import EXCLUSIVE, fold_in, generators_of


class OwnGenerators:
    """The generators of a slot, in place of the process's while it has its turn."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generators = seed, generators_of(device)
        self._first: list[torch.Tensor] = []
        self._own: list[torch.Tensor] | None = None
        self._outside: list[torch.Tensor] = []

    def renew(self, data: int) -> None:
        """Another seed, during a turn."""
        for generator in self._generators:
            generator.manual_seed(fold_in(self._seed, data))

    def resume(self) -> None:
        """Begin a turn."""
        EXCLUSIVE.lock.acquire()
        self._outside = [generator.get_state() for generator in self._generators]
        for i, generator in enumerate(self._generators):
            if self._own is None:
                self._first.append(generator.manual_seed(self._seed).get_state())
            else:
                generator.set_state(self._own[i])

    def pause(self) -> None:
        """End a turn."""
        self._own = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        EXCLUSIVE.lock.release()

    def has_drawn(self) -> bool:
        """Whether something was drawn."""
        return self._own is not None and not all(map(torch.equal, self._own, self._first))


@final
class KeptGenerators(OwnGenerators):
    """Those of the slot in the calling thread: what it finds there, and leaves."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)

    def renew(self, data: int) -> None:
        """It goes on."""

    def resume(self) -> None:
        if self._own is not None:
            with EXCLUSIVE.held():
                for generator, state in zip(self._generators, self._own, strict=True):
                    generator.set_state(state)

    def pause(self) -> None:
        with EXCLUSIVE.held():
            self._own = [generator.get_state() for generator in self._generators]
