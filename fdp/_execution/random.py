"""Random generators that a slot has to itself while it has its turn; torch has one of the CPU for all threads.

What holds at any time:

- States are taken under `slot.EXCLUSIVE`. torch holds a lock of its own while `get_state` makes a tensor, which may
  collect garbage and so run Python in another thread: if that one asks for a state too, both wait for ever.
- `OwnGenerators` hold it from `resume` to `pause`, for the length of a turn, and what stood in the generators outside
  of the turn stands there again afterwards. `KeptGenerators` hold it for the change only: slot 0 in the calling thread
  goes on with what it finds, and others may draw meanwhile.
- `seeded` holds it while the shard runs, and takes no other threads (`IN_ORDER`). Where the shard takes turns, its
  generators are one more belonging: they go with the turn, and come back with it.
- Before a run that may begin anew, `bookmark` notes where generators are. If another thread has the lock it notes
  nothing and does not wait: with others that draw, nothing can be repeated anyway.

Where a turn, a seeded shard or a run that begins anew ends, the states of before are put back within one call of C, so
that an interrupt comes before all of it or after.
"""

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch

from fdp._execution.alone import is_beside_others
from fdp._execution.scheduler import this_participant
from fdp._placement.slot import EXCLUSIVE, LENT
from fdp._trees import torch_private


class OwnGenerators:
    """The generators of a slot, in place of the process's while it has its turn."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generators = seed, generators_of(device)
        self._first: list[torch.Tensor] = []
        self._own: list[torch.Tensor] | None = None
        self._outside: list[torch.Tensor] = []

    def renew(self, seed: int) -> None:
        """Another seed, during a turn."""
        for generator in self._generators:
            generator.manual_seed(seed)

    def resume(self) -> None:
        """Begin a turn."""
        EXCLUSIVE.acquire()
        self.remember()
        self.put()

    def pause(self) -> None:
        """End a turn."""
        self._own = [generator.get_state() for generator in self._generators]
        deque(self._restore(), 0)
        EXCLUSIVE.release()

    def remember(self) -> Iterator[Any]:
        """Keep the states that are there. What is returned puts back those that were kept last."""
        self._outside[:] = [generator.get_state() for generator in self._generators]
        return self._restore()

    def put(self) -> None:
        """Put its own states in place."""
        for i, generator in enumerate(self._generators):
            if self._own is None:
                self._first.append(generator.manual_seed(self._seed).get_state())
            else:
                generator.set_state(self._own[i])

    def _restore(self) -> Iterator[Any]:
        put: Any = operator.call
        return map(put, [generator.set_state for generator in self._generators], self._outside)

    def has_drawn(self) -> bool:
        """Whether something was drawn."""
        return self._own is not None and not all(map(torch.equal, self._own, self._first))


@final
class KeptGenerators(OwnGenerators):
    """Those of the slot in the calling thread: what it finds there, and leaves."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)

    def renew(self, seed: int) -> None:
        """It goes on."""

    def resume(self) -> None:
        if self._own is not None:
            with EXCLUSIVE.held():
                for generator, state in zip(self._generators, self._own, strict=True):
                    generator.set_state(state)

    def pause(self) -> None:
        with EXCLUSIVE.held():
            self._own = [generator.get_state() for generator in self._generators]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those that a function on a device draws from."""
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        generators.append(torch.get_device_module(device).default_generators[device.index])
    return generators


def bookmark(devices: Collection[torch.device]) -> Callable[[], None]:
    """Where the generators are now; the function goes back there, as if nothing had been drawn meanwhile.

    Where others draw from them at the same time nothing can be repeated, and it does nothing.
    """
    participant = this_participant()
    is_shared = is_beside_others() and (participant is None or not participant.belongings)
    if is_shared or torch_private.len_torch_dispatch_stack() or _is_capturing(devices):
        return stay
    generators = [torch.default_generator]
    for device in devices:
        generators += _on_accelerator(device)
    before = _states(generators)
    if not before:
        return stay

    def go_back() -> None:
        with EXCLUSIVE.held(), torch_private.without_transforms():
            deque(map(torch.Generator.set_state, generators, before), 0)

    return go_back


def stay() -> None:
    """What goes nowhere."""


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states; none if another thread has the lock."""
    states: list[torch.Tensor] = []
    read = partial(states.__iadd__, map(torch.Generator.get_state, generators))
    steps = [read] if LENT.get() else [partial(EXCLUSIVE.lock.acquire, False), read, EXCLUSIVE.lock.release]
    if torch_private.is_transformed():  # inside one a state has no memory to read
        with torch_private.without_transforms():
            all(map(operator.call, steps))
    else:
        all(map(operator.call, steps))  # one call of C, which no interrupt comes into; it ends at what returns False
    return states


def _on_accelerator(device: torch.device) -> Sequence[torch.Generator]:
    """The generator of a device, if there is one that has been used."""
    if device.type in ("cpu", "meta"):
        return ()
    index = device.index or 0
    return getattr(torch.get_device_module(device), "default_generators", ())[index : index + 1]


def _is_capturing(devices: Collection[torch.device]) -> bool:
    """Whether a graph is being captured, in which nobody may ask a generator for its state."""
    return "cuda" in [device.type for device in devices] and torch.cuda.is_current_stream_capturing()
