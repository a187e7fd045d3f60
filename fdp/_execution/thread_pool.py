"""Threads for slots that meet, which stay for later calls, and the numbers that autograd gives to what they record.

A backward takes the node with the highest number first, and each thread counts for itself. So that sums have the same
order, and the same bits, in each run, the threads of a call begin with the same number, and its caller is above them by
more than a slot records. Numbers below `FLOOR` are for what slots meet in, inside torch.func.
"""

import contextlib
import contextvars
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue

import torch

from fdp._trees import torch_private

FLOOR = 8192
_ABOVE = 8192  # by how much a caller is above its slots
_MOST = 2**16  # nodes that are made at once
_BEGINNING = torch.zeros(0, device="cpu", requires_grad=True)

Body = Callable[[], None]


class SlotThread:
    """A thread that waits for the next thing to do. `number` is that of the next node that it records.

    It ends when nobody refers to this object any more: an interrupt may have come just when a call took it.
    """

    def __init__(self, slot: int) -> None:
        self.jobs: SimpleQueue[Body | None] = SimpleQueue()
        self.slot, self.number = slot, 0
        try:
            thread = threading.Thread(target=_serve, args=(self.jobs,), name="fdp-slot", daemon=True)
            # From a Python without its lock it would get a copy of this context, and keep alive all that is in it.
            contextvars.Context().run(thread.start)
        except BaseException:  # an interrupt, whose traceback would keep this object and so the thread
            self.__del__()
            raise

    def __del__(self) -> None:
        self.jobs.put(None)


def _serve(jobs: "SimpleQueue[Body | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps nothing alive


IDLE: dict[int, list[SlotThread]] = defaultdict(list)
"""Of each slot: in calls that follow each other it has the same thread, for which libraries have tuned kernels."""


def above_slots(number: int = FLOOR) -> None:
    """Let this thread, which makes calls, be above slots that have come to a number."""
    if torch_private.get_sequence_nr() < number + _ABOVE and torch.is_grad_enabled():
        advance(number + _ABOVE)


def common_number(slots: range) -> int:
    """What the threads of slots can begin with, below this one: new ones with the lowest."""
    most = torch_private.get_sequence_nr() - _ABOVE
    numbers = [max([t.number for t in list(IDLE[slot]) if t.number <= most], default=0) for slot in slots]
    return max([FLOOR, *numbers]) if all(numbers) else FLOOR


def take_thread(slot: int, number: int) -> SlotThread:
    """One that has not come further than that number."""
    idle = IDLE[slot]
    for thread in sorted(idle, key=lambda thread: -thread.number):  # those behind are for callers that are behind
        if thread.number <= number:
            with contextlib.suppress(ValueError):  # another call was faster
                idle.remove(thread)
                return thread
    with contextlib.suppress(IndexError):
        idle.pop()  # ends one that has come too far: numbers do not go back
    return SlotThread(slot)  # or there can be no more threads: RuntimeError


def leave(thread: SlotThread) -> None:
    """This thread has nothing more to do. Called by itself."""
    thread.number = torch_private.get_sequence_nr()
    IDLE[thread.slot].append(thread)


def advance(number: int) -> None:
    """Let the next node of this thread have at least that number."""
    if torch_private.get_sequence_nr() >= number:
        return
    torch_private.outside_transforms(lambda: _record_until(number))


@torch.inference_mode(False)
def _record_until(number: int) -> None:
    with torch.enable_grad():
        while (missing := number - torch_private.get_sequence_nr()) > 0:
            some = _BEGINNING.neg()
            if missing > 1:
                torch_private.foreach_zero_([some] * min(missing - 1, _MOST))


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    IDLE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
