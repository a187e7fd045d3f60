"""The lock of the process: who has it does what cannot go on in two threads.

That is to draw with a seed from torch's generators, and to call a module in place. One lock for both: with two of them
two threads could wait for each other. It belongs to a tree of nested calls, whose slots take turns, and goes with the
baton; a thread that is in no call is a tree of its own. Who has it waits for nobody but slots of its own tree.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from fdp._execution.baton import HERE, Holder
from fdp._trees.uninterrupted import at_once

_LOCKS = [threading.Lock()]  # a thread may release it that has not taken it


def _holder() -> Holder:
    return HERE.holder if HERE.strand is None else HERE.strand.tree.holder


def is_held_here() -> bool:
    """Whether this thread has it, or one that waits for this one."""
    return _holder().count > 0


class Hold:
    """One hold of it. Slots of one tree may leave theirs in any order: the last one releases the lock."""

    def __init__(self) -> None:
        self._holder, self._taken = _holder(), list[None]()

    def take(self) -> None:
        """Wait for it; an interrupt ends the wait."""
        before = self._holder.count
        steps: list[Any] = [] if before else [_LOCKS[0].acquire]
        at_once(*steps, partial(setattr, self._holder, "count", before + 1), partial(self._taken.append, None))()

    def leave(self) -> None:
        """Have it no more. To be called again if an interrupt came in it."""
        if self._taken:
            left = self._holder.count - 1
            steps: list[Any] = [] if left else [_LOCKS[0].release]
            at_once(self._taken.clear, partial(setattr, self._holder, "count", left), *steps)()


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    """Have it meanwhile."""
    hold = Hold()
    try:
        hold.take()
        yield
    finally:
        try:
            hold.leave()
        except BaseException:
            hold.leave()
            raise


def _renew() -> None:
    """In a forked child the thread that had it may not be there."""
    _LOCKS[0] = threading.Lock()
    _holder().count = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
