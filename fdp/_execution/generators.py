"""Random generators that a slot has to itself while it has its turn; torch has one of the CPU for all threads."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from fdp._trees import torch_private
from fdp._trees.uninterrupted import at_once


def states_of(generators: Sequence[torch.Generator]) -> list[torch.Generator]:
    """Their states, as generators that nobody draws from.

    Not as tensors: torch holds a lock of a generator while it makes the tensor of its state. The garbage collector may
    run another thread then, and that one may wait for the lock: both would wait for ever.
    """
    return [generator.clone_state() for generator in generators]


def put_states(
    generators: Sequence[torch.Generator], states: Sequence[torch.Generator], *then: Callable[[], Any]
) -> None:
    """Inverse of `states_of`, and `then` what follows: an interrupt comes before all of it or after."""

    def put() -> None:
        pairs = zip(generators, [state.get_state() for state in states], strict=True)
        at_once(*[partial(generator.set_state, state) for generator, state in pairs], *then)()

    torch_private.outside_transforms(put)  # inside, tensors have no memory to read


def device_generators(kind: str) -> Sequence[torch.Generator]:
    """Those of all accelerators of a type."""
    if kind == "mps":  # there is one, and torch.mps has no `default_generators`
        return [torch_private.mps_generator()]
    return getattr(torch.get_device_module(kind), "default_generators", ())  # not every backend has them


def check_same_numbers(devices: Iterable[torch.device], where: str) -> None:
    """Raise if a seed gives other numbers on some of the devices: on a GPU they depend on its size."""
    kinds = {_numbers(device): device for device in dict.fromkeys(devices)}
    if len(kinds) > 1:
        each = ", ".join(f"{device} ({', '.join(map(str, kind))})" for kind, device in kinds.items())
        raise ValueError(
            f"{where}: randomness='rows' needs devices that draw the same numbers, and these differ: {each}. Take "
            "GPUs of one model, or randomness='different'"
        )


def _numbers(device: torch.device) -> tuple[Any, ...]:
    """What numbers depend on, besides the seed."""
    kind = generators_of(device)[-1].device.type
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)  # not every backend has it
    if ask is None or device.type in ("cpu", "meta"):
        return (kind,)
    properties = ask(device)
    return kind, properties.name, getattr(properties, "multi_processor_count", None)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those that a function on a device draws from."""
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        generators.append(device_generators(device.type)[device.index or 0])
    return generators


class OwnGenerators:
    """The generators of a slot, in place of the process's while it has its turn: a `TurnState`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generators = generators_of(device)
        self._own = [torch.Generator(generator.device).manual_seed(seed) for generator in self._generators]
        self._outside: Sequence[torch.Generator] = ()  # what was there before, while its own are

    def resume(self) -> None:
        """Keep the states that are there, and put its own in place."""
        self._outside = states_of(self._generators)
        put_states(self._generators, self._own)

    def pause(self) -> None:
        """Put those back that were there."""
        if self._outside:
            self._own = states_of(self._generators)
            put_states(self._generators, self._outside, partial(setattr, self, "_outside", ()))
