"""Shards that do not come to a collective: nobody waits for ever, and the error says who has not come and why."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_executor
from tests.collectives.faults import (
    COLLECTIVES,
    DEVICES,
    LIMIT,
    SLOTS,
    OddError,
    argument,
    call,
    each_name,
    each_slot,
    works,
)
from tests.common.depth import few
from tests.common.threads import within


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


def other(name: str) -> str:
    return "psum" if name == "all_gather" else "all_gather"


def raises_between(name: str, odd: bool, x: Tensor) -> Any:
    COLLECTIVES[name](argument(x))
    if odd:
        raise OddError("wrong")
    return COLLECTIVES[name](argument(x))


def returns_early(name: str, odd: bool, x: Tensor) -> Any:
    return x if odd else COLLECTIVES[name](argument(x))


def calls_another(name: str, odd: bool, x: Tensor) -> Any:
    return COLLECTIVES[other(name) if odd else name](argument(x))


def has_another_shape(name: str, odd: bool, x: Tensor) -> Any:
    return COLLECTIVES[name](torch.cat([argument(x)] * (1 + odd)))


def calls_once_more(name: str, odd: bool, x: Tensor) -> Any:
    for _ in range(1 + odd):
        COLLECTIVES[name](argument(x))
    return x


def comes_late(name: str, odd: bool, x: Tensor) -> Any:
    """The others have given up, and wait in vain again."""
    if odd:
        return x
    try:
        return COLLECTIVES[name](argument(x))
    except RuntimeError:
        return COLLECTIVES[name](argument(x))


FAULTS: dict[Callable[..., Any], tuple[type[Exception], Callable[[str, int], str]]] = {
    raises_between: (OddError, lambda name, slot: "^wrong"),
    returns_early: (RuntimeError, lambda name, slot: f"{name} .*shard {slot}, which has returned"),
    calls_another: (
        RuntimeError,
        lambda name, slot: (
            rf"different collectives(?=.*\b{other(name)} in shard {slot})(?=.*\b{name} in shard {(slot + 1) % SLOTS})"
        ),
    ),
    has_another_shape: (ValueError, lambda name, slot: f"{name}.*shard {slot}"),
    calls_once_more: (RuntimeError, lambda name, slot: f"{name} in shard {slot} waits for .*, which has returned"),
    comes_late: (
        RuntimeError,
        lambda name, slot: f"{name} in shard .* waits for .*shard {slot}, which has returned",
    ),
}


@few(4)
@each_executor
@each_slot
@each_name
@pytest.mark.parametrize("fault", FAULTS)
def test_one_is_at_odds_with_the_others(fault: Callable[..., Any], name: str, slot: int, executor: Any):
    kind, said = FAULTS[fault]
    with pytest.raises(kind, match=said(name, slot)):
        call(lambda i, x: fault(name, i == slot, x), executor)
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
        within(LIMIT, calls[first])
    assert caught.value is error
    works(executor)
