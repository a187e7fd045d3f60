"""Threads for slots that meet, which stay for later calls, and the numbers that autograd gives to what they record.

A backward takes the node with the highest number first, and each thread counts for itself. So that sums have the same
order, and the same bits, in each run, the threads of a call begin with the same number, and its caller is above them by
more than a slot records. Numbers below `FLOOR` are for what slots meet in, inside torch.func.
"""

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

import torch

from fdp._trees import torch_private
from fdp._trees.at_once import at_once

FLOOR = 8192
_ABOVE = 8192  # by how much a caller is above its slots
_MOST = 2**16  # nodes that are made at once
_BEGINNING = torch.zeros(0, device="cpu", requires_grad=True)

Body = Callable[[], None]


class SlotThread:
    """A thread that waits for the next thing to do. `number` is that of the next node that it records.

    `slot` is the one that it had last: kernels that a library has tuned for a device are often kept for each thread.

    It ends when nobody refers to this object any more: an interrupt may have come just when a call took it.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Body | None] = SimpleQueue()
        self.number = self.slot = 0
        try:
            thread = threading.Thread(target=_serve, args=(self.jobs,), name="fdp-slot", daemon=True)
            # From a Python without its lock it would get a copy of this context, and keep alive all that is in it.
            contextvars.Context().run(thread.start)
        except BaseException:  # an interrupt, whose traceback would keep this object and so the thread
            self.end()
            raise

    def end(self) -> None:
        self.jobs.put(None)

    __del__ = end


def _serve(jobs: "SimpleQueue[Body | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps nothing alive


_IDLE: list[SlotThread] = []


def above_slots(number: int = FLOOR) -> None:
    """Let this thread, which makes calls, be above slots that have come to a number."""
    if torch_private.get_sequence_nr() < number + _ABOVE and torch.is_grad_enabled():
        advance(number + _ABOVE)


def common_number(count: int) -> int:
    """What so many threads can begin with, below this one: new ones with the lowest."""
    most = torch_private.get_sequence_nr() - _ABOVE
    numbers = sorted(thread.number for thread in list(_IDLE) if thread.number <= most)
    return max(FLOOR, numbers[-1]) if len(numbers) >= count else FLOOR


def take_threads(found: list[SlotThread], slots: range, number: int) -> None:
    """Put a thread for each slot into a list, none of which has come further than that number."""
    count = len(slots)
    _take_idle(found, count, lambda thread: thread.number <= number)
    too_far: list[SlotThread] = []
    _take_idle(too_far, count - len(found), lambda thread: True)
    for thread in too_far:  # numbers do not go back: others take their places
        thread.end()
    while len(found) < count:
        found.append(SlotThread())  # or there can be no more threads: RuntimeError
    found.sort(key=lambda thread: thread.slot)  # in calls that follow each other a slot has the same thread
    for slot, thread in zip(slots, found, strict=True):
        thread.slot = slot


def _take_idle(found: list[SlotThread], count: int, fits: Callable[[SlotThread], bool]) -> None:
    for thread in sorted(_IDLE, key=lambda thread: -thread.number):  # those behind are for callers that are behind
        if len(found) < count and fits(thread):
            with contextlib.suppress(ValueError):  # another call was faster
                at_once(partial(_IDLE.remove, thread), partial(found.append, thread))()


def let_go(threads: Iterable[SlotThread]) -> None:
    """They have not begun anything."""
    _IDLE.extend(threads)


def leave(thread: SlotThread) -> None:
    """This thread has nothing more to do. Called by itself."""
    thread.number = torch_private.get_sequence_nr()
    _IDLE.append(thread)


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
    _IDLE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
