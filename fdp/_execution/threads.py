"""Shards side by side: the caller runs some itself, and threads of the pool help.

What holds at any time:

- A shard stands in `todo`, or one thread runs it, or it is done. Who takes it out of `todo` runs it; the deque sees to
  it that this is one. `todo` is emptied when no other is to begin: after an interrupt, and where the call begins anew.
- A helper counts itself in `_helping` before it looks into `todo`. So when the caller finds `todo` empty and nobody
  helping, all shards are done. Helpers that wake later find nothing, and keep nothing.
- `take` gets results in order, in the caller's thread, and none from the first failure or refusal on. What was taken
  is never run again: the rest of a call that begins anew follows it.
- A shard that does not fit beside others raises `InOrder` in its own thread, or in one of the pool that works for it.
  A thread that the function has started is not disturbed: nobody would catch it there. The flag `is_refused` counts,
  not the exception, so a function may catch what it likes.
- Where functions have effects nothing begins anew: see `alone`.

`run_side_by_side` may be called from any thread, in shards too. `refuse` is called in shards, the other methods by the
caller or, `help` alone, by the pool. `_Lanes._lock` and the lock of `Running` are never held together, and no other
lock is taken inside of either; no code of the user's runs in them. An interrupt may come anywhere in the caller's
part: `settle` waits for the helpers and undoes what the caller may have left half done, however often it is
interrupted itself. Only a second interrupt in its first few instructions gets past it: then a helper ends its shard,
and nobody waits for that.
"""

import contextlib
import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch

from fdp._execution.alone import BESIDE, Running
from fdp._execution.function_traits import compilations, is_cold, may_compile, note, remember_order
from fdp._execution.interrupts import shielded
from fdp._execution.patches import install
from fdp._execution.pool import cores, is_pooled, post, releasing, reserve
from fdp._execution.restart import InOrder, Restart
from fdp._execution.thread_state import ThreadState
from fdp._placement.slot import Slot, check_process, is_forked, run_in_slot


class _ShardJob(NamedTuple):
    number: int
    slot: Slot
    task: Callable[[], Any]
    context: contextvars.Context


