"""What is left after a collective that failed: no threads, no references, no state; many callers at once."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import EXECUTORS, each_executor
from tests.collectives.faults import DEVICES, LIMIT, SLOTS, OddError, argument, call, works
from tests.common.depth import few
from tests.common.threads import many_cores, side_by_side, wake_workers, within

# ---------------------------------------------------------------- what is left


def raises(kind: type[BaseException]) -> Callable[[Tensor], Any]:
    def fault(x: Tensor) -> Any:
        raise kind

    return fault


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "raises": raises(OddError),
    "interrupt": raises(KeyboardInterrupt),
    "returns": lambda x: x,
    "other": fdp.pmax,
    "shape": lambda x: fdp.psum(torch.stack([x, x])),
}


@each_executor
@pytest.mark.parametrize("fault", ["none", "backward", *FAULTS])
def test_no_thread_is_left_over(fault: str, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        if i == 1 and fault in FAULTS:
            return FAULTS[fault](x)
        out = fdp.psum(argument(x)) * 1
        if fault == "backward" and i == 1:
            out.register_hook(lambda grad: 1 / 0)
        return out * 2

    def once() -> None:
        with contextlib.suppress(OddError, RuntimeError, ValueError, ZeroDivisionError, KeyboardInterrupt):
            outs = call(fn, executor)
            within(LIMIT, torch.stack([out.sum() for out in outs]).sum().backward)

    once()
    before = threading.active_count()
    for _ in range(5):
        once()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)  # those that were let go of are about to end
    assert threading.active_count() <= before


@each_executor
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_nothing_is_kept(fault: str, executor: Any):
    def once() -> list[weakref.ref[Any]]:
        seen: list[weakref.ref[Any]] = []

        def fn(w: Tensor, x: Tensor) -> Tensor:
            y = w * x.sum()
            seen.append(weakref.ref(y))
            if fdp.axis_index() == 1 and fault in FAULTS:
                return FAULTS[fault](y)
            return fdp.psum(y) * x

        w, x = torch.ones(()), torch.ones(SLOTS)
        with contextlib.suppress(OddError, RuntimeError, ValueError, KeyboardInterrupt):
            fdp.dp_apply(fn, w, x, DEVICES, executor=executor)
        return [weakref.ref(w), weakref.ref(x), weakref.ref(fn), *seen]

    once()
    gc.collect()
    references = once()
    gc.collect()  # the traceback of an error may be part of a cycle
    wake_workers()
    assert [reference() for reference in references] == [None] * len(references)


# ---------------------------------------------------------------- many at once


@each_executor
@pytest.mark.parametrize("seed", [None, 3])
def test_many_callers(seed: int | None, executor: Any):
    """Some of them with faults."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        w = torch.tensor(float(number), requires_grad=True)

        def fn(w: Tensor, x: Tensor) -> Tensor:
            if number % 3 == 2 and fdp.axis_index() == number % SLOTS:
                raise OddError(number)
            return fdp.psum((w * x).sum()) * x + fdp.all_gather(w * x).sum()

        try:
            for _ in range(5):
                options: Any = {"executor": executor, "seed": seed}
                if number % 3 == 2:
                    with pytest.raises(OddError, match=str(number)):
                        fdp.dp_apply(fn, w, torch.ones(SLOTS), DEVICES, **options)
                    continue
                out = fdp.dp_apply(fn, w, torch.ones(SLOTS), DEVICES, **options)
                assert torch.equal(out, torch.full((SLOTS,), 2.0 * SLOTS * number))
                (grad,) = torch.autograd.grad(out.sum(), w)
                assert grad == 2 * SLOTS**2
        except BaseException as error:
            errors.append(error)

    def all_at_once() -> None:
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert not any(thread.is_alive() for thread in threads)

    before = threading.active_count()
    with side_by_side():
        within(45, all_at_once)
    assert not errors
    assert threading.active_count() <= before + 8 * SLOTS  # no more than were used at once
    works(executor)


