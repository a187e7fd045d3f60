"""Exceptions and interrupts of a mapped function."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree
from tests.common.functions import never, scores
from tests.common.numbers import numbers

W = numbers(4)

SLOTS = fdp.virtual_devices(3)


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def failing(*slots: int, error: BaseException | None = None) -> Callable[..., Any]:
    """A function of rows `0, 1, 2, …`, one per slot, that fails for some."""

    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) in slots:
            raise error or ValueError(f"bad row {int(x[0])}")
        return x

    return fn


RUNS: dict[str, Callable[..., Any]] = {
    "dp_apply": lambda fn: fdp.dp_apply(fn, W, torch.arange(3), SLOTS),
    "shard_map": lambda fn: fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0))(W, torch.arange(3)),
    "parallel_apply": lambda fn: fdp.parallel_apply(fn, W, fdp.scatter(torch.arange(3), SLOTS)),
    "grad": lambda fn: fdp.grad(lambda w, x: (w.sum() * fn(w, x)).mean(), devices=SLOTS)(W, torch.arange(3)),
    "grad-transformed": lambda fn: torch.func.vmap(
        lambda w: fdp.grad(lambda w, x: (w.sum() * fn(w, x)).mean(), devices=SLOTS)(w, torch.arange(3))
    )(numbers(2, 4)),
}


@pytest.mark.parametrize("run", RUNS)
def test_an_exception_arrives_as_it_is(run: str):
    error = TwoArguments(7, "text")
    with pytest.raises(TwoArguments, match="7: text") as info:
        RUNS[run](failing(2, error=error))
    assert info.value is error
    assert info.value.code == 7
    assert info.value.__notes__ == ["in shard 2 of 3, rows 2:3, on cpu"]
    assert info.value.__cause__ is None


@pytest.mark.parametrize("run", RUNS)
def test_all_exceptions_are_named(run: str):
    with pytest.raises(ValueError, match="bad row 0") as info:
        RUNS[run](failing(0, 2))
    assert info.value.__notes__ == [
        "in shard 0 of 3, rows 0:1, on cpu",
        "also in shard 2 of 3, rows 2:3, on cpu: ValueError: bad row 2",
    ]


def test_an_exception_that_is_raised_again_has_its_notes_once():
    error = ValueError("bad")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            fdp.dp_apply(failing(0, 2, error=error), W, torch.arange(3), SLOTS)
    assert error.__notes__ == [
        "in shard 0 of 3, rows 0:1, on cpu",
        "also in shard 2 of 3, rows 2:3, on cpu: the same",
    ]


def test_an_exception_on_one_slot_has_a_note_too():
    with pytest.raises(ValueError, match="bad row 0") as info:
        fdp.dp_apply(failing(0), W, torch.arange(3), "cpu")
    assert info.value.__notes__ == ["in shard 0 of 1, rows 0:3, on cpu"]


def test_microbatches_are_named():
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w.sum() * failing(3)(w, x)).mean()

    with pytest.raises(ValueError, match="bad row 3") as info:
        fdp.grad(loss, devices=["cpu"] * 2, microbatches=2)(W, torch.arange(4))
    assert info.value.__notes__ == ["in shard 1 of 2, microbatch 1, rows 3:4, on cpu"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_as_they_are(run: str, kind: type[BaseException]):
    error = kind("stop")
    with pytest.raises(kind, match="stop") as info:
        RUNS[run](failing(1, error=error))
    assert info.value is error
    assert not hasattr(error, "__notes__")
    assert_same_tree(fdp.dp_apply(failing(), W, torch.arange(3), SLOTS), torch.arange(3))  # the next call works


def test_an_interrupt_comes_before_failures():
    def fn(_: Any, x: torch.Tensor) -> None:
        raise ValueError("failed") if int(x) == 0 else KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        fdp.dp_apply(fn, W, torch.arange(3), SLOTS)


FAILURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: fdp.dp_apply(scores, W, x, SLOTS),
    "grad": lambda x: fdp.value_and_grad(lambda w, x: scores(w, x).mean(), devices=SLOTS)(W, x),
    "shard": lambda x: fdp.dp_apply(failing(0), W, x, SLOTS),
    "interrupt": lambda x: fdp.dp_apply(failing(0, error=KeyboardInterrupt()), W, x, SLOTS),
    "loss": lambda x: fdp.grad(failing(0), devices=SLOTS)(W, x),
    "rows": lambda x: fdp.dp_apply(never, W, (x, x[:1]), SLOTS),
    "write": lambda x: fdp.dp_apply(lambda w, x: x.add_(1), W, x, SLOTS),
    "join": lambda x: fdp.dp_apply(lambda w, x: (x, len(x)), W, x, SLOTS),
    "structure": lambda x: fdp.dp_apply(lambda w, x: list(x), W, x, SLOTS),
    "parallel": lambda x: fdp.parallel_apply(failing(0), W, fdp.scatter(x, SLOTS)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_no_reference_to_the_inputs_is_left(name: str):
    gc.collect()
    gc.disable()
    try:
        x = torch.zeros(5, 4, dtype=torch.float64)
        alive = weakref.ref(x)
        with contextlib.suppress(Exception, KeyboardInterrupt):
            FAILURES[name](x)
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_equal_failures_of_many_slots_are_said_once():
    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad" if x[0] < 6 else "worse")

    with pytest.raises(ValueError, match="bad") as caught:
        fdp.dp_apply(fn, None, torch.arange(8), fdp.virtual_devices(8))
    assert caught.value.__notes__ == [
        "in shard 0 of 8, rows 0:1, on cpu",
        "also in shard 1 of 8, rows 1:2, on cpu: the same",
        "also in shard 2 of 8, rows 2:3, on cpu: the same",
        "also in shard 3 of 8, rows 3:4, on cpu: the same",
        "also in shard 4 of 8, rows 4:5, on cpu: the same",
        "also in shard 5 of 8, rows 5:6, on cpu: the same",
        "also in shard 6 of 8, rows 6:7, on cpu: ValueError: worse",
        "also in shard 7 of 8, rows 7:8, on cpu: the same",
    ]
