"""Threads that take turns: who runs beside whom, and when those that wait are told that nobody comes."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fdp._execution.scheduler import Abandoned, Belongings, Member, Turns, Wait
from tests.helpers import within

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
    turns: Turns, work: Callable[[Member], Any], parent: Member | None = None, own: Sequence[Belongings] = ()
) -> threading.Thread:
    """A thread that works in turns."""

    def serve() -> None:
        member = Member(turns, own, parent)
        member.begin()
        try:
            work(member)
        finally:
            member.end()

    turns.expect(1, parent)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def wait(member: Member) -> str:
    """Wait for what nobody does; what is said about it."""
    with pytest.raises(Abandoned, match=r"^nobody comes$") as caught:
        member.wait(Wait(lambda: Abandoned("nobody comes")))
    return str(caught.value)


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("own", [True, False])
def test_all_that_wait_are_told_when_nobody_is_left(limit: int, own: bool):
    turns, told, only = Turns(limit), [], [Only()] if own else []
    turns.expect(1)
    threads = [start(turns, lambda member: told.append(wait(member)), own=only) for _ in range(3)]
    assert not told
    last = Member(turns)  # the fourth, which ends without a word
    last.begin()
    last.end()
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert told == ["nobody comes"] * 3


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 4])
def test_one_that_waits_for_its_children_keeps_nobody_waiting(limit: int, levels: int):
    turns, told = Turns(limit), []

    def work(member: Member, level: int = 0) -> None:
        if level == levels:
            told.append(wait(member))
            return
        children = [start(turns, lambda child: work(child, level + 1), member) for _ in range(2)]
        member.suspend()
        for child in children:
            child.join()
        member.begin()

    turns.expect(1)
    threads = [start(turns, work) for _ in range(2)]
    turns.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert told == ["nobody comes"] * 2 ** (levels + 1)


@pytest.mark.parametrize("early", [True, False])
def test_one_whose_children_have_ended_is_waited_for(early: bool):
    """Also where they end before it waits for them."""
    turns, ended = Turns(2), []
    found = Wait(lambda: Abandoned("nobody comes"))

    def waits(member: Member) -> None:
        member.wait(found)
        ended.append("waits")

    def parent(member: Member) -> None:
        child = start(turns, lambda _: ended.append("child"), member)
        if early:
            child.join()
        member.suspend()
        child.join()
        time.sleep(0.05)  # nobody runs, and nobody is told
        member.begin()
        ended.append("parent")
        turns.resolve([found])

    turns.expect(1)
    threads = [start(turns, parent), start(turns, waits)]
    turns.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert ended == ["child", "parent", "waits"]


def test_others_that_run_hide_nobody():
    """Those that take other turns are others."""
    told, over = [], threading.Event()
    busy = start(Turns(1), lambda _: over.wait(LIMIT))
    stuck = start(Turns(1), lambda member: told.append(wait(member)))
    within(LIMIT, stuck.join)
    assert told == ["nobody comes"]
    assert busy.is_alive()
    over.set()
    within(LIMIT, busy.join)


def test_one_with_belongings_runs_alone_and_waits_without_them():
    turns, only = Turns(4), Only()
    running, most, waits = [], [], []

    def work(member: Member) -> None:
        for _ in range(20):
            running.append(member)
            if member.belongings:
                most.append(len(running))
            time.sleep(0.0005)
            running.remove(member)
            mine = Wait(lambda: Abandoned("nobody comes"))
            turns.resolve(waits)
            waits[:] = [mine]
            try:
                member.wait(mine)
            except Abandoned:
                return

    turns.expect(1)
    threads = [start(turns, work, own=[only] * (i % 2)) for i in range(4)]
    turns.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert set(most) == {1}
    assert only.taken >= 2


def test_one_that_goes_on_alone_waits_for_the_others():
    turns, only, running, most = Turns(4), Only(), [], []

    def beside(member: Member) -> None:
        for _ in range(20):
            running.append(member)
            time.sleep(0.0005)
            running.remove(member)

    def alone(member: Member) -> None:
        member.alone()
        running.append(member)
        most.append(len(running))
        time.sleep(0.002)
        most.append(len(running))
        running.remove(member)

    turns.expect(1)
    threads = [start(turns, beside), start(turns, alone, own=[only]), start(turns, alone), start(turns, beside)]
    turns.expect(-1)
    within(LIMIT, lambda: [thread.join() for thread in threads])
    assert most == [1] * 4
