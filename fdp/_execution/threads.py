"""Shards side by side: the caller runs some itself, and workers help."""

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch

from fdp._execution.function_traits import compilations, is_cold, may_compile, note, remember_order
from fdp._execution.interrupts import shielded
from fdp._execution.patches import install
from fdp._execution.pool import cores, post, releasing, reserve
from fdp._execution.restart import Restart
from fdp._execution.thread_state import ThreadState
from fdp._placement.slot import SIDE_BY_SIDE, Beside, Slot, check_process, is_forked, run_in_slot


class _Job(NamedTuple):
    number: int
    slot: Slot
    task: Callable[[], Any]
    context: contextvars.Context


def run_side_by_side(
    tasks: Sequence[Callable[[], Any]], slots: Sequence[Slot], fn: Any, take: Callable[[int, Any], None]
) -> list[tuple[Slot, Exception]]:
    """Run one task a slot, and let `take` have the results in order; return the failures.

    CPU shards share the cores: no more of them run than there are cores, and the threads inside operations are
    divided. A shard that turns out not to fit beside others goes on alone, and next time `fn` runs in order. What is
    not an `Exception` stops the others before they begin and is raised.
    """
    install()
    on_cpu = all(slot.device.type in ("cpu", "meta") for slot in slots)
    lanes = _Lanes(tasks, slots)
    release, threads = releasing(lanes), torch.get_num_threads()
    try:
        count = reserve(lanes, len(tasks) - 1, cores() if on_cpu else max(cores(), len(tasks)))
        lanes.threads = max(1, min(threads, cores() // (count + 1))) if on_cpu else threads
        try:
            if lanes.threads != threads:
                torch.set_num_threads(lanes.threads)
            if may_compile():
                lanes.lead(take, fn)
            before = compilations()
            post(lanes, lanes.help, min(count, len(lanes.todo)))
            lanes.run(take)
            # Sums of gradients too: OpenMP's own threads would go on spinning on cores that the next call needs.
            lanes.wait(take)
        finally:
            if lanes.threads != threads:  # setting it also sets that of threads to come
                torch.set_num_threads(threads)
        if lanes.company.was_left:
            remember_order(fn)
        if compilations() != before:
            note(fn, slots[0], compiled=True)
        return lanes.failures()
    finally:
        try:
            lanes.settle()
        finally:
            release()


class _Place(NamedTuple):
    """That of a shard in its company, and of the shard around the call in another."""

    company: "_Company"
    number: int
    around: Beside | None

    def alone(self, *, next_time: bool) -> None:
        shielded(partial(self.company.leave, self.number, next_time=next_time))
        if self.around is not None:
            self.around.alone(next_time=next_time)


@final
class _Company:
    """The shards of a call that run at the same time, until one has to be alone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what enters and leaves it is C: with a condition's own methods it may be kept
        self._changed = threading.Condition(self._lock)
        self._running: set[int] = set()
        self._waiting: set[int] = set()
        self._alone: int | None = None
        self.was_left = False

    def context(self, number: int) -> contextvars.Context:
        """The caller's context for a shard."""
        context = contextvars.copy_context()
        context.run(lambda: SIDE_BY_SIDE.set(_Place(self, number, SIDE_BY_SIDE.get())))
        return context

    def join(self, number: int) -> None:
        """Called before a shard runs."""
        with self._lock:
            self._changed.wait_for(lambda: self._alone is None)
            self._running.add(number)

    def end(self, number: int) -> None:
        """Called after it, and perhaps again."""
        with self._lock:
            self._running.discard(number)
            if self._alone == number:
                self._alone = None
            self._changed.notify_all()

    def leave(self, number: int, *, next_time: bool) -> None:
        """Called by a shard that runs: the others end, or leave too and wait for their turn; none begins meanwhile."""
        with self._lock:
            if number not in self._running:  # it is alone, or a thread that it has started comes late
                self._changed.wait_for(lambda: number not in self._waiting)
                return
            self.was_left |= next_time
            self._waiting.add(number)
            self._running.discard(number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_go_on(number))
            self._alone = number
            self._waiting.discard(number)
            self._changed.notify_all()

    def _may_go_on(self, number: int) -> bool:
        return not self._running and self._alone is None and number == min(self._waiting)


@final
class _Lanes:
    """The shards of a call, and what has become of them."""

    def __init__(self, tasks: Sequence[Callable[[], Any]], slots: Sequence[Slot]) -> None:
        self.company = _Company()
        self.todo = deque(_Job(i, slots[i], task, self.company.context(i)) for i, task in enumerate(tasks))
        self._slots, self._process = slots, os.getpid()
        self.threads = 0  # inside operations
        self._state = ThreadState.of_caller([slot.device for slot in slots])
        self._lock = threading.Lock()
        self._running = 0  # by workers
        self._own: int | None = None  # which one the caller runs, or has run
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._done = [False] * len(tasks)
        self._results: list[Any] = [None] * len(tasks)
        self._errors: dict[int, BaseException] = {}
        self._taken = 0

    def lead(self, take: Callable[[int, Any], None], fn: Any) -> None:
        """Run those shards alone which may compile something."""
        for job in list(self.todo):
            if not self.todo:  # one was interrupted
                return
            self.todo.popleft()
            if not is_cold(fn, job.slot):
                self.todo.append(job)
                continue
            before = compilations()
            self._own = job.number
            self._run(job)
            self._hand_on(take)
            note(fn, job.slot, compiled=compilations() != before)

    def run(self, take: Callable[[int, Any], None]) -> None:
        """The caller's part."""
        while self._run_next():
            self._hand_on(take)

    def help(self) -> None:
        """A worker's part. Late ones find nothing to do, and nothing to keep."""
        found = True
        while found:
            with self._lock:
                self._running += 1  # before a shard is taken: the caller waits for all that it finds gone
            found = self._run_next(self._state)
            with self._lock:
                self._running -= 1
            self._ended.put(None)

    def wait(self, take: Callable[[int, Any], None]) -> None:
        """Until all shards have ended."""
        while self._running:
            self._ended.get()
            self._hand_on(take)
        self._hand_on(take)
        assert self._errors or self._taken == len(self._done)

    def settle(self) -> None:
        """Begin no other shard, wait for those that run, and let go of everything."""
        if is_forked(self._process):
            return
        try:
            with self._lock:
                self.todo.clear()
            if self._own is not None:
                self.company.end(self._own)  # an interrupt may have left it there
            while self._running:
                self._ended.get()
        except BaseException:
            self.settle()
            raise
        self._results.clear()
        self._errors.clear()

    def failures(self) -> list[tuple[Slot, Exception]]:
        """Which shards failed, and how."""
        found = []
        for index, error in sorted(self._errors.items()):
            if not isinstance(error, Exception):
                try:
                    raise error
                finally:
                    del error  # the traceback holds this frame: no cycle
            found.append((self._slots[index], error))
        return found

    def _run_next(self, state: ThreadState | None = None) -> bool:
        try:
            job = self.todo.popleft()
        except IndexError:
            return False
        if state is None:
            self._own = job.number
        self._run(job, state)
        return True

    def _run(self, job: _Job, state: ThreadState | None = None) -> None:
        try:
            with nullcontext() if state is None else self._as_caller(state):
                self.company.join(job.number)
                try:
                    self._results[job.number] = run_in_slot(job.slot, job.task, job.context)
                finally:
                    check_process(self._process)
                    self.company.end(job.number)
        except BaseException as error:
            if is_forked(self._process):
                raise
            self._errors[job.number] = error
            if isinstance(error, Restart):
                error.__traceback__ = None  # in this thread: see `run` in fdp._collectives.run
            if not isinstance(error, Exception):
                with self._lock:
                    self.todo.clear()
        self._done[job.number] = True

    @contextmanager
    def _as_caller(self, state: ThreadState) -> Iterator[None]:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with state.restored():
            yield

    def _hand_on(self, take: Callable[[int, Any], None]) -> None:
        while self._taken < len(self._done) and self._done[self._taken]:
            index, self._taken = self._taken, self._taken + 1
            if index not in self._errors:
                take(index, self._results[index])
                self._results[index] = None
