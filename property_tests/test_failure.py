"""Law of failure: the original exception arrives with notes, nothing is kept, and the next call works."""

import contextlib
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.functions import sines
from property_tests.places import CPU
from property_tests.strategies import Split, splits
from tests.common.settings import without_collector


class OddError(Exception):
    """An exception that cannot be made anew from its message."""

    def __init__(self, rows: list[int], reason: str) -> None:
        super().__init__(f"{reason} at {rows}")
        self.rows = rows


class QuietError(BaseException):
    """Not an Exception, like KeyboardInterrupt: it is passed on as it is."""


def through_dp_apply(function: Callable[..., Any], w: Any, x: Any, split: Split) -> Any:
    return fdp.dp_apply(function, w, x, **split.options)


def through_shard_map(function: Callable[..., Any], w: Any, x: Any, split: Split) -> Any:
    return fdp.shard_map(function, in_dims=(None, 0), **split.options)(w, x)


def through_parallel_apply(function: Callable[..., Any], w: Any, x: Any, split: Split) -> Any:
    sharded = fdp.scatter(x, split.devices, weights=split.weights)
    return fdp.parallel_apply(function, fdp.replicate(w, sharded.devices), sharded, executor=split.executor)


def through_value_and_grad(function: Callable[..., Any], w: Any, x: Any, split: Split) -> Any:
    return fdp.value_and_grad(lambda w, x: function(w, x).mean(), **split.options)(w, x)


CALLS = (through_dp_apply, through_shard_map, through_parallel_apply, through_value_and_grad)


def slots_of(x: torch.Tensor, split: Split) -> tuple[tuple[int, ...], tuple[torch.device, ...]]:
    """Rows and device of each shard."""
    sharded = fdp.scatter(x, split.devices, weights=split.weights)
    assert sharded.sizes is not None
    return sharded.sizes, sharded.devices


@given(splits(at_least=1), st.sampled_from(CALLS), st.data())
def test_l12_failures_are_noted(split: Split, through: Callable[..., Any], data: st.DataObject):
    x = torch.arange(split.rows, dtype=torch.float64)
    sizes, devices = slots_of(x, split)
    failing = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    raised: dict[int, Exception] = {}
    ran: list[int] = []

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ran.append(int(x[0]))
        shard = [start for start, _ in bounds].index(int(x[0]))
        if shard in failing:
            raised[shard] = OddError(x.tolist(), "wrong") if shard % 2 == 0 else ValueError("bad value")
            raise raised[shard]
        return x * w

    w = torch.ones((), dtype=torch.float64)
    with pytest.raises((OddError, ValueError), match=r"wrong|bad value") as caught:
        through(function, w, x, split)
    assert caught.value is raised[min(failing)]
    assert sorted(ran) == [start for start, _ in bounds]  # the others ran too
    rows = [f"rows {start}:{end}, on {device}" for (start, end), device in zip(bounds, devices, strict=True)]
    places = [f"in shard {i} of {len(sizes)}, {rows[i]}" for i in sorted(failing)]
    kinds = [f"{type(raised[i]).__name__}: {raised[i]}" for i in sorted(failing)]
    kinds = [kinds[0], *("the same" if one == before else one for before, one in pairwise(kinds))]
    also = [f"also {place}: {kind}" for place, kind in zip(places[1:], kinds[1:], strict=True)]
    assert caught.value.__notes__ == [places[0], *also]


@given(splits(at_least=1), st.sampled_from(CALLS), st.sampled_from(["fails", "interrupted", "works"]))
def test_l12_nothing_is_kept(split: Split, through: Callable[..., Any], ending: str):
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if ending == "fails" and x[-1] >= split.rows / 2:
            raise OddError(x.tolist(), "wrong")
        if ending == "interrupted" and x[-1] >= split.rows / 2:
            raise QuietError
        return x * w

    def call() -> list[weakref.ref[Any]]:
        w, x = torch.ones((), dtype=torch.float64), torch.arange(1.0 + split.rows, dtype=torch.float64)[1:]
        expected = {"fails": OddError, "interrupted": QuietError}.get(ending)
        notes = None
        try:
            through(function, w, x, split)
        except (OddError, QuietError) as error:
            raised = type(error)
            notes = getattr(error, "__notes__", None)
        else:
            raised = None
        assert raised is expected
        assert (notes is not None) == (ending == "fails")
        return [weakref.ref(w), weakref.ref(x)]

    with without_collector():
        assert [reference() for reference in call()] == [None, None]


@given(splits(at_least=1), st.sampled_from(CALLS), st.sampled_from([OddError, QuietError]), st.integers(0, 7))
def test_l12_the_next_call_works(split: Split, through: Callable[..., Any], kind: type, which: int):
    x = sines(split.rows)
    w = torch.full((), 2.0, dtype=torch.float64)
    calls: list[None] = []

    def works(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * w)

    def fails(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) > which:
            raise kind([1], "wrong") if kind is OddError else kind()
        return works(w, x)

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        out = through(function, w, x, split)
        return list(out.shards if isinstance(out, fdp.Sharded) else out if isinstance(out, tuple) else [out])

    before = run(works)
    with contextlib.suppress(OddError, QuietError):
        run(fails)
    after = run(works)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


class FailsBackward(torch.autograd.Function):
    """The identity, until it is differentiated."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OddError([], "backward")


@given(splits(at_least=1))
def test_l12_a_failure_in_the_backward_is_noted(split: Split):
    x = torch.arange(split.rows, dtype=torch.float64)
    w = torch.ones((), dtype=torch.float64)
    with pytest.raises(OddError, match="backward") as caught:
        fdp.grad(lambda w, x: FailsBackward.apply(w * x).mean(), **split.options)(w, x)
    sizes, devices = slots_of(x, split)
    notes, first = caught.value.__notes__, f"in shard 0 of {len(sizes)}, rows 0:{sizes[0]}, on {devices[0]}"
    if len(sizes) > 1 and any(device != CPU for device in devices):
        where = ", ".join(dict.fromkeys(map(str, devices)))
        assert notes == [f"in the one backward of {len(sizes)} shards, on {where}"]
        return
    assert notes[0] == first
    assert len(notes) == len(sizes)


@given(splits(at_least=1), st.sampled_from([1, 2, 3]))
def test_l12_microbatches_are_noted(split: Split, microbatches: int):
    x = torch.arange(split.rows, dtype=torch.float64)
    sizes, devices = slots_of(x, split)
    pieces: list[str] = []
    end = 0
    for shard, size in enumerate(sizes):
        parts = [len(part) for part in torch.arange(size).tensor_split(min(size, microbatches))]
        for piece, part in enumerate(parts):
            microbatch = f", microbatch {piece}" if microbatches > 1 and max(sizes) > 1 else ""
            where = f"in shard {shard} of {len(sizes)}{microbatch}, rows {end}:{end + part}, on {devices[shard]}"
            pieces += [where] * (piece == 0)  # no other round begins
            end += part

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise OddError(x.tolist(), "wrong")

    with pytest.raises(OddError, match="wrong") as caught:
        fdp.grad(loss, microbatches=microbatches, **split.options)(torch.ones((), dtype=torch.float64), x)
    notes = [note.removeprefix("also ").split(": OddError")[0] for note in caught.value.__notes__]
    assert notes == pieces
