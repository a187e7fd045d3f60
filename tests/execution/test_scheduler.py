"""All orders in which three threads can take turns, one step at a time, against a model of the two rules.

No thread is started: a gate notes who asks for a turn and who gets one, and each of the threads does its next step when
the order that is tried says so.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fdp._execution.scheduler import Abandoned, Participant, Scheduler, Waiter
from tests.common.depth import few


class Gate:
    """In place of a semaphore: who would wait at it may go on when it has been opened as often as it was asked for."""

    def __init__(self) -> None:
        self.asked = self.opened = 0

    def acquire(self, timeout: float | None = None) -> bool:
        self.asked += 1
        return True

    def release(self) -> None:
        self.opened += 1


class Thread:
    """What the model knows of one: `new`, with a `turn` (or ready for one), `waits`, `away` or `over`."""

    def __init__(self, scheduler: Scheduler, parent: "Thread | None" = None, *, owns: bool = False) -> None:
        self.participant = Participant(
            scheduler, [Nothing()] if owns else [], parent.participant if parent is not None else None
        )
        self.gate: Any = Gate()
        self.participant.gate = self.gate
        self.parent, self.state, self.did = parent, "new", set[str]()
        self.wait = Waiter(lambda: Abandoned("nobody comes"))
        self.is_told = False
        self.is_alone = owns  # whenever it has a turn

    @property
    def runs(self) -> bool:
        assert self.gate.asked >= self.gate.opened
        return self.state == "turn" and self.gate.asked == self.gate.opened


class Nothing:
    def resume(self) -> None: ...
    def pause(self) -> None: ...


class World:
    """Three threads, the real turns, and what should be so."""

    def __init__(self, limit: int, kind: str) -> None:
        self.scheduler, self.limit, self.kind = Scheduler(limit), limit, kind
        first = Thread(self.scheduler, owns=kind == "one owns")
        last = Thread(self.scheduler, first if kind == "one is a child" else None)
        self.threads = [first, Thread(self.scheduler), last]
        self.scheduler.expect(2 if last.parent else 3)
        self.is_promised = False  # what the second one waits for, perhaps before it does

    def children(self, thread: Thread) -> list[Thread]:
        return [other for other in self.threads if other.parent is thread and other.state != "over"]

    def steps(self) -> Iterator[tuple[int, str]]:
        """What can happen next. Of threads that are alike the first enters first: else all comes twice."""
        alike = {"equal": self.threads, "one is a child": []}.get(self.kind, self.threads[1:])
        entering = next((thread for thread in alike if thread.state == "new"), None)
        for i, thread in enumerate(self.threads):
            if thread.state == "new" and self._is_begun(thread) and (thread not in alike or thread is entering):
                yield i, "enter"
            if thread.state == "away" and not self.children(thread):
                yield i, "enter"
            if thread.runs:
                yield from ((i, what) for what in self._steps_of(thread))

    def _steps_of(self, thread: Thread) -> Iterator[str]:
        is_parent = any(other.parent is thread for other in self.threads)
        if is_parent:
            yield "leave" if "suspend" in thread.did else "suspend" if "start" in thread.did else "start"
            return
        yield "leave"
        special = {"one goes alone": "alone", "one resolves early": "promise"}.get(self.kind)
        if special is not None and thread is self.threads[0]:
            yield from () if special in thread.did else (special,)
            return
        if "wait" not in thread.did:
            yield "wait"
        if "resolve" not in thread.did and any(other.state == "waits" for other in self.threads):
            yield "resolve"

    def _is_begun(self, thread: Thread) -> bool:
        return thread.parent is None or "start" in thread.parent.did

    def do(self, index: int, what: str) -> None:
        """One step, of the model and of the real thing."""
        thread, scheduler = self.threads[index], self.scheduler
        thread.did.add(what)
        late = self.threads[1]
        if what in ("wait", "suspend", "leave"):
            thread.is_alone = bool(thread.participant.belongings)
        thread.state = {"enter": "turn", "wait": "waits", "suspend": "away", "leave": "over"}.get(what, thread.state)
        if what == "wait" and thread is late and self.is_promised:
            thread.state = "turn"
        if what == "promise":
            self.is_promised = True
            late.state = "turn" if late.state == "waits" else late.state
        waiting = [other for other in self.threads if other.state == "waits"]
        if what == "resolve":
            waiting[0].state = "turn"
        elif not any(self._can_go_on(other) for other in self.threads):
            for other in waiting:
                other.state, other.is_told = "turn", True
        if what == "enter":
            scheduler.enter(thread.participant)
        elif what == "start":
            scheduler.expect(1, thread.participant)
        elif what == "wait":
            scheduler.wait(thread.participant, thread.wait)
        elif what == "resolve":
            scheduler.resolve([waiting[0].wait])
        elif what == "promise":
            scheduler.resolve([late.wait])
        else:
            thread.is_alone = thread.is_alone or what == "alone"
            getattr(scheduler, what)(thread.participant)
        self.check()

    def _can_go_on(self, thread: Thread) -> bool:
        """By itself: what it waits for, others need not do."""
        if thread.state == "new":
            return self._is_begun(thread)
        return thread.state == "turn" or (thread.state == "away" and not self.children(thread))

    def check(self) -> None:
        """The two rules."""
        running = [thread for thread in self.threads if thread.runs]
        ready = [thread for thread in self.threads if thread.state == "turn"]
        assert len(running) <= self.limit
        assert len(running) == 1 or not any(thread.is_alone for thread in running)
        assert running or not ready, "nobody runs, and somebody could"
        if not any(thread.is_alone for thread in ready):
            assert len(running) == min(self.limit, len(ready))
        for thread in self.threads:
            is_promised = self.is_promised and thread is self.threads[1]
            assert thread.wait.is_over == (is_promised or ("wait" in thread.did and thread.state != "waits"))
            assert (thread.wait.error is not None) == thread.is_told


def run(world: World, order: Sequence[int]) -> list[int]:
    """Let things happen in this order, and then always what is first; how many there were to choose from."""
    counts = []
    for number in range(100):
        choices = list(world.steps())
        if not choices:
            break
        counts.append(len(choices))
        world.do(*choices[order[number] if number < len(order) else 0])
    assert [thread.state for thread in world.threads] == ["over"] * 3, "somebody waits for ever"
    return counts


@few(2)
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("kind", ["equal", "one owns", "one goes alone", "one resolves early", "one is a child"])
def test_in_every_order_the_two_rules_hold(limit: int, kind: str):
    """No more run than may, and when nobody can go on by itself, all that wait are told; never before."""
    orders: list[list[int]] = [[]]
    tried = 0
    while orders:
        order = orders.pop()
        counts = run(World(limit, kind), order)
        tried += 1
        for at in range(len(order), len(counts)):  # where it took what was first, take each of the others
            orders += [[*order, *[0] * (at - len(order)), other] for other in range(1, counts[at])]
    assert tried > 50