@few()
@each_executor
@pytest.mark.parametrize("inner_executor", EXECUTORS)
@pytest.mark.parametrize("fault", ["none", "outer", "inner", "inner-other", "inner-shape", "early"])
def test_nested(fault: str, inner_executor: Any, executor: Any):
    error = OddError("wrong")

    def fn(i: int, x: Tensor) -> Tensor:
        def inner(w: Any, y: Tensor) -> Tensor:
            j = fdp.axis_index("inner")
            if i == 1 and j == 1:
                if fault == "inner":
                    raise error
                if fault == "inner-other":
                    return fdp.pmax(y, "inner")
                if fault == "inner-shape":
                    return fdp.psum(y.sum(), "inner")
                if fault == "early":
                    return y
            return fdp.psum(y, "inner")

        if fault == "outer" and i == 1:
            raise error
        y = fdp.dp_apply(
            inner, None, torch.ones(2, 2), fdp.virtual_devices(2), executor=inner_executor, axis_name="inner"
        )
        return fdp.psum(y * x.sum())

    if fault == "none":
        assert torch.equal(call(fn, executor)[0], torch.full((2, 2), 36.0))
    else:
        kinds = {"outer": OddError, "inner": OddError, "inner-shape": ValueError}
        with pytest.raises(kinds.get(fault, RuntimeError), match=r"wrong|psum|inner") as caught:
            call(fn, executor)
        if isinstance(caught.value, OddError):
            assert caught.value is error
    works(executor)


@each_executor
@pytest.mark.parametrize("where", ["argument", "captured"])
def test_hooks_of_a_tensor_see_its_gradient_once(where: str, executor: Any):
    c, seen = torch.tensor(3.0, requires_grad=True), []
    c.register_hook(lambda grad: (seen.append(grad.item()), 2 * grad)[1])
    given = c if where == "argument" else None

    def f(w: Any, x: torch.Tensor) -> torch.Tensor:
        return fdp.psum(((c if w is None else w) * x).sum())

    for _ in range(2):
        c.grad = None
        fdp.dp_apply(
            f, given, torch.tensor([1.0, 2.0]), fdp.virtual_devices(2), out_dims=None, executor=executor
        ).backward()
        assert c.grad == 6
    assert seen == [3, 3]


@each_executor
def test_a_function_that_catches_everything_around_a_collective(executor: Any):
    """It catches nothing of how slots wait, and goes on after a failure of another."""

    def swallows(fails: bool, x: torch.Tensor) -> torch.Tensor:
        if fails and fdp.axis_index():
            return fdp.pmax(x)  # which the first catches
        try:
            return fdp.psum(x.sum()) + x
        except:  # noqa: E722
            return -x

    x = torch.arange(4.0)
    assert torch.equal(fdp.dp_apply(swallows, False, x, DEVICES[:2], executor=executor), x + 6)
    with pytest.raises(RuntimeError, match="different collectives: psum in shard 0, pmax in shard 1"):
        fdp.dp_apply(swallows, True, x, DEVICES[:2], executor=executor)


@each_executor
def test_all_catch_an_exception_around_a_collective(executor: Any):
    def tries(x: torch.Tensor) -> torch.Tensor:
        try:
            fdp.psum(torch.ones(2 + fdp.axis_index()))
        except (RuntimeError, ValueError):
            x = x + 1
        return x * fdp.psum(x.sum())

    found = fdp.shard_map(tries, devices=DEVICES, executor=executor)(torch.arange(3.0))
    assert torch.equal(found, 6 * torch.arange(1.0, 4.0))


@pytest.mark.parametrize("call", ["dp_apply", "parallel_apply", "without collectives"])
def test_no_more_threads(call: str, monkeypatch: pytest.MonkeyPatch):
    """What the system refuses arrives at the caller, and the next call works."""
    slots = threading.active_count() + 2  # more than there are threads that wait for work
    rows = fdp.scatter(torch.ones(slots), fdp.virtual_devices(slots))

    def run() -> Any:
        if call == "parallel_apply":
            return fdp.parallel_apply(lambda x: fdp.psum(x.sum()), rows)[0]
        if call == "dp_apply":
            return fdp.dp_apply(lambda _, x: fdp.psum(x.sum()), None, rows, out_dims=None)
        return fdp.dp_apply(lambda _, x: x.sum(), None, rows, out_dims="sum", executor="threads")

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with many_cores(slots):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                run()
        assert run() == slots
