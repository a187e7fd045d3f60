"""The lock of the process: who has it does what cannot go on in two threads.

That is to draw with a seed from torch's generators, and to call a module in place. One lock for both: with two of them
two threads could wait for each other. It belongs to a tree of nested calls, whose slots take turns, and goes with the
baton; a thread that is in no call is a tree of its own. Who has it waits for nobody but slots of its own tree.
"""

import contextlib
import operator
import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from fdp._execution.baton import HERE, Holder

_LOCKS = [threading.Lock()]  # a thread may release it that has not taken it


def _holder() -> Holder:
    return HERE.holder if HERE.strand is None else HERE.strand.tree.holder


def is_held_here() -> bool:
    """Whether this thread has it, or one that waits for this one."""
    return _holder().count > 0


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    """Have it meanwhile. Slots of one tree may leave it in any order: the last one releases it."""
    holder, taken = _holder(), list[None]()
    try:
        before = holder.count
        take: list[Any] = [] if before else [_LOCKS[0].acquire]
        _at_once([*take, partial(setattr, holder, "count", before + 1), partial(taken.append, None)])
        yield
    finally:
        if taken:
            left = holder.count - 1
            leave: list[Any] = [] if left else [_LOCKS[0].release]
            _at_once([taken.clear, partial(setattr, holder, "count", left), *leave])


def _at_once(steps: list[Any]) -> None:
    """In one call of C: no interrupt comes between, but for one that ends the wait for the lock."""
    deque(map(operator.call, steps), 0)


def _renew() -> None:
    """In a forked child the thread that had it may not be there."""
    _LOCKS[0] = threading.Lock()
    _holder().count = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
