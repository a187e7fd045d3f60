"""Shards side by side: the caller runs some itself, and workers help."""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch

from fdp._context import SIDE_BY_SIDE, NotSideBySide, Slot, run_in_slot
from fdp._guards import install
from fdp._known import compilations, is_cold, may_compile, note, remember_order
from fdp._state import ThreadState
from fdp._workers import cores, helpers, post

_NOT_AGAIN = (
    "parallel_apply: shards ran side by side, and one of them used what only one thread can: torch's random state (by "
    "torch.manual_seed, get_rng_state, seed= or activation checkpointing), or parametrize.cached(). Pass "
    "executor='sequential'; preserve_rng_state=False lets a checkpoint without random numbers run in threads"
)


class _Job(NamedTuple):
    number: int
    slot: Slot
    task: Callable[[], Any]
    context: contextvars.Context


def run_side_by_side(
    tasks: Sequence[Callable[[], Any]], slots: Sequence[Slot], fn: Any, pure: bool, take: Callable[[int, Any], None]
) -> list[tuple[Slot, Exception]]:
    """Run one task a slot, and let `take` have the results in order; return the failures.

    CPU shards share the cores: no more of them run than there are cores, and the threads inside operations are
    divided. Shards that turn out not to fit beside others run again, if `fn` is `pure`. What is not an `Exception`
    stops the others before they begin and is raised.
    """
    install()
    on_cpu = all(slot.device.type in ("cpu", "meta") for slot in slots)
    with helpers(len(tasks) - 1, cores() if on_cpu else max(cores(), len(tasks))) as count:
        threads = torch.get_num_threads()
        share = max(1, min(threads, cores() // (count + 1))) if on_cpu else threads
        lanes = _Lanes(tasks, slots, share)
        try:
            with _intraop(share, threads):
                if may_compile():
                    lanes.lead(take, fn)
                before = compilations()
                post(lanes.help, min(count, len(lanes.todo)))
                lanes.run(take)
                # Sums of gradients too: OpenMP's own threads would go on spinning on cores that the next call needs.
                lanes.wait(take)
            if lanes.again and pure:
                remember_order(fn)
                lanes.run_again(take)
            if compilations() != before:
                note(fn, slots[0], compiled=True)
            failures = lanes.failures()
            if lanes.again and not failures:
                raise RuntimeError(_NOT_AGAIN)
            return failures
        finally:
            lanes.settle()


@final
class _Lanes:
    """The shards of a call, and what has become of them."""

    def __init__(self, tasks: Sequence[Callable[[], Any]], slots: Sequence[Slot], threads: int) -> None:
        token = SIDE_BY_SIDE.set(True)
        self.todo = deque(_Job(i, slots[i], task, contextvars.copy_context()) for i, task in enumerate(tasks))
        SIDE_BY_SIDE.reset(token)
        self._slots, self._threads = slots, threads
        self._state = ThreadState.of_caller([slot.device for slot in slots])
        self._lock = threading.Lock()
        self._running = 0  # by workers
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._done = [False] * len(tasks)
        self._results: list[Any] = [None] * len(tasks)
        self._errors: dict[int, BaseException] = {}
        self.again: list[_Job] = []
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
        assert self._errors or self.again or self._taken == len(self._done)

    def run_again(self, take: Callable[[int, Any], None]) -> None:
        """Those that must not run beside others, now that no other runs."""
        for job in sorted(self.again, key=lambda job: job.number):
            job.context.run(SIDE_BY_SIDE.set, False)
            self._run(job)
        self.again.clear()
        self._hand_on(take)

    def settle(self) -> None:
        """Begin no other shard, wait for those that run, and let go of everything."""
        with self._lock:
            self.todo.clear()
        while self._running:
            self._ended.get()
        self.again.clear()
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
        self._run(job, state)
        return True

    def _run(self, job: _Job, state: ThreadState | None = None) -> None:
        try:
            with nullcontext() if state is None else self._as_caller(state):
                self._results[job.number] = run_in_slot(job.slot, None, job.task, job.context.copy())
        except NotSideBySide:
            self.again.append(job)
            return
        except BaseException as error:
            self._errors[job.number] = error
            if not isinstance(error, Exception):
                with self._lock:
                    self.todo.clear()
        self._done[job.number] = True

    @contextmanager
    def _as_caller(self, state: ThreadState) -> Iterator[None]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with state.restored():
            yield

    def _hand_on(self, take: Callable[[int, Any], None]) -> None:
        while self._taken < len(self._done) and self._done[self._taken]:
            index, self._taken = self._taken, self._taken + 1
            if index not in self._errors:
                take(index, self._results[index])
                self._results[index] = None


@contextmanager
def _intraop(threads: int, before: int) -> Iterator[None]:
    """The caller's number of threads inside operations. Setting it also sets that of threads to come: restore it."""
    if threads == before:
        yield
        return
    try:
        torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
