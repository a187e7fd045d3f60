"""Threads that stay, one for each slot that runs beside others that it may meet.

Which of them are at work stands in one dict. A call enters its jobs there and hands them over in one step, which no
interrupt can cut in two; each thread takes its own out again. So there is nothing that a caller gives back.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any, final

from fdp._placement.slot import run_in_thread


@final
class Job:
    """What a thread does for a call; `over` is called when the thread is free again."""

    def __init__(self, run: Callable[[], None], over: Callable[[], None]) -> None:
        self.run, self.over = run, over


@final
class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seats: list[SimpleQueue[Job]] = []
        self.busy: dict[SimpleQueue[Job], Job] = {}


_POOL = _Pool()


def begin(jobs: Sequence[Job]) -> None:
    """Run each job in a thread of its own: the same one for the same place, unless calls overlap.

    Autograd orders a backward by numbers that each thread counts for itself. If an interrupt comes, all jobs have begun
    or none.
    """
    pool = _POOL
    with pool.lock:
        while len(free := [seat for seat in pool.seats if seat not in pool.busy]) < len(jobs):
            _start(pool)
        # No signal handler runs within one call of C.
        deque(chain(map(pool.busy.__setitem__, free, jobs), map(SimpleQueue.put, free, jobs)), 0)


def is_any_at_work(jobs: Sequence[Job]) -> bool:
    """Whether some of the jobs have begun and are not over."""
    return not set(jobs).isdisjoint(list(_POOL.busy.values()))


def _start(pool: _Pool) -> None:
    ready: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(pool, ready), name="fdp-slot", daemon=True).start()
    ready.get()


def _serve(pool: _Pool, ready: "SimpleQueue[Any]") -> None:
    seat: SimpleQueue[Job] = SimpleQueue()
    pool.seats.append(seat)  # here, where no interrupt comes before it
    ready.put(None)
    process = os.getpid()
    while True:
        job = seat.get()
        run_in_thread(job.run, process)
        over = job.over
        del job, pool.busy[seat]  # an idle thread keeps nothing alive
        over()
        del over


def _renew() -> None:
    global _POOL
    _POOL = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
