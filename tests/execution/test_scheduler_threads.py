"""Threads that take turns: who runs beside whom, and when those that wait are told that nobody comes."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fdp._execution.scheduler import Abandoned, Participant, Scheduler, TurnState, Waiter
from tests.common.threads import within

LIMIT = 20.0


class Only:
    """What one thread at a time may have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taken = 0

    def resume(self) -> None:
        assert self.lock.acquire(blocking=False), "somebody has it who waits"
        self.taken += 1

    def pause(self) -> None:
        self.lock.release()


def start(
    scheduler: Scheduler,
    work: Callable[[Participant], Any],
    parent: Participant | None = None,
    own: Sequence[TurnState] = (),
) -> threading.Thread:
    """A thread that works in turns."""

    def serve() -> None:
        participant = Participant(scheduler, own, parent)
        participant.begin()
        try:
            work(participant)
        finally:
            participant.end()

    scheduler.expect(1, parent)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def wait(participant: Participant) -> str:
    """Waiter for what nobody does; what is said about it."""
    with pytest.raises(Abandoned, match=r"^nobody comes$") as caught:
        participant.wait(Waiter(lambda: Abandoned("nobody comes")))
    return str(caught.value)


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("own", [True, False])
def test_all_that_wait_are_told_when_nobody_is_left(limit: int, own: bool):
    scheduler, told, only = Scheduler(limit), [], [Only()] if own else []
    scheduler.expect(1)
    threads = [start(scheduler, lambda participant: told.append(wait(participant)), own=only) for _ in range(3)]
    assert not told
    last = Participant(scheduler)  # the fourth, which ends without a word
    last.begin()
    last.end()
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert told == ["nobody comes"] * 3


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 4])
def test_one_that_waits_for_its_children_keeps_nobody_waiting(limit: int, levels: int):
    scheduler, told = Scheduler(limit), []

    def work(participant: Participant, level: int = 0) -> None:
        if level == levels:
            told.append(wait(participant))
            return
        children = [start(scheduler, lambda child: work(child, level + 1), participant) for _ in range(2)]
        participant.suspend()
        for child in children:
            child.join()
        participant.begin()

    scheduler.expect(1)
    threads = [start(scheduler, work) for _ in range(2)]
    scheduler.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert told == ["nobody comes"] * 2 ** (levels + 1)


@pytest.mark.parametrize("early", [True, False])
def test_one_whose_children_have_ended_is_waited_for(early: bool):
    """Also where they end before it waits for them."""
    scheduler, ended = Scheduler(2), []
    found = Waiter(lambda: Abandoned("nobody comes"))

    def waits(participant: Participant) -> None:
        participant.wait(found)
        ended.append("waits")

    def parent(participant: Participant) -> None:
        child = start(scheduler, lambda _: ended.append("child"), participant)
        if early:
            child.join()
        participant.suspend()
        child.join()
        time.sleep(0.05)  # nobody runs, and nobody is told
        participant.begin()
        ended.append("parent")
        scheduler.resolve([found])

    scheduler.expect(1)
    threads = [start(scheduler, parent), start(scheduler, waits)]
    scheduler.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert ended == ["child", "parent", "waits"]


def test_others_that_run_hide_nobody():
    """Those that take other turns are others."""
    told, over = [], threading.Event()
    busy = start(Scheduler(1), lambda _: over.wait(LIMIT))
    stuck = start(Scheduler(1), lambda participant: told.append(wait(participant)))
    within(LIMIT, stuck.join)
    assert told == ["nobody comes"]
    assert busy.is_alive()
    over.set()
    within(LIMIT, busy.join)


def test_one_with_belongings_runs_alone_and_waits_without_them():
    scheduler, only = Scheduler(4), Only()
    running, most, waits = [], [], []

    def work(participant: Participant) -> None:
        for _ in range(20):
            running.append(participant)
            if participant.belongings:
                most.append(len(running))
            time.sleep(0.0005)
            running.remove(participant)
            mine = Waiter(lambda: Abandoned("nobody comes"))
            scheduler.resolve(waits)
            waits[:] = [mine]
            try:
                participant.wait(mine)
            except Abandoned:
                return

    scheduler.expect(1)
    threads = [start(scheduler, work, own=[only] * (i % 2)) for i in range(4)]
    scheduler.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert set(most) == {1}
    assert only.taken >= 2


def test_one_that_goes_on_alone_waits_for_the_others():
    scheduler, only, running, most = Scheduler(4), Only(), [], []

    def beside(participant: Participant) -> None:
        for _ in range(20):
            running.append(participant)
            time.sleep(0.0005)
            running.remove(participant)

    def alone(participant: Participant) -> None:
        participant.alone()
        running.append(participant)
        most.append(len(running))
        time.sleep(0.002)
        most.append(len(running))
        running.remove(participant)

    scheduler.expect(1)
    threads = [
        start(scheduler, beside),
        start(scheduler, alone, own=[only]),
        start(scheduler, alone),
        start(scheduler, beside),
    ]
    scheduler.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert most == [1] * 4
