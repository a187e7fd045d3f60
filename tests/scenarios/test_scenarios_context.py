"""Context and failure: what a mapped function sees of its surroundings, and what is left when it fails."""

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.settings import default_device, default_dtype
from tests.common.threads import has_all_cores, side_by_side, wake_workers

EXECUTORS: Any = ("auto", "sequential", "threads")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
W = numbers(3, 3)
X = numbers(13, 3)


# ---- surroundings


@contextlib.contextmanager
def several() -> Iterator[None]:
    with default_dtype(), torch.device("meta"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": default_device,
    "default device, as a context": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "several": several,
}


def what_it_sees(w: Tensor, x: Tensor) -> Any:
    """No tensors, so slots must agree; and a tensor, so that there is something to compare."""
    made, product = torch.ones(2), x @ w
    seen = {
        "grad mode": torch.is_grad_enabled(),
        "requires grad": product.requires_grad,
        "inference": torch.is_inference_mode_enabled(),
        "is inference": product.is_inference(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "product": product.dtype,
        "device": torch.get_default_device(),
        "made on": made.device,
        "dtype": torch.get_default_dtype(),
        "made of": made.dtype,
    }
    return seen, product.sin()


@few()
@each_executor
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_function_returns_what_it_sees(name: str, slots: int, executor: Any):
    w, x = W.float().requires_grad_(), X.float()
    plainly, _ = what_it_sees(w, x)
    with SURROUNDINGS[name]():
        want = what_it_sees(w, x)
        assert (want[0] == plainly) == (name == "nothing")
        for _ in range(3):
            got = fdp.dp_apply(what_it_sees, w, x, fdp.virtual_devices(slots), executor=executor)
            assert got[0] == want[0]
            assert got[1].dtype == want[1].dtype
            assert (got[1].requires_grad, got[1].is_inference()) == (want[1].requires_grad, want[1].is_inference())
            torch.testing.assert_close(got[1], want[1])
    assert what_it_sees(w, x)[0] == plainly


@few()
@each_executor
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_loss_returns_what_it_sees(name: str, slots: int, executor: Any):
    """Grad mode is on inside of gradient functions, as in torch.func; the rest is what the caller set."""

    def loss(w: Tensor, x: Tensor) -> Any:
        hidden, made = x @ w, torch.ones(1)
        return hidden.float().sin().mean(), (torch.is_grad_enabled(), hidden.dtype, made.dtype, made.device)

    w, x = W.float(), X.float()
    options: Any = {"devices": fdp.virtual_devices(slots), "executor": executor, "has_aux": True}
    with SURROUNDINGS[name]():
        (value, aux), grads = fdp.value_and_grad(loss, **options)(w, x)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = w.clone().requires_grad_()
            want, want_aux = loss(leaf, x)
            (want_grads,) = torch.autograd.grad(want, leaf)
    assert aux == want_aux
    assert aux[0]
    tolerance = 2e-2 if want_aux[1] is torch.bfloat16 else 1e-5
    torch.testing.assert_close((value, grads), (want.detach(), want_grads), rtol=tolerance, atol=tolerance)


# ---- one model, many threads


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(*layers).double()


def from_threads(call: Callable[[int], Any], want: list[Any], times: int) -> list[str]:
    """Call with the number of the thread, `times` times in each; what was wrong."""
    wrong, start = [], threading.Barrier(len(want))

    def caller(i: int) -> None:
        start.wait(30)
        for _ in range(times):
            try:
                assert_close_tree(call(i), want[i])
            except Exception as error:
                wrong.append(f"thread {i}: {error!r}")

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(len(want))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


each_times = pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.deep)])


@each_times
def test_calls_of_one_model_from_eight_threads(times: int):
    """Each thread with parameters of its own."""
    apply, (params, buffers) = fdp.functional(conv_net())
    own = [{name: value + i for name, value in params.items()} for i in range(8)]
    x = X[:, None]
    want = [apply((p, buffers), x) for p in own]
    assert len({float(out.sum()) for out, _ in want}) == 8
    with side_by_side(8):
        assert from_threads(lambda i: apply((own[i], buffers), x), want, 50 * times) == []


