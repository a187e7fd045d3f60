"""Threads that stay: some help callers with their shards, others are slots that meet.

There is one kind of thread. Each has a queue of its own, its seat, in which it waits for jobs without using time.

What holds at any time:

- `busy` names each job that was handed to a seat and is not over. A job is entered and handed over in one call of C, so
  an interrupt finds all jobs of a call begun, or none. Its thread takes it out again, and no caller has to.
- A helper is late if its call is over before it wakes. It finds nothing to do there, so its seat counts as free, and
  the next job waits behind it. Without this, calls that follow each other quickly would start ever more threads.
- `lanes` has an entry for each call that runs shards side by side: who called, and how many threads it may use. The sum
  is at most the number of cores on the CPU. Slots that meet are not counted: all must be alive, and they take turns.
- Slots take the first seats and helpers the last. So a slot comes to the same thread again, unless calls overlap.
  Autograd orders a backward by numbers that each thread counts for itself.
- An idle thread refers to nothing of the last job.

Any thread may call these functions, also one of the pool: then the seat that it has is busy. `lock` is taken where
seats are chosen, perhaps inside of `EXCLUSIVE`, and none is taken inside of it. One thread may take it twice: the
garbage collector may run a finalizer inside of it, which makes a call of its own. That call is over before the outer
one goes on, and its seats are free again. A thread takes the lock for calls of its own, not to come or go. All are
daemons: an idle one must not keep the interpreter from ending, and none is left in the middle of a shard unless its
caller is a daemon itself. A forked child has none of them, and begins with an empty pool and a new lock.

What was refused: one queue for all helpers. It needs no seats, but then a pool for slots has to stand beside it.
"""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any, final

from fdp._placement.slot import run_in_thread, start_apart


@final
class Job:
    """What a thread does; `over` is called when the thread is free again. It helps a `call`, or is a slot."""

    def __init__(
        self, run: Callable[[], None], over: Callable[[], None] | None = None, call: object | None = None
    ) -> None:
        self.run, self.over, self.call = run, over, call


Seat = SimpleQueue[Job]


@final
class _Pool:
    """The threads of a process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.seats: list[Seat] = []
        self.threads: set[int] = set()  # their idents
        self.busy: dict[Job, Seat] = {}
        self.lanes: dict[object, tuple[int, int]] = {}  # of each call: who called, and how many threads run its shards

    def free(self) -> list[Seat]:
        """The seats whose threads have nothing to do, in their order."""
        taken = {seat for job, seat in list(self.busy.items()) if job.call is None or job.call in self.lanes}
        return [seat for seat in self.seats if seat not in taken]

    def hand_over(self, jobs: Sequence[Job], seats: Sequence[Seat]) -> None:
        """Begin all jobs, or none: no signal handler runs within one call of C."""
        deque(chain(map(self.busy.__setitem__, jobs, seats), map(SimpleQueue.put, seats, jobs)), 0)


_POOL = _Pool()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve(call: object, wanted: int, most: int) -> int:
    """Reserve up to `wanted` helpers for a call, such that at most `most` threads run shards; return how many."""
    pool, me = _POOL, threading.get_ident()
    with pool.lock:
        lanes = list(pool.lanes.values())  # at once: others end theirs without the lock
        callers, taken = {caller for caller, _ in lanes}, sum(count for _, count in lanes)
        own = 0 if me in callers | pool.threads else 1  # one that runs a shard already has been counted
        count = max(0, min(wanted, most - own - taken))
        pool.lanes[call] = me, own + count
    return count


def releasing(call: object) -> Callable[[], object]:
    """What ends the reservation of a call, if it has one: a function of C, which no interrupt comes before or into."""
    return functools.partial(_POOL.lanes.pop, call, None)


def post(call: object, run: Callable[[], None], count: int) -> None:
    """Have `count` threads, or as many as there can be, help a call that has reserved them. `run` must not raise."""
    pool = _POOL
    with pool.lock:
        try:
            free = _free(pool, count)
        except RuntimeError:  # no more threads, or the interpreter is about to end: the caller does it alone
            free = pool.free()
        last = free[max(0, len(free) - count) :]
        pool.hand_over([Job(run, call=call) for _ in last], last)


def begin(jobs: Sequence[Job]) -> None:
    """Run each job in a thread of its own: the same one for the same place, unless calls overlap."""
    pool = _POOL
    with pool.lock:
        pool.hand_over(jobs, _free(pool, len(jobs)))


def is_any_at_work(jobs: Sequence[Job]) -> bool:
    """Whether some of the jobs have begun and are not over."""
    return any(job in _POOL.busy for job in jobs)


def is_pooled() -> bool:
    """Whether this thread is one of the pool."""
    return threading.get_ident() in _POOL.threads


def _free(pool: _Pool, count: int) -> list[Seat]:
    """At least so many free seats."""
    while len(free := pool.free()) < count:
        ready: SimpleQueue[Any] = SimpleQueue()
        start_apart(threading.Thread(target=_serve, args=(pool, ready), name="fdp-worker", daemon=True))
        ready.get()
    return free


def _serve(pool: _Pool, ready: "SimpleQueue[Any]") -> None:
    seat: Seat = SimpleQueue()
    pool.threads.add(threading.get_ident())
    pool.seats.append(seat)  # here, where no interrupt comes before it
    ready.put(None)
    process = os.getpid()
    while True:
        job = seat.get()
        run_in_thread(job.run, process)
        over = job.over
        del pool.busy[job], job  # an idle thread keeps nothing alive
        if over is not None:
            over()
        del over


def _renew() -> None:
    """A forked child has none of its parent's threads, and perhaps a lock that one of them held."""
    global _POOL
    _POOL = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
