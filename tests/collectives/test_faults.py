"""Shards that do not come to a collective: nobody waits for ever, and the error says who has not come and why."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.faults import COLLECTIVES, DEVICES, EXECUTORS, SLOTS, OddError, argument, call, works
from tests.common.depth import few
from tests.common.threads import within

each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_slot = pytest.mark.parametrize("slot", range(SLOTS))
each_name = pytest.mark.parametrize("name", COLLECTIVES)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_raises(name: str, slot: int, executor: Any):
    raised: list[OddError] = []

    def fn(i: int, x: Tensor) -> Tensor:
        if i == slot:
            raised.append(OddError("wrong"))
            raise raised[-1]
        return COLLECTIVES[name](argument(x))

    with pytest.raises(OddError, match=r"^wrong") as caught:
        call(fn, executor)
    assert caught.value is raised[-1]
    notes = caught.value.__notes__
    assert notes[0] == f"in shard {slot} of 3, rows {slot}:{slot + 1}, on cpu"
    assert len(notes) == SLOTS
    for note in notes[1:]:
        assert re.search(f"{name} in shard .* waits for .*shard {slot}, which has raised OddError: wrong", note)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_raises_afterwards(name: str, slot: int, executor: Any):
    """Between two collectives."""

    def fn(i: int, x: Tensor) -> Tensor:
        COLLECTIVES[name](argument(x))
        if i == slot:
            raise OddError("wrong")
        return COLLECTIVES[name](argument(x))

    with pytest.raises(OddError, match=r"^wrong"):
        call(fn, executor)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_returns_early(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        return x if i == slot else COLLECTIVES[name](argument(x))

    with pytest.raises(RuntimeError, match=f"{name} .*shard {slot}, which has returned"):
        call(fn, executor)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_calls_another(name: str, slot: int, executor: Any):
    other = "all_gather" if name != "all_gather" else "psum"

    def fn(i: int, x: Tensor) -> Tensor:
        return COLLECTIVES[other if i == slot else name](argument(x))

    with pytest.raises(RuntimeError, match="different collectives") as caught:
        call(fn, executor)
    assert f"{other} in shard {slot}" in str(caught.value)
    assert f"{name} in shard {(slot + 1) % SLOTS}" in str(caught.value)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_has_another_shape(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        value = argument(x)
        return COLLECTIVES[name](torch.cat([value, value]) if i == slot else value)

    with pytest.raises(ValueError, match=f"{name}.*shard {slot}"):
        call(fn, executor)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_name
def test_one_calls_once_more(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        for _ in range(1 + (i == slot)):
            COLLECTIVES[name](argument(x))
        return x

    with pytest.raises(RuntimeError, match=f"{name} in shard {slot} waits for .*, which has returned"):
        call(fn, executor)
    works(executor)


@each_executor
@each_slot
def test_one_catches_the_error_of_a_collective(slot: int, executor: Any):
    """The others do not hang on it."""

    def fn(i: int, x: Tensor) -> Tensor:
        try:
            fdp.psum(argument(torch.cat([x, x], 1) if i == slot else x))
        except (ValueError, RuntimeError):
            if i == slot:
                return x
            raise
        return fdp.psum(x)

    with pytest.raises((ValueError, RuntimeError), match="psum"):
        call(fn, executor)
    works(executor)


@each_executor
def test_all_catch_the_error_and_go_on(executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError, RuntimeError):
            fdp.psum(torch.ones(i + 1))
        return fdp.psum(argument(x))

    with contextlib.suppress(ValueError, RuntimeError):
        for out in call(fn, executor):
            assert torch.equal(out, torch.full((3, 2), 3.0))
    works(executor)


@each_executor
def test_all_fail(executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        fdp.psum(0)
        raise OddError(f"wrong in {i}")

    with pytest.raises(OddError, match="wrong in 0") as caught:
        call(fn, executor)
    assert [note.split(", rows")[0] for note in caught.value.__notes__] == [
        "in shard 0 of 3",
        "also in shard 1 of 3",
        "also in shard 2 of 3",
    ]
    works(executor)


@each_executor
@each_slot
@pytest.mark.parametrize("first", ["value_and_grad", "parallel_apply", "microbatches"])
def test_other_calls(first: str, slot: int, executor: Any):
    error = OddError("wrong")

    def fn(w: Tensor, x: Tensor) -> Tensor:
        fdp.psum(0)
        if fdp.axis_index() == slot:
            raise error
        return fdp.psum((w * x).sum())

    options: Any = {"devices": DEVICES, "executor": executor}
    w, x = torch.ones(()), torch.ones(2 * SLOTS)
    calls: dict[str, Callable[[], Any]] = {
        "value_and_grad": lambda: fdp.value_and_grad(fn, **options)(w, x),
        "parallel_apply": lambda: fdp.parallel_apply(fn, w, fdp.scatter(x, DEVICES), executor=executor),
        "microbatches": lambda: fdp.value_and_grad(fn, microbatches=2, **options)(w, x),
    }
    with pytest.raises(OddError, match=r"^wrong") as caught:
        within(20, calls[first])
    assert caught.value is error
    works(executor)
