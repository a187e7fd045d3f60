"""Threads that wait for each other: so many run at a time, and when all wait nobody waits forever.

Two rules make that so.

What only one thread of the process may have (its generators, behind `slot.EXCLUSIVE`) is the last thing that a thread
takes, and the first that it gives back: whoever has it has a turn, and waits for nobody. A thread with belongings
therefore runs while no other of its turns does, and gives them back before each wait. Whatever cannot be given back
(forward mode, a module that is called in place) begins when nobody else runs; a thread does not wait in it.

A thread is waited for as long as it can go on by itself: it runs, it is ready to, or it is expected to enter. One that
waits for threads that it has started is expected from when the last of them has ended, and not before. So if nobody can
go on by himself, all that wait would wait for ever, and are told.

What holds at any time:

- A participant runs, or is in one of `_ready`, `_solo` and `_waiting`, or is away, or has not entered or has left.
  `_running` counts those that run: at most `limit`, and one if `_is_solo`.
- `_expected` counts those that can go on but are in none of these: about to enter, or away without children.
- Each change ends with `_next`, which gives the turns that there are to those that are ready, first come first served.
  It gives a turn by a release of the participant's `gate`, at which nobody else waits.
- A wait ends once: `is_over` is set with the lock, and its error is raised in the thread that waited.

The thread of a participant calls `begin`, `end`, `suspend`, `wait` and `alone`; `leave` is called for it too, after an
interrupt. Anyone may call `expect` and `resolve`. `_lock` is held for looks and changes only. Under it `explain` makes
errors from what is there, and no other lock is taken. A gate is waited at without the lock. For the main thread changes
are shielded work (`interrupts`), because an interrupt between two steps would leave counts wrong.

What was refused: a time limit alone, which lets slots that wait for each other stand for half an hour; it is there as
the last resort (`PATIENCE`), for what waits outside of fdp.
"""

import contextlib
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, final

from fdp._execution.interrupts import shielded, soon

PATIENCE = 1800.0
"""Seconds that a slot waits for the others, who may be compiling. NCCL has ten minutes."""


class Abandoned(RuntimeError):
    """What a slot gets that waits for one which will not come; `follows` if that one has ended before."""

    follows = False


Abandoned.__name__ = Abandoned.__qualname__ = "RuntimeError"  # for users it is one
Abandoned.__module__ = "builtins"


class TurnState(Protocol):
    """What a thread has to itself while it has a turn."""

    def resume(self) -> None:
        """A turn begins."""
        ...

    def pause(self) -> None:
        """It ends."""
        ...


@final
class Participant:
    """A thread that takes turns with others, with what it has to itself meanwhile.

    `parent` is the one that waits for it; `firm` is how much this thread has that it cannot give back.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        belongings: "Sequence[TurnState]" = (),
        parent: "Participant | None" = None,
        firm: int = 0,
    ) -> None:
        self.scheduler, self.belongings, self.parent, self.firm = scheduler, list(belongings), parent, firm
        self.gate = threading.Semaphore(0)
        self._has_turn = False
        self.thread = threading.get_ident()
        self.children = 0
        self.is_away = False  # until they have ended

    def begin(self) -> None:
        """Wait for a turn."""
        shielded(self._enter)
        self._resume()

    def end(self) -> None:
        """Let others have turns."""
        self._pause()
        soon(self.leave)

    def suspend(self) -> None:
        """Let others run until it begins again: this thread waits for threads that it starts."""
        self._pause()
        soon(self._leave_for_a_while)

    def wait(self, wait: "Waiter") -> None:
        """Until somebody resolves the wait, or nobody can."""
        self._pause()
        try:
            shielded(partial(self.scheduler.wait, self, wait))
        finally:
            self._resume()
        wait.check()

    def leave(self) -> None:
        """End a turn, if it has one."""
        if self._has_turn:
            self._has_turn = False
            self.scheduler.leave(self)

    def _enter(self) -> None:
        self.scheduler.enter(self)
        self._has_turn = True

    def _leave_for_a_while(self) -> None:
        self._has_turn = False
        self.scheduler.suspend(self)

    def alone(self) -> None:
        """Go on when nobody else runs, and until the turn ends."""
        if not self.belongings:  # else it is
            shielded(partial(self.scheduler.alone, self))

    @contextlib.contextmanager
    def owning(self, belongings: TurnState) -> Iterator[None]:
        """Have more to itself, which it has taken already."""
        self.belongings.append(belongings)
        try:
            yield
        finally:
            self.belongings.pop()

    @contextlib.contextmanager
    def without_belongings(self) -> Iterator[None]:
        """Give them back meanwhile."""
        self._pause()
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        for belongings in self.belongings:
            belongings.resume()

    def _pause(self) -> None:
        for belongings in reversed(self.belongings):
            belongings.pause()


PARTICIPANT: "contextvars.ContextVar[Participant | None]" = contextvars.ContextVar("fdp_participant", default=None)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: PARTICIPANT.set(None))  # those that it takes turns with are not there


def this_participant() -> Participant | None:
    """The one that this thread is; a thread of the user's may have the context of one, and is none."""
    participant = PARTICIPANT.get()
    return participant if participant is not None and participant.thread == threading.get_ident() else None


