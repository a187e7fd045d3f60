"""Shards side by side: who runs them, how many at once, and what is left behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.threads import has_all_cores, many_cores, within

W = torch.tensor(2.0, dtype=torch.float64)
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "dp_apply": lambda fn, slots: fdp.dp_apply(fn, W, rows(slots), fdp.virtual_devices(slots), executor="threads"),
    "shard_map": lambda fn, slots: fdp.shard_map(
        fn, devices=fdp.virtual_devices(slots), in_dims=(None, 0), executor="threads"
    )(W, rows(slots)),
    "parallel_apply": lambda fn, slots: fdp.parallel_apply(
        fn, W, fdp.scatter(rows(slots), fdp.virtual_devices(slots)), executor="threads"
    ),
    "grad": lambda fn, slots: fdp.grad(
        lambda w, x: fn(w, x).sum(), devices=fdp.virtual_devices(slots), executor="threads"
    )(W, rows(slots)),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def rows(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64)


# ---------------------------------------------------------------- who runs what


@each_call
def test_shards_run_side_by_side(call: Callable[..., Any]):
    meeting, threads = threading.Barrier(4), set()

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        meeting.wait(30)
        return w * x

    with many_cores():
        call(fn, 4)
    assert len(threads) == 4
    assert threading.get_ident() not in threads  # the caller waits


@each_call
def test_no_thread_is_started_where_there_are_enough(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    with many_cores():
        call(torch.mul, 4)
        before = threading.active_count()
        monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
        for _ in range(50):
            call(torch.mul, 4)
            call(torch.mul, 3)
    assert threading.active_count() == before


class Crowd:
    """A function that knows how many of its calls run at most at once, and waits until so many do."""

    def __init__(self, expected: int = 1) -> None:
        self.changed, self.expected, self.running, self.most = threading.Condition(), expected, 0, 0

    def __call__(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with self.changed:
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.expected, 30)
        time.sleep(0.02)  # more come, where they can
        with self.changed:
            self.running -= 1
        return w * x


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [2, 3, 7])
def test_no_more_shards_run_than_there_are_cores(cores: int, slots: int):
    crowd = Crowd(min(cores, slots))
    with many_cores(cores):
        CALLS["dp_apply"](crowd, slots)
    assert crowd.most == min(cores, slots)


def test_callers_share_the_cores():
    crowd, started = Crowd(), threading.Barrier(4)

    def caller() -> None:
        started.wait(30)
        for _ in range(10):
            CALLS["dp_apply"](crowd, 4)

    with many_cores(4):
        callers = [threading.Thread(target=caller) for _ in range(4)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        # A caller that comes while others have all the cores runs its shards itself: it is one thread anyway.
        assert crowd.most <= 4 + 3
    assert has_all_cores()


@pytest.mark.parametrize(
    ("intraop", "cores", "slots", "share"), [(8, 8, 2, 4), (8, 8, 3, 2), (8, 4, 7, 1), (2, 8, 2, 2)]
)
def test_threads_inside_operations_are_divided_and_restored(intraop: int, cores: int, slots: int, share: int):
    meeting, seen = threading.Barrier(min(cores, slots)), []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x[0] < min(cores, slots):  # those that begin at once
            meeting.wait(30)
        seen.append(torch.get_num_threads())
        return w * x

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(intraop)
        with many_cores(cores):
            CALLS["dp_apply"](fn, slots)
            fdp.dp_apply(lambda w, x: x * fdp.psum(1), W, rows(3), fdp.virtual_devices(3), executor="sequential")
        after, fresh = torch.get_num_threads(), []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [share] * slots
    assert (after, fresh) == (intraop, [intraop])


@pytest.mark.parametrize("executor", ["auto", "sequential"])
def test_in_order_unless_it_is_asked_for(executor: Any):
    used = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        used.append(threading.get_ident())
        return w * x

    with many_cores():
        fdp.dp_apply(fn, W, rows(4), fdp.virtual_devices(4), executor=executor)
    assert used == [threading.get_ident()] * 4


@pytest.mark.parametrize("around", [torch.func.grad, torch.func.vmap])
def test_side_by_side_under_transforms(around: Callable[..., Any]):
    """Of those the threads have the same."""
    crowd = Crowd(4)

    def call(w: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(crowd, w, rows(4), fdp.virtual_devices(4), executor="threads").sum()

    with many_cores(4):
        assert torch.equal(
            around(call)(W if around is torch.func.grad else W[None]).reshape(()),
            6 * (torch.ones_like(W) if around is torch.func.grad else W),
        )
    assert crowd.most == 4


def test_seeded_shards_do_not_run_side_by_side():
    running = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        running.append(1)
        assert len(running) == 1
        out = torch.randn(3)
        fdp.dp_apply(lambda w, x: torch.randn(2), w, rows(2), fdp.virtual_devices(2), executor="threads")
        running.pop()
        return out + torch.randn(3)

    def call(executor: Any) -> torch.Tensor:
        return fdp.dp_apply(fn, W, rows(4), fdp.virtual_devices(4), executor=executor, seed=3)

    with many_cores():
        first = call("threads")
        for _ in range(10):
            torch.testing.assert_close(call("threads"), first, rtol=0, atol=0)
    torch.testing.assert_close(call("sequential"), first, rtol=0, atol=0)


# ---------------------------------------------------------------- calls in calls


@pytest.mark.parametrize("outer", ["sequential", "threads"])
@pytest.mark.parametrize("inner", ["sequential", "threads"])
@pytest.mark.parametrize("cores", [2, 4])
def test_nested_calls(outer: Any, inner: Any, cores: int):
    def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def middle(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return fdp.dp_apply(torch.mul, w, x, fdp.virtual_devices(3), executor=outer)

        return fdp.dp_apply(middle, w, x, fdp.virtual_devices(3), executor=inner)

    with many_cores(cores):
        for _ in range(5):
            out = fdp.dp_apply(deep, W, rows(30), fdp.virtual_devices(3), executor=outer)
            assert torch.equal(out, W * rows(30))
    assert has_all_cores()


# ---------------------------------------------------------------- failures


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoNotes(Exception):
    def add_note(self, note: str, /) -> None:
        raise TypeError("no notes")


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_exceptions_that_resist_notes_arrive(executor: Any):
    errors: list[Exception] = [NoNotes("first"), NoText("second")]

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise errors[int(x[0])]

    with pytest.raises(NoNotes, match="first"):
        fdp.dp_apply(fn, W, rows(2), fdp.virtual_devices(2), executor=executor)
    errors.reverse()
    with pytest.raises(NoText) as caught:  # noqa: PT011, it has no text
        fdp.dp_apply(fn, W, rows(2), fdp.virtual_devices(2), executor=executor)
    assert caught.value.__notes__ == [
        "in shard 0 of 2, rows 0:1, on cpu",
        "also in shard 1 of 2, rows 1:2, on cpu: NoNotes: first",
    ]


# ---------------------------------------------------------------- contexts


def test_calls_in_threads_of_the_function_s_own():
    """Shards that have all cores wait for what others compute in threads: these go on without a core after a while."""

    def row(_: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fdp.dp_apply, row, None, x, fdp.virtual_devices(2), executor="threads").result()

    x = torch.arange(8.0)
    with many_cores(2):
        found = within(20, lambda: fdp.dp_apply(fn, None, x, fdp.virtual_devices(2), executor="threads"))
    assert_close_tree(found, 2 * x)
