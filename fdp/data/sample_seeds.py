"""The generators that a dataset draws from, of the whole process: torch's of the CPU, Python's, and numpy's."""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from fdp._execution.generators import put_states, states_of
from fdp._execution.guards import refuse_beside
from fdp._execution.process_lock import exclusively

Result = TypeVar("Result")


def keeping_generators(call: Callable[[], Result]) -> Result:
    """What a call that seeds them returns; they are as before afterwards. No seeded shard runs meanwhile."""
    refuse_beside("a dataset or collate_fn that is seeded")
    with exclusively():
        restore = _remembered()
        try:
            return call()
        finally:
            restore()


def seed_generators(seed: int) -> None:
    """Seed them all, in some microseconds: `torch.manual_seed` would look for accelerators as well."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed ^ seed >> 32) & 0xFFFFFFFF)  # it takes 32 bits; a list of more takes ten times as long


def _remembered() -> Callable[[], None]:
    """Puts back the states that are there now."""
    own, state, numpy = [torch.default_generator], random.getstate(), sys.modules.get("numpy")
    restores: list[Callable[[], Any]] = [partial(put_states, own, states_of(own)), partial(random.setstate, state)]
    if numpy is not None:
        restores.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for put in restores:
            put()

    return restore