@final
class Waiter:
    """Why a participant waits; `explain` says what for if that does not come. `where` is for what others explain."""

    def __init__(self, explain: Callable[[], BaseException], where: Any = None) -> None:
        self.explain: Callable[[], BaseException] | None = explain
        self.where = where
        self.error: BaseException | None = None
        self.is_over = False

    def check(self) -> None:
        """Raise its error, once: its traceback refers to what refers to the wait."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


@final
class Scheduler:
    """Who runs, who is ready to, and who waits."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._running = 0
        self._expected = 0  # who can go on, beside those that run or are ready to
        self._ready: deque[Participant] = deque()
        self._solo: deque[Participant] = deque()  # they go on when nobody else runs
        self._is_solo = False
        self._waiting: list[tuple[Participant, Waiter]] = []

    def expect(self, count: int, parent: Participant | None = None) -> None:
        """So many threads are about to enter, for which a parent waits: while they do, somebody can go on."""
        with self._lock:
            self._expected += count
            if parent is not None:
                self._has_children(parent, parent.children + count)
            self._next()

    def _has_children(self, parent: Participant, count: int) -> None:
        if parent.is_away:
            self._expected += (not count) - (not parent.children)
        parent.children = count

    def enter(self, participant: Participant) -> None:
        """Wait for a turn."""
        with self._lock:
            if not (participant.is_away and participant.children):  # which can be after an interrupt only
                self._expected -= 1
            participant.is_away = False
            self._queue(participant)
            self._next()
        participant.gate.acquire()

    def alone(self, participant: Participant) -> None:
        """Go on when nobody else runs, and until the turn ends."""
        with self._lock:
            if self._is_solo or self.limit == 1:
                return
            self._running -= 1
            self._solo.append(participant)
            self._next()
        participant.gate.acquire()

    def leave(self, participant: Participant) -> None:
        """End the last turn."""
        with self._lock:
            self._running -= 1
            self._is_solo = False
            if participant.parent is not None:
                self._has_children(participant.parent, participant.parent.children - 1)
            self._next()

    def suspend(self, participant: Participant) -> None:
        """End a turn, until there are no children."""
        with self._lock:
            self._running -= 1
            self._is_solo = False
            self._expected += not participant.children
            participant.is_away = True
            self._next()

    def waits(self) -> list[Waiter]:
        """Why those wait that do."""
        return [wait for _, wait in self._waiting]

    def _queue(self, participant: Participant) -> None:
        (self._solo if participant.belongings else self._ready).append(participant)

    def wait(self, participant: Participant, wait: Waiter) -> None:
        """End a turn, until the wait is over and there is another."""
        with self._lock:
            self._running -= 1
            self._is_solo = False
            if wait.is_over:
                self._queue(participant)
            else:
                self._waiting.append((participant, wait))
            self._next()
        self._await(participant, wait)

    def _await(self, participant: Participant, wait: Waiter) -> None:
        deadline = time.monotonic() + PATIENCE
        while not participant.gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._lock:
                if not wait.is_over:
                    self._resolve([wait], is_given_up=True)
                self._next()
            deadline = time.monotonic() + PATIENCE

    def resolve(self, waits: Sequence[Waiter]) -> None:
        """Let those go on who wait for this."""
        with self._lock:
            self._resolve(waits)
            self._next()

    def _resolve(self, waits: Sequence[Waiter], *, is_given_up: bool = False) -> None:
        for wait in waits:
            wait.is_over = True
            if is_given_up and wait.explain is not None:
                wait.error = wait.explain()
            wait.explain = None  # which refers to what was waited for
        over = [participant for participant, wait in self._waiting if wait.is_over]
        self._waiting = [(participant, wait) for participant, wait in self._waiting if not wait.is_over]
        for participant in over:
            self._queue(participant)

    def _next(self) -> None:
        if not (self._running or self._ready or self._solo or self._expected):
            self._resolve([wait for _, wait in self._waiting], is_given_up=True)
        while self._ready and self._running < self.limit and not self._is_solo:
            self._running += 1
            self._ready.popleft().gate.release()
        if self._solo and not self._running:
            self._running, self._is_solo = 1, True
            self._solo.popleft().gate.release()
