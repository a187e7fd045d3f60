"""`executor="auto"` takes the way that was faster before, and says so."""

import re
import threading
from typing import Any

import pytest
import torch

import fdp
from fdp._placement.timings import Timings
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SLOTS = fdp.virtual_devices(2)


def used(fast: str, calls: int = 300) -> list[str]:
    """Which way is taken where one of the two is faster."""
    timings, taken = Timings(), []
    for _ in range(calls):
        way = "in order" if timings.begin() else "in threads"
        timings.note(1.0 if way == fast else 2.0, in_order=way == "in order")
        taken.append(way)
    return taken


@pytest.mark.parametrize("fast", ["in order", "in threads"])
def test_the_faster_way_is_taken_after_six_calls(fast: str):
    taken = used(fast)
    assert sorted(taken[:6]) == ["in order"] * 3 + ["in threads"] * 3
    slow = [i + 1 for i, way in enumerate(taken) if way != fast]
    assert [i for i in slow if i > 6] == [16, 32, 64, 128, 256]


def test_a_way_that_was_slow_by_chance_is_found_again():
    timings, taken = Timings(), []
    for i in range(40):
        in_order = timings.begin()
        timings.note(3.0 if i < 6 and in_order else 1.0 if in_order else 2.0, in_order=in_order)
        taken.append(in_order)
    assert taken[6:15] == [False] * 9
    assert taken[15:31] == [True] * 16
    assert taken[31:] == [False] + [True] * 8  # tried again


def test_the_other_way_is_taken_when_it_has_become_faster():
    timings = Timings()
    for i in range(200):
        in_order = timings.begin()
        timings.note(2.0 if in_order == (i >= 50) else 1.0, in_order=in_order)
    assert not timings.begin()


def test_threads_are_kept_where_no_call_has_ended():
    timings = Timings()
    assert [timings.begin() for _ in range(10)][6:] == [False] * 4
    assert timings.why_in_order() is None


W, X = torch.tensor(2.0), torch.arange(4.0)


def test_a_call_takes_the_way_that_explain_names():
    seen: set[int] = set()

    @fdp.thread_safe
    def noted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.add(threading.get_ident())
        return x * w

    with many_cores(2):
        for i in range(6):
            assert torch.equal(fdp.dp_apply(noted, W, X, SLOTS), W * X)
            assert fdp.explain(noted, W, X, SLOTS).executor.endswith("in turns, to see which is faster") == (i < 5)
        for _ in range(9):  # the next one tries the other way again
            said = fdp.explain(noted, W, X, SLOTS).executor
            seen.clear()
            fdp.dp_apply(noted, W, X, SLOTS)
            assert re.fullmatch(
                r"side by side in threads: they have taken [\d.e+-]+ ms so, and [\d.e+-]+ ms one after the other|"
                r"one shard after the other: they have taken [\d.e+-]+ ms so, and [\d.e+-]+ ms in threads",
                said,
            )
            assert seen == {threading.get_ident()} or said.startswith("side by side in threads")


def test_shards_that_wait_for_each_other_go_on_in_threads():
    begun = [threading.Event(), threading.Event()]

    @fdp.thread_safe
    def waits(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        index = int(fdp.axis_index())
        begun[index].set()
        begun[1 - index].wait(0.05)
        return x * w

    with many_cores(2):
        for _ in range(8):
            fdp.dp_apply(waits, W, X, SLOTS)
            for event in begun:
                event.clear()
        assert fdp.explain(lambda w, x: x, W, X, SLOTS).executor.startswith(
            "one shard after the other: the function is"
        )
        assert fdp.explain(waits, W, X, SLOTS).executor.startswith("side by side in threads: they have taken ")


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_only_auto_takes_times(executor: Any):
    fn = fdp.thread_safe(lambda w, x: x * w)
    with many_cores(2):
        for _ in range(8):
            fdp.dp_apply(fn, W, X, SLOTS, executor=executor)
        assert fdp.explain(fn, W, X, SLOTS).executor.endswith("to see which is faster")


def test_both_ways_have_the_same_bits_and_threads():
    seen: set[tuple[int, ...]] = set()

    @fdp.thread_safe
    def noted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.add((torch.get_num_threads(), *torch.stack([x.sum(), (x * w).sum()]).view(torch.int32).tolist()))
        return (x * w).sum(1).mean()

    before, x, w = torch.get_num_threads(), numbers(2, 1000, 64).float().contiguous(), numbers(64).float()
    torch.set_num_threads(4)
    try:
        with many_cores(4):
            results = {fdp.value_and_grad(noted, devices=SLOTS)(w, x)[0].item() for _ in range(8)}
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1
    assert len(seen) == 2  # of two shards
    assert {threads for threads, *_ in seen} == {2}