def run_side_by_side(
    tasks: Sequence[Callable[[], Any]],
    slots: Sequence[Slot],
    fn: Any,
    take: Callable[[int, Any], None],
    *,
    has_effects: bool = False,
) -> list[tuple[Slot, Exception]] | None:
    """Run one task per slot, and let `take` have the results in order; return the failures.

    None if a shard turns out not to fit beside others: then those that were not taken are to run again, in order.
    """
    install()
    on_cpu = all(slot.device.type in ("cpu", "meta") for slot in slots)
    lanes = _Lanes(tasks, slots, has_effects=has_effects)
    release = releasing(lanes)
    try:
        count = reserve(lanes, len(tasks) - 1, cores() if on_cpu else max(cores(), len(tasks)))
        threads = lanes.state.threads
        try:
            if on_cpu:
                lanes.state = lanes.state.with_threads(cores() // (count + 1))
            if lanes.state.threads != threads:
                torch.set_num_threads(lanes.state.threads)
            if may_compile():
                lanes.lead(take, fn)
            before = compilations()
            post(lanes, lanes.help, min(count, len(lanes.todo)))
            lanes.run(take)
            # Sums of gradients too: OpenMP's own threads would go on spinning on cores that the next call needs.
            lanes.wait(take)
        finally:
            if lanes.state.threads != threads:  # setting it also sets that of threads to come
                torch.set_num_threads(threads)
        if lanes.is_refused or lanes.running.was_left:
            remember_order(fn)
        if compilations() != before:
            note(fn, slots[0], compiled=True)
        failures = lanes.failures()
        return None if lanes.is_refused else failures
    finally:
        try:
            lanes.settle()
        finally:
            release()


@contextlib.contextmanager
def inner_threads(shards: int) -> Iterator[None]:
    """Give operations as many threads as they have in so many shards side by side: sums round as they do there."""
    before = torch.get_num_threads()
    count = max(1, min(before, cores() // min(shards, cores())))
    try:
        if count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@final
class _Lanes:
    """The shards of a call, and what has become of them."""

    def __init__(self, tasks: Sequence[Callable[[], Any]], slots: Sequence[Slot], *, has_effects: bool) -> None:
        self.todo = deque(_ShardJob(i, slots[i], task, self._context(i)) for i, task in enumerate(tasks))
        self.is_refused = False  # all are to begin anew
        self.running = Running()
        self._has_effects = has_effects  # none can
        self._slots, self._process = slots, os.getpid()
        self.state = ThreadState.of_caller([slot.device for slot in slots])
        self._lock = threading.Lock()  # for workers only: from 3.14 on an interrupt may leave a `with` that has begun
        self._helping = 0  # how many workers
        self._own: int | None = None  # which one the caller runs, or has run
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._done = [False] * len(tasks)
        self._results: list[Any] = [None] * len(tasks)
        self._errors: dict[int, BaseException] = {}
        self._taken = 0

    def _context(self, number: int) -> contextvars.Context:
        """The caller's context for a shard."""
        context = contextvars.copy_context()
        context.run(BESIDE.set, (functools.partial(self.refuse, number), *BESIDE.get()))
        return context

    def lead(self, take: Callable[[int, Any], None], fn: Any) -> None:
        """Run those shards alone which may compile something."""
        for job in list(self.todo):
            if not self.todo:  # one was interrupted
                return
            self.todo.popleft()
            if not is_cold(fn, job.slot):
                self.todo.append(job)
                continue
            before, self._own = compilations(), job.number
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
                self._helping += 1  # before a shard is taken: the caller waits for all that it finds gone
            found = self._run_next(self.state)
            with self._lock:
                self._helping -= 1
            self._ended.put(None)

    def wait(self, take: Callable[[int, Any], None]) -> None:
        """Until all shards have ended."""
        while self._helping:
            self._ended.get()
            self._hand_on(take)
        self._hand_on(take)
        assert self._errors or self.is_refused or self._taken == len(self._done)

    def refuse(self, number: int) -> None:
        """Called by a shard that does not fit beside others: the call begins anew, or this one goes on when alone."""
        if self._has_effects:
            shielded(functools.partial(self.running.leave, number))
            return
        thread = self.running.threads.get(number)
        if thread is None:  # it has ended: this is a thread that it has started
            return
        self.is_refused = True
        self.todo.clear()
        if thread == threading.get_ident() or is_pooled():
            raise InOrder(self)
        # A thread that the function has started goes on. What comes of it is thrown away.

    def settle(self) -> None:
        """Begin no other shard, wait for those that run, and let go of everything."""
        if is_forked(self._process):
            return
        try:
            self.todo.clear()
            if self._own is not None:
                self.running.end(self._own)  # an interrupt may have come before it did
            while self._helping:
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
            if isinstance(error, InOrder) and error.run is self:
                continue
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

    def _run(self, job: _ShardJob, state: ThreadState | None = None) -> None:
        try:
            with contextlib.nullcontext() if state is None else state.restored():
                self.running.begin(job.number)
                try:
                    self._results[job.number] = run_in_slot(job.slot, job.task, job.context)
                finally:
                    check_process(self._process)
                    self.running.end(job.number)
        except BaseException as error:
            if is_forked(self._process):
                raise
            self._errors[job.number] = error
            if isinstance(error, Restart):
                error.__traceback__ = None  # in this thread: see `run` in fdp._collectives.run
            if not isinstance(error, Exception):
                self.todo.clear()
        self._done[job.number] = True

    def _hand_on(self, take: Callable[[int, Any], None]) -> None:
        """What has ended, in order, up to a shard that fails or that makes all begin anew."""
        while self._taken < len(self._done) and self._done[self._taken]:
            index = self._taken
            if index in self._errors or self.is_refused:
                return
            self._taken += 1
            take(index, self._results[index])
            self._results[index] = None
