"""Operations of torch.distributed: waiting for them, who is late, and leaving what is underway behind."""

import contextlib
import ctypes
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist

T = TypeVar("T")
_SLICE = 1.0  # seconds for which Python cannot look at signals
_ASKING = "fdp-store"  # the thread that asks the store of a group
_UNDERWAY: dict[Any, Any] = {}
"""Operations, and the group of each."""
_STARTED: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""How many operations each group has begun: in all processes as many."""

_LEFT: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Groups in which this process has left an operation before its end, and does not know where the others are."""


@final
class PendingOperation:
    """One that all processes of a group take part in, once each has come to it. On the CPU, of gloo."""

    def __init__(self, start: Callable[[], Any], group: Any, ranks: Sequence[int], rank: int) -> None:
        self._group: Any = group or dist.group.WORLD
        self._ranks, self._rank = ranks, rank
        for work in [work for work in list(_UNDERWAY) if work.is_completed()]:  # nobody has waited for it
            _UNDERWAY.pop(work, None)
        self._number = _STARTED[self._group] = _STARTED.get(self._group, 0) + 1
        self._work: Any = start()
        _UNDERWAY[self._work] = self._group

    def wait(self, limit: datetime.timedelta, meanwhile: Callable[[], None] | None = None) -> None:
        """Until all have come. Ctrl-C is heard meanwhile."""
        part = datetime.timedelta(seconds=_slice(limit))
        has_said = False
        while not self._work.is_completed():
            with contextlib.suppress(RuntimeError):  # the part is over, or it has failed, which `wait` says below
                self._work.wait(part)
                continue
            if self._work.is_completed():
                break
            if not has_said:
                self._say()
                has_said = True
            if meanwhile is not None:
                meanwhile()
        _UNDERWAY.pop(self._work, None)
        self._work.wait()

    def who(self, limit: datetime.timedelta) -> str:
        """Which of the others have come, as far as that is known; after a failure."""
        others = [rank for rank in self._ranks if rank != self._rank]
        absent = self._absent(others, limit) if len(others) > 1 else None
        if absent is None:
            return ""
        came = [rank for rank in others if rank not in absent]
        each = [f"process {_list(absent)} had not come"] * bool(absent) + [f"process {_list(came)} had"] * bool(came)
        return f": {', '.join(each)}"

    def late(self, limit: datetime.timedelta) -> str | None:
        """Who is waited for, as far as that is known; None if nobody is any more."""
        others = [rank for rank in self._ranks if rank != self._rank]
        absent = self._absent(others, limit)
        if self._work.is_completed():
            return None
        if absent is None:
            return f"process {_list(others)}. Which of them have come is not known, since the store does not answer"
        if not absent:
            return f"process {_list(others)}. All have come, and the operation has not ended"
        came = [rank for rank in others if rank not in absent]
        return f"process {_list(absent)}" + f". Process {_list(came)} has come" * bool(came)

    def _absent(self, others: list[int], limit: datetime.timedelta) -> list[int] | None:
        """Those that have not said that they wait here, None if nobody can tell."""
        patience = _slice(limit)  # for those that came a moment ago
        self._say()

        def look(store: Any) -> list[int]:
            end, missing = time.monotonic() + patience, others
            while missing and time.monotonic() < end:
                time.sleep(patience / 10)
                missing = [rank for rank in missing if _said(store, rank) < self._number]
            return missing

        return _asked(self._group, look, 2 * patience)

    def _say(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.get_group_store().set(f"fdp/{self._rank}", str(self._number))


def leave_off(group: Any) -> None:
    """This process has left an operation of a group before its end."""
    if group is not None:
        _LEFT.add(group)


def has_been_left(group: Any) -> bool:
    """Whether it has done so before."""
    return group in _LEFT


def _said(store: Any, rank: int) -> int:
    """For which operation a process has said that it waits, 0 if for none."""
    key = f"fdp/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def _asked(group: Any, ask: Callable[[Any], T], patience: float) -> T | None:
    """What the store of a group says, None if it does not answer.

    In a thread, with a connection of its own: a store whose process has stopped never answers, and is asked no more.
    """
    if any(thread.name == _ASKING for thread in threading.enumerate()):
        return None
    found: list[T] = []

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone, with the process that has it
            found.append(ask(group.get_group_store().clone()))

    thread = threading.Thread(target=look, name=_ASKING, daemon=True)
    thread.start()
    thread.join(patience)
    return found[0] if found else None


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _slice(limit: datetime.timedelta) -> float:
    return min(_SLICE, limit.total_seconds() / 4)


def leave(group: Any = None) -> None:
    """Destroy a group, by default that of all processes, without waiting for what is underway."""
    for work, own in list(_UNDERWAY.items()):
        if group is not None and own is not group:
            continue
        _UNDERWAY.pop(work, None)
        if not work.is_completed():
            for kept in (work, own):  # until the process ends: who destroys them waits, for as long as the limit allows
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    dist.destroy_process_group(group)


def leave_at_exit(group: "weakref.ref[Any]", process: int) -> None:
    """Destroy the group that `init` made, if nobody has.

    A thread of gloo may let go of an operation while Python ends, which aborts the process.
    """
    if group() is not None and group() is dist.group.WORLD and os.getpid() == process:
        leave()
