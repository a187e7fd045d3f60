"""What a shard sees of its surroundings: its place among the slots, and the state it must not leak to the others.

A shard runs in a copy of its caller's context, so what is noted in context variables ends with it, and reaches the
threads that run nested calls. A thread that the function starts itself has none of it, unless it copies the context.
"""

import contextlib
import contextvars
import dataclasses
import operator
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fdp._trees import torch_private
from fdp._trees.at_once import at_once
from fdp._trees.profiling import NOTHING, stage


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a running shard: which one of how many, its rows, its device, and which piece of it runs."""

    index: int
    count: int
    rows: range | None
    device: torch.device
    axis_name: str
    piece: int | None = None

    def __str__(self) -> str:
        piece = "" if self.piece is None else f", microbatch {self.piece}"
        rows = "" if self.rows is None else f", rows {self.rows.start}:{self.rows.stop}"
        axis = "" if self.axis_name == "data" else f" of axis {self.axis_name!r}"
        return f"in shard {self.index} of {self.count}{axis}{piece}{rows}, on {self.device}"


ON_SHARD: contextvars.ContextVar[Callable[[Slot, str], None] | None]
ON_SHARD = contextvars.ContextVar("fdp_on_shard", default=None)  # called "before" and "after" each shard, by tests
IN_PLACE = contextvars.ContextVar("fdp_in_place", default=False)  # a user's module has other tensors than its own


class Axis(NamedTuple):
    """A named set of slots that this code runs in one of, the run in which they meet, and the thread of this slot."""

    slot: Slot
    run: Any
    thread: int


AXES: contextvars.ContextVar[tuple[Axis, ...]] = contextvars.ContextVar("fdp_axes", default=())  # the innermost last


def is_forked(process: int) -> bool:
    """Whether this is a child of the process with that id."""
    return os.getpid() != process


def check_process(process: int, where: str = "fdp") -> None:
    """Raise in a child that a shard of a call has forked."""
    if is_forked(process):
        raise RuntimeError(
            f"{where}: this process was forked inside a shard, and the other shards of the call are not in it. "
            "It can make calls of its own. End it with os._exit, as multiprocessing does"
        )


def start_apart(thread: threading.Thread) -> None:
    """Start a thread that stays, with no context of its own.

    From a Python without its lock it would get a copy of that of its caller, and keep alive all that is in it.
    """
    contextvars.Context().run(thread.start)


def current_slot() -> Slot | None:
    """The slot that this code runs in, innermost call first; None outside of mapped functions."""
    # A traced function cannot read context variables.
    axes = () if torch.compiler.is_compiling() else AXES.get()
    return axes[-1].slot if axes else None


def run_in_slot(
    slot: Slot, call: Callable[[], Any], run: Any = None, context: contextvars.Context | None = None
) -> Any:
    """Run a shard in a copy of the caller's context, with its slot's device as the current one of its type.

    Its slots meet in a `run`.
    """
    if torch.compiler.is_compiling():
        return call()
    return (context or contextvars.copy_context()).run(_enter, slot, call, run)


def _enter(slot: Slot, call: Callable[[], Any], run: Any) -> Any:
    AXES.set((*AXES.get(), Axis(slot, run, threading.get_ident())))
    has_grad, watcher = torch.is_grad_enabled(), ON_SHARD.get()
    # What a function leaves of grad mode ends with its shard: the next one sees what the caller set.
    restore = at_once(
        partial(torch_private.set_grad_enabled, has_grad),
        partial(torch_private.set_multithreading_enabled, torch_private.is_multithreading_enabled()),
    )
    try:
        # Backwards inside stay in this thread: those of autograd's own know no slots.
        torch_private.set_multithreading_enabled(False)
        device, named = _current_device(slot.device), stage("shard", slot.index)
        if device is named is NOTHING and watcher is None:
            return call()
        with device, named:
            if watcher is None:
                return call()
            watcher(slot, "before")
            result = call()
            watcher(slot, "after")
            return result
    finally:
        restore()


def text_of(error: BaseException) -> str:
    """What an exception says, if it can say something."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its text raises {type(broken).__name__})"


def fold_in(seed: int, data: int) -> int:
    """A new seed from a seed and a number, such that different numbers give unrelated streams.

    >>> import fdp
    >>> fdp.fold_in(0, 1) == fdp.fold_in(0, 1), fdp.fold_in(0, 1) == fdp.fold_in(0, 2)
    (True, False)

    Args:
        seed: Any integer; it counts modulo 2**64.
        data: Any integer, likewise: the number of a slot, of a step, of an epoch.

    Returns:
        An integer in `[0, 2**63)`, for `torch.manual_seed` and the like.

    Raises:
        TypeError: A float, or something else that is no integer.

    The mixing is SplitMix64's (Steele, Lea and Flood, 2014); the name and use are `jax.random.fold_in`'s.
    """
    return _mix(_mix(operator.index(seed) & _MASK) ^ (operator.index(data) & _MASK)) >> 1


_MASK = (1 << 64) - 1


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type in ("cpu", "meta"):
        return NOTHING
    if not 0 <= (device.index or 0) < torch.accelerator.device_count():
        return NOTHING  # under FakeTensorMode there may be devices that do not exist
    return torch.accelerator.device_index(device.index)