@each_times
@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_mapped_calls_of_one_model_from_eight_threads(executor: Any, times: int):
    apply, (params, buffers) = fdp.functional(conv_net().eval())
    own = [{name: value + i for name, value in params.items()} for i in range(8)]
    x, devices = X[:5, None], fdp.virtual_devices(2)

    def loss(p: Any, x: Tensor) -> Tensor:
        return apply((p, buffers), x)[0].square().mean()

    want = [torch.func.grad_and_value(loss)(p, x) for p in own]
    values = [value for _, value in want]
    both = fdp.grad_and_value(loss, devices=devices, executor=executor)

    def mapped(i: int) -> Tensor:
        return fdp.dp_apply(loss, own[i], x, devices, out_dims="mean", executor=executor)

    with side_by_side(8):
        assert from_threads(lambda i: both(own[i], x), want, 8 * times) == []
        assert from_threads(mapped, values, 10 * times) == []


# ---- failures


class TwoArguments(Exception):
    """One that cannot be made anew from its message."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


def failing(errors: dict[int, BaseException]) -> Callable[[Tensor, Tensor], Tensor]:
    """Slot i raises what is under i; rows are numbered."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        for first, error in errors.items():
            if int(x[0]) == first:
                raise error
        return w * x

    return fn


FACTOR = torch.tensor(2.0, dtype=torch.float64)
ROWS = torch.arange(8, dtype=torch.float64)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "dp_apply": lambda fn, executor: fdp.dp_apply(fn, FACTOR, ROWS, fdp.virtual_devices(4), executor=executor),
    "value_and_grad": lambda fn, executor: fdp.value_and_grad(
        lambda w, x: fn(w, x).mean(), devices=fdp.virtual_devices(4), executor=executor
    )(FACTOR, ROWS),
    "parallel_apply": lambda fn, executor: fdp.parallel_apply(
        fn, FACTOR, fdp.scatter(ROWS, fdp.virtual_devices(4)), executor=executor
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@few()
@each_executor
@each_call
def test_slot_2_fails(call: Callable[..., Any], executor: Any):
    error = TwoArguments(404, "no such row")
    with pytest.raises(TwoArguments, match="404: no such row") as caught:
        call(failing({4: error}), executor)
    assert caught.value is error
    assert (error.code, error.reason) == (404, "no such row")
    assert error.__notes__ == ["in shard 2 of 4, rows 4:6, on cpu"]
    call(failing({}), executor)


@few()
@each_executor
@each_call
def test_two_slots_fail(call: Callable[..., Any], executor: Any):
    first, second = TwoArguments(1, "first"), KeyError("second")
    with pytest.raises(TwoArguments, match="1: first") as caught:
        call(failing({2: first, 6: second}), executor)
    assert caught.value is first
    assert first.__notes__ == [
        "in shard 1 of 4, rows 2:4, on cpu",
        "also in shard 3 of 4, rows 6:8, on cpu: KeyError: 'second'",
    ]


# ---- interrupts


@few()
@each_executor
@pytest.mark.parametrize("at", [0, 4, 6])
@pytest.mark.parametrize("how", ["signal", "raise"])
@pytest.mark.parametrize("name", ["dp_apply", "value_and_grad"])
def test_an_interrupt_leaves_nothing_behind(name: str, how: str, at: int, executor: Any):
    """Not even for the garbage collector, whichever shard it comes in; and the next call works."""
    devices = fdp.virtual_devices(4)
    refs: list[weakref.ref[Tensor]] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        out = w * x
        refs.extend(map(weakref.ref, (x, out)))
        if int(x[0]) == at and how == "raise":
            raise KeyboardInterrupt
        if int(x[0]) == at:
            os.kill(os.getpid(), signal.SIGINT)  # comes to the main thread, sooner or later
            time.sleep(0.002)
        return out

    def interrupted() -> None:
        w, x = FACTOR.clone(), ROWS.clone()
        refs.extend(map(weakref.ref, (w, x)))
        if name == "dp_apply":
            fdp.dp_apply(fn, w, x, devices, executor=executor)
        else:
            fdp.value_and_grad(lambda w, x: fn(w, x).mean(), devices=devices, executor=executor)(w, x)

    CALLS[name](torch.mul, "threads")  # starts the workers, which stay
    threads = set(threading.enumerate())
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt, match=r"^$") as caught:
                interrupted()
            assert not hasattr(caught.value, "__notes__")
            del caught
            assert len(refs) >= 4
            wake_workers()
            assert [ref() for ref in refs if ref() is not None] == []
            assert_close_tree(CALLS["dp_apply"](torch.mul, executor), ROWS * 2)
            assert_close_tree(CALLS["value_and_grad"](torch.mul, executor), (ROWS.mean() * 2, ROWS.mean()))
    finally:
        gc.enable()
    assert set(threading.enumerate()) == threads
    assert has_all_cores()
