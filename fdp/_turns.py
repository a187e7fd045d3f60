"""Threads that wait for each other: so many run at a time, and when all wait nobody waits forever."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, final

from fdp._shield import shielded, soon

PATIENCE = 1800.0
"""Seconds that a slot waits for the others, who may be compiling. NCCL has ten minutes."""


class Abandoned(RuntimeError):
    """What a slot gets that waits for one which will not come."""


Abandoned.__name__ = Abandoned.__qualname__ = "RuntimeError"  # for users it is one
Abandoned.__module__ = "builtins"


class Belongings(Protocol):
    """What a thread has to itself while it has a turn."""

    def resume(self) -> None:
        """A turn begins."""
        ...

    def pause(self) -> None:
        """It ends."""
        ...

    def renew(self, data: int) -> None:
        """Something else begins within the turn."""
        ...


@final
class Member:
    """A thread that takes turns with others, with what it has to itself meanwhile."""

    def __init__(self, turns: "Turns", belongings: "Belongings | None") -> None:
        self.turns, self.belongings = turns, belongings
        self.gate = threading.Semaphore(0)
        self._has_turn = False

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

    def wait(self, wait: "Wait") -> None:
        """Until somebody resolves the wait, or nobody can."""
        self._pause()
        try:
            shielded(partial(self.turns.wait, self, wait))
        finally:
            self._resume()
        wait.check()

    def leave(self) -> None:
        """End a turn, if it has one."""
        if self._has_turn:
            self._has_turn = False
            self.turns.leave()

    def _enter(self) -> None:
        self.turns.enter(self)
        self._has_turn = True

    def _leave_for_a_while(self) -> None:
        self.turns.expect(1)
        self.leave()

    def _resume(self) -> None:
        if self.belongings is not None:
            self.belongings.resume()

    def _pause(self) -> None:
        if self.belongings is not None:
            self.belongings.pause()


@final
class Wait:
    """Why a member waits; `explain` says what for if it is in vain."""

    def __init__(self, explain: Callable[[], BaseException]) -> None:
        self.explain: Callable[[], BaseException] | None = explain
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
class Turns:
    """Who runs, who is ready to, and who waits."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._running = 0
        self._expected = 0
        self._ready: deque[Member] = deque()
        self._solo: deque[Member] = deque()  # they go on when nobody else runs
        self._is_solo = False
        self._waiting: list[tuple[Member, Wait]] = []

    def expect(self, count: int) -> None:
        """So many threads are about to enter: while they do, nobody waits in vain."""
        with self._lock:
            self._expected += count
            self._next()

    def enter(self, member: Member) -> None:
        """Wait for a turn."""
        with self._lock:
            self._expected -= 1
            self._ready.append(member)
            self._next()
        try:
            member.gate.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                self._take_back(member)
                self._running -= 1
                self._next()
            raise

    def alone(self, member: Member) -> None:
        """Go on when nobody else runs, and until the turn ends."""
        with self._lock:
            if self._is_solo or self.limit == 1:
                return
            self._running -= 1
            self._solo.append(member)
            self._next()
        try:
            member.gate.acquire()
        except BaseException:
            with self._lock:
                self._take_back(member)
            raise

    def leave(self) -> None:
        """End a turn."""
        with self._lock:
            self._running -= 1
            self._is_solo = False
            self._next()

    def wait(self, member: Member, wait: Wait) -> None:
        """End a turn, until the wait is over and there is another."""
        with self._lock:
            self._running -= 1
            self._is_solo = False
            if wait.is_over:
                self._ready.append(member)
            else:
                self._waiting.append((member, wait))
            self._next()
        try:
            self._await(member, wait)
        except BaseException:  # an interrupt: the thread goes on as if it had its turn
            with self._lock:
                self._take_back(member)
            raise

    def _take_back(self, member: Member) -> None:
        """Give a turn to a member that waits no more, whatever it waited for."""
        before = len(self._ready) + len(self._waiting) + len(self._solo)
        self._ready = deque(other for other in self._ready if other is not member)
        self._solo = deque(other for other in self._solo if other is not member)
        self._waiting = [(other, wait) for other, wait in self._waiting if other is not member]
        if len(self._ready) + len(self._waiting) + len(self._solo) < before:
            self._running += 1
        else:  # it had been given one
            member.gate.acquire(blocking=False)

    def _await(self, member: Member, wait: Wait) -> None:
        deadline = time.monotonic() + PATIENCE
        while not member.gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._lock:
                if not wait.is_over:
                    self._resolve([wait], in_vain=True)
                self._next()
            deadline = time.monotonic() + PATIENCE

    def resolve(self, waits: Sequence[Wait]) -> None:
        """Let those go on who wait for this."""
        with self._lock:
            self._resolve(waits)
            self._next()

    def _resolve(self, waits: Sequence[Wait], *, in_vain: bool = False) -> None:
        for wait in waits:
            wait.is_over = True
            if in_vain and wait.explain is not None:
                wait.error = wait.explain()
            wait.explain = None  # which refers to what was waited for
        over = [member for member, wait in self._waiting if wait.is_over]
        self._waiting = [(member, wait) for member, wait in self._waiting if not wait.is_over]
        self._ready.extend(over)

    def _next(self) -> None:
        if not (self._running or self._ready or self._solo or self._expected):
            self._resolve([wait for _, wait in self._waiting], in_vain=True)
        while self._ready and self._running < self.limit and not self._is_solo:
            self._running += 1
            self._ready.popleft().gate.release()
        if self._solo and not self._running:
            self._running, self._is_solo = 1, True
            self._solo.popleft().gate.release()
