"""Shards side by side, each in a thread of its own, while the caller waits: what `executor="threads"` asks for.

As many run at once as there are cores, those of all callers together; one that waits for others does not count. Who has
waited for a core for some time goes on without.

What holds at any time:

- Each shard has a thread, whose nodes begin with one number (`thread_pool.py`): sums have the same bits in each run.
- It stands in `_over` when it has ended, and the caller waits until all do. After an interrupt a shard that has not
  begun ends at once, and one that waits ends.
- `_lock` is held while a shard comes to a meeting or ends, and no code of the user's runs in it. The caller, which an
  interrupt may end anywhere, takes no lock.
- Who waits looks again each time its bell rings. If all that have not ended wait for what is not over, they are told.
"""

import contextlib
import contextvars
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, final

import torch

from fdp._execution.baton import HEARS, Stop
from fdp._execution.forks import is_forked
from fdp._execution.guards import BESIDE, install
from fdp._execution.run import Failures, Run, Take, Task
from fdp._execution.thread_pool import SlotThread, above_slots, advance, common_number, leave, take_thread
from fdp._execution.thread_state import ThreadState
from fdp._placement.peers import PeerCall
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.uninterrupted import at_once


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


PATIENCE = 3.0  # seconds
_turns = cache(threading.BoundedSemaphore)  # of so many cores
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.cache_clear)  # those that had a turn are not there


@final
class SideBySide(Run):
    """See above."""

    is_beside = True

    def __init__(self, tasks: Sequence[Task], slots: Sequence[Slot], peers: PeerCall) -> None:
        super().__init__(tasks, slots, peers)
        install()
        above_slots()
        self._before, self._state = torch.get_num_threads(), ThreadState.of_caller([slot.device for slot in slots])
        self._turns: threading.BoundedSemaphore | None = None
        if all(slot.device.type in ("cpu", "meta") for slot in slots):
            self._turns, most = _turns(cores()), min(cores(), len(slots))
            self._state = self._state.with_threads(cores() // most)
        self._context = contextvars.copy_context()
        self._number = common_number(range(self.count))
        self._highest = [self._number]
        self._lock = threading.Lock()
        self._over: list[int] = []
        self._in_turn: set[int] = set()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._open: dict[Any, Any] = {}
        self._bells = [SimpleQueue[None]() for _ in range(self.count + 1)]  # the last is the caller's

    def run(self, take: Take) -> Failures:
        """Run all slots; `take` has the results in order."""
        try:
            self._run_all()
            above_slots(max(self._highest))
            failures = self.outcome()
            if not failures:
                for i, result in enumerate(self.results):
                    take(i, result)
            return failures
        finally:
            self.results = []

    def _run_all(self) -> None:
        error: BaseException | None = None
        begun: list[bool] = []
        try:
            threads = [take_thread(i, self._number) for i in range(self.count)]
            begin = [partial(thread.jobs.put, partial(self._serve, i, thread)) for i, thread in enumerate(threads)]
            at_once(*begin, partial(begun.append, True))()  # all or none
        except BaseException as other:
            if not begun:
                raise
            error = other
        while len(self._over) < self.count:
            try:
                if error is not None:
                    self.stop(error)
                    self._ring()
                    error = None
                with contextlib.suppress(Empty):
                    self._bells[-1].get(timeout=HEARS)
            except BaseException as other:
                error = other
        if error is not None:
            self.stop(error)
            error = None  # no cycle
        if self._state.threads != self._before:  # what a thread sets is also that of threads to come
            torch.set_num_threads(self._before)

    def _serve(self, index: int, thread: SlotThread) -> None:
        try:
            advance(self._number)
            self._take_turn(index)
            self.ended[index] = "was interrupted"
            if self.interrupt is None:
                with self._state.restored():
                    context = self._context.copy()
                    context.run(BESIDE.set, True)
                    self.run_slot(index, context)
        except BaseException as error:
            if is_forked(self.process):  # there is nothing else than this thread
                traceback.print_exc()
                os._exit(1)
            self.errors.setdefault(index, error)
        finally:
            self._end_turn(index)
            self._highest.append(torch_private.get_sequence_nr())
            leave(thread)
            with self._lock:
                self._over.append(index)
                self._give_up()
            self._ring()

    def meet(self, key: Any, index: int, come: Callable[[Any], Callable[[], bool]], make: Callable[[], Any]) -> Any:
        with self._lock:
            self.has_met = True
            meeting = self._open.get(key) or self._open.setdefault(key, make())
            self._waits[index] = is_over = come(meeting)
            self._give_up()
        self._ring()
        self._end_turn(index)  # for the next one
        while not is_over() and self.interrupt is None:
            self._bells[index].get()
        self._take_turn(index)
        with self._lock:
            del self._waits[index]
            if is_over() and self._open.get(key) is meeting:  # the next one may be under way
                del self._open[key]
        if not is_over():
            raise Stop
        return meeting

    def _take_turn(self, index: int) -> None:
        """Wait for a core, but not for long: who has it may wait for what this call is to compute."""
        if self._turns is not None and self._turns.acquire(timeout=PATIENCE):
            self._in_turn.add(index)

    def _end_turn(self, index: int) -> None:
        if self._turns is not None and index in self._in_turn:
            self._in_turn.remove(index)
            self._turns.release()

    def meetings(self) -> list[Any]:
        return list(self._open.values())

    def settled(self) -> None:
        """Called by a slot on which others wait."""
        self._ring()

    def _give_up(self) -> None:
        """If nobody can go on, those that wait are told so. Called with the lock."""
        waits = list(self._waits.values())
        if len(waits) + len(self._over) < self.count or any(is_over() for is_over in waits):
            return
        meetings = list(self._open.values())
        for meeting in meetings:
            meeting.explain()
        for meeting in meetings:
            meeting.give_up()

    def _ring(self) -> None:
        for bell in self._bells:
            bell.put(None)
