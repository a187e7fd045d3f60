"""Threads that stay: they help callers with their shards, and none is started where there are enough."""

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from fdp._placement.slot import run_in_thread

Job = Callable[[], None]


@final
class _Pool:
    """The workers of a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.workers: set[int | None] = set()  # their idents
        self.lanes: dict[object, tuple[int, int]] = {}  # of each call: who called, and how many threads run its shards


_POOL = _Pool()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve(call: object, wanted: int, most: int) -> int:
    """Reserve up to `wanted` workers for a call, such that at most `most` threads run shards; return how many."""
    pool, me = _POOL, threading.get_ident()
    with pool.lock:
        lanes = list(pool.lanes.values())  # at once: others end theirs without the lock
        callers, taken = {caller for caller, _ in lanes}, sum(count for _, count in lanes)
        own = 0 if me in callers | pool.workers else 1  # one that runs a shard already has been counted
        count = max(0, min(wanted, most - own - taken))
        count = _start(pool, taken - len(callers - pool.workers), count)
        pool.lanes[call] = me, own + count
    return count


def releasing(call: object) -> Callable[[], object]:
    """What ends the reservation of a call, if it has one: a function of C, which no interrupt comes before or into."""
    return functools.partial(_POOL.lanes.pop, call, None)


def post(job: Job, count: int) -> None:
    """Have `count` workers run a job, which must not raise."""
    for _ in range(count):
        _POOL.jobs.put(job)


def _start(pool: _Pool, helping: int, more: int) -> int:
    """Start threads until `more` are free besides those that help already; how many of these there are."""
    try:
        while len(pool.workers) < helping + more:
            # Daemons: an idle one must not keep the interpreter from ending, and none is left in the middle of a
            # shard unless its caller is a daemon itself.
            worker = threading.Thread(target=_serve, args=(pool,), name="fdp-worker", daemon=True)
            worker.start()
            pool.workers.add(worker.ident)
    except RuntimeError:  # no more threads, or the interpreter is about to end: the caller does it alone
        return len(pool.workers) - helping
    return more


def _serve(pool: _Pool) -> None:
    pool.workers.add(threading.get_ident())  # here too: an interrupt may come before the one who started it has done so
    process = os.getpid()
    while True:
        job = pool.jobs.get()
        run_in_thread(job, process)
        del job  # an idle worker keeps nothing alive


def _renew() -> None:
    """A forked child has none of its parent's threads, and perhaps a lock that one of them held."""
    global _POOL
    _POOL = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
