"""What a shard sees of its surroundings: its place among the slots, and the state it must not leak to the others.

A shard runs in a copy of its caller's context, so what is noted in context variables ends with it, and reaches the
threads that run nested calls. A thread that the function starts itself has none of it, unless it copies the context.

Here is also the lock of the process, `EXCLUSIVE`. What holds at any time:

- One thread holds it, as often as it likes, while it does what cannot go on in two threads: draw from generators with a
  seed, read their states, call a module in place, use forward mode in a shard.
- It is the outermost lock of fdp: none is held by a thread that begins to wait for it, and code of the user's runs
  under it. Who wants to be alone among the shards of a call says so before (`alone.be_alone`), without it.
- Who holds it waits only for threads that work for it: the slots of a call inside, which have it lent (`LENT`). They
  take turns, one at a time, so one thread of these uses it at a time.
- A forked child has a new one. The thread that held it may not be there.

Any thread may take it. `held` gives the RLock itself, whose enter and exit are C; what lends it is told by `is_here`.
What was refused: a lock for each of these things. A shard may need several of them, and takes them in the order in
which the function comes to them, so two threads would wait for each other.
"""

import contextlib
import contextvars
import dataclasses
import operator
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch

from fdp._trees import torch_private
from fdp._trees.profiling import NOTHING, stage
from fdp._trees.untraced import leave_alone


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
IN_ORDER = contextvars.ContextVar("fdp_in_order", default=False)  # calls here may not use threads: a lock is held


class Axis(NamedTuple):
    """A named set of slots that this code runs in one of, and where they meet if they are all alive.

    If not, the call notes in `wanted` which collectives the slot has come to.
    """

    slot: Slot
    rendezvous: Any
    wanted: list[str]


@final
class Calls:
    """How many calls a slot has made, those that begin anew twice: a number that is the same in all slots."""

    def __init__(self, path: tuple[int | None, ...]) -> None:
        self.path, self.count = path, 0


CALLS: contextvars.ContextVar[Calls | None] = contextvars.ContextVar("fdp_calls", default=None)
WANTED: contextvars.ContextVar[list[str]] = contextvars.ContextVar("fdp_wanted")  # that of the axis of the next slots
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


def run_in_thread(job: Callable[[], None], process: int) -> None:
    """What a thread of fdp does. In a child that the job has forked there is nothing else than this thread."""
    try:
        job()
    except BaseException:
        if not is_forked(process):
            raise
        traceback.print_exc()
        os._exit(1)


def current_slot() -> Slot | None:
    """The slot that this code runs in, innermost call first; None outside of mapped functions."""
    # A traced function cannot read context variables.
    axes = () if torch.compiler.is_compiling() else AXES.get()
    return axes[-1].slot if axes else None


def run_in_slot(
    slot: Slot,
    call: Callable[[], Any],
    context: contextvars.Context | None = None,
    rendezvous: Any = None,
) -> Any:
    """Run a shard in a copy of the caller's context, with its slot's device as the current one of its type."""
    if torch.compiler.is_compiling():
        return call()
    return (context or contextvars.copy_context()).run(_enter, slot, call, rendezvous)


def _enter(slot: Slot, call: Callable[[], Any], rendezvous: Any) -> Any:
    around = CALLS.get()
    CALLS.set(Calls((slot.piece,) if around is None else (*around.path, around.count, slot.piece)))
    wanted = WANTED.get(None)
    AXES.set((*AXES.get(), Axis(slot, rendezvous, [] if wanted is None else wanted)))
    has_grad, watcher = torch.is_grad_enabled(), ON_SHARD.get()
    try:
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
        # What a function leaves of grad mode ends with its shard: the next one sees what the caller set.
        torch_private.set_grad_enabled(has_grad)


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


@final
class ProcessLock:
    """A lock that one thread may take several times, and that a forked child has anew, whoever holds it here."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()

    def acquire(self) -> None:
        """Wait for it."""
        if not LENT.get():
            self.lock.acquire()

    def release(self) -> None:
        """Let others have it."""
        if not LENT.get():
            self.lock.release()

    def is_here(self) -> bool:
        """Whether this thread has it, or one that waits for this thread."""
        return LENT.get() or self.lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]

    def held(self) -> contextlib.AbstractContextManager[object]:
        """The lock itself: a context manager in Python could keep it if an interrupt comes as it is entered."""
        return contextlib.nullcontext() if LENT.get() else self.lock


LENT = contextvars.ContextVar("fdp_lent", default=False)  # this thread may do what a thread may that waits for it
EXCLUSIVE = ProcessLock()
"""Held by what cannot go on in two threads: draws from torch's generators, calls of a module in place, forward mode.

One lock for all, so that no two threads can wait for each other's. Who holds it waits only for threads that work for
it: see `fdp._execution.scheduler`.
"""


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


leave_alone(globals(), ["run_in_slot"])
