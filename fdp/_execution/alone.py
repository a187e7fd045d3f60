"""Which shards of a call run side by side, and how one of them goes on alone where they cannot begin anew.

What holds at any time:

- A shard stands in `threads` while it runs. Shards come and go without a lock as long as nobody wants to be alone.
- Who comes says so, and then looks whether somebody is alone. Who wants to be alone says so, and then looks who is
  there. So at least one of the two sees the other, and waits.
- Of those that want to be alone the first goes on, when all others that run want it too. The next one follows when it
  has ended. Nobody else begins before all of them have ended.
- A shard that has ended wants nothing any more. Threads that its function has started and that ask for it return at
  once.

`be_alone` is called in a shard, in front of what only one thread can use. `begin` and `end` are called by the thread of
a shard, `end` also by a caller that was interrupted, and more than once. `leave` is called in a shard, or by a thread
that it has started. `_lock` is held for looks and changes only, and no other lock is taken inside of it. The main
thread waits in it by shielded work: an interrupt would leave a condition half taken.
"""

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from typing import final

from fdp._execution.interrupts import shielded
from fdp._execution.scheduler import PARTICIPANT

BESIDE: "contextvars.ContextVar[tuple[Callable[[], None], ...]]" = contextvars.ContextVar("fdp_beside", default=())
"""How the shard here leaves those beside it, and the shards around the call those beside them, the innermost first."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: BESIDE.set(()))  # those beside it are not there


def is_beside_others() -> bool:
    """Whether other threads run shards of the calls around this code."""
    return PARTICIPANT.get() is not None or len(BESIDE.get()) > 0


def be_alone() -> None:
    """Return when no other shard runs, and none begins before this one ends; or have the call begin anew."""
    participant, calls = PARTICIPANT.get(), BESIDE.get()
    if participant is not None:  # inside of slots that take turns, no shards run side by side
        participant.alone()
    with participant.without_belongings() if participant is not None and calls else contextlib.nullcontext():
        for leave in calls:
            leave()


@final
class Running:
    """The shards of a call that run, and in which threads."""

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.was_left = False
        self._alone: list[int] = []  # the first is, or will be as soon as nobody else runs; the others follow
        self._lock = threading.RLock()  # what enters and leaves it is C: with a condition's own methods it may be kept
        self._changed = threading.Condition(self._lock)

    def begin(self, number: int) -> None:
        """Called before a shard runs."""
        thread = self.threads[number] = threading.get_ident()
        if self._alone:
            shielded(functools.partial(self._begin_later, number, thread))

    def _begin_later(self, number: int, thread: int) -> None:
        with self._lock:
            del self.threads[number]
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._alone)
            self.threads[number] = thread

    def end(self, number: int) -> None:
        """Called after it, and perhaps again."""
        self.threads.pop(number, None)
        if self._alone:
            with self._lock:
                self._alone[:] = [other for other in self._alone if other != number]
                self._changed.notify_all()

    def leave(self, number: int) -> None:
        """Called by a shard that runs: the others end, or leave too and wait; none begins meanwhile."""
        with self._lock:
            if number not in self.threads:  # it has ended: this is a thread that it has started
                return
            self.was_left = True
            self._alone += [number] if number not in self._alone else []
            self._changed.notify_all()
            self._changed.wait_for(lambda: number not in self._alone or self._is_alone(number))

    def _is_alone(self, number: int) -> bool:
        return self._alone[0] == number and set(self.threads) <= set(self._alone)
