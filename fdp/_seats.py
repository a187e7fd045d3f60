"""Threads that stay, one for each slot that runs beside others that it may meet."""

import contextlib
import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[SimpleQueue[Any]] = []


_POOL = _Pool()


@contextlib.contextmanager
def seats(count: int) -> Iterator[list["SimpleQueue[Any]"]]:
    """Threads for a call: the same one for the same slot, unless calls overlap.

    Autograd orders a backward by numbers that each thread counts for itself.
    """
    pool = _POOL
    taken: list[SimpleQueue[Any]] = []
    try:
        with pool.lock:
            for _ in range(count):
                taken.append(pool.idle.pop() if pool.idle else _start())
        yield taken
    finally:
        with pool.lock:
            pool.idle.extend(reversed(taken))


def _start() -> "SimpleQueue[Any]":
    jobs: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(jobs,), name="fdp-slot", daemon=True).start()
    return jobs


def _serve(jobs: "SimpleQueue[Any]") -> None:
    while True:
        serve, index, context = jobs.get()
        serve(index, context)
        del serve, context  # an idle thread keeps nothing alive


def _renew() -> None:
    global _POOL
    _POOL = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
