"""Shards that do not come to the backward of a collective, and interrupts."""

import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.faults import COLLECTIVES, DEVICES, EXECUTORS, SLOTS, OddError, argument, call, first_run, works
from tests.common.depth import few
from tests.common.threads import within

LINEAR = [name for name in COLLECTIVES if name not in ("pmax", "pmin")]
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_slot = pytest.mark.parametrize("slot", range(SLOTS))
each_name = pytest.mark.parametrize("name", COLLECTIVES)
each_linear = pytest.mark.parametrize("name", LINEAR)


@few(2)
@each_executor
@each_slot
@each_linear
def test_one_raises_in_an_outside_backward(name: str, slot: int, executor: Any):
    raised: list[OddError] = []

    def hook(grad: Tensor) -> None:
        raised.append(OddError("wrong"))
        raise raised[-1]

    def fn(i: int, x: Tensor) -> Tensor:
        out = COLLECTIVES[name](argument(x)) * 1
        if i == slot:
            out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    total = torch.stack([out.sum() for out in outs]).sum()
    with pytest.raises(OddError, match=r"^wrong") as caught:
        within(20, total.backward)
    assert caught.value is raised[-1]
    works(executor)


@few(2)
@each_executor
@each_slot
@each_linear
def test_one_raises_in_a_backward_inside(name: str, slot: int, executor: Any):
    error = OddError("wrong")

    def hook(grad: Tensor) -> None:
        raise error

    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own)) * 1
        if i == slot:
            out.register_hook(hook)
        return torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(OddError, match=r"^wrong") as caught:
        call(fn, executor)
    assert caught.value is error
    works(executor)


@few(2)
@each_executor
@each_slot
@each_linear
def test_one_leaves_out_its_backward(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own))
        return x if i == slot else torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match=f"in shard . waits for .*shard {slot}, which has returned"):
        call(fn, executor)
    works(executor)


@few(2)
@each_executor
@each_slot
@each_linear
def test_one_calls_a_collective_meanwhile(name: str, slot: int, executor: Any):
    """One is in its backward while the others are in a forward."""

    def fn(i: int, x: Tensor) -> Any:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own))
        return fdp.psum(x) if i == slot else torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match="waits for shard") as caught:
        call(fn, executor)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"psum in shard {slot} waits for" in text
    assert f"shard {slot}, which waits in psum" in text
    works(executor)


@each_executor
@each_slot
def test_one_calls_another_in_its_backward(slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        out = fdp.psum(argument(x)) * 1

        def hook(grad: Tensor) -> Tensor:
            return fdp.pmax(grad) if i == slot else fdp.psum(grad)

        out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    with pytest.raises(RuntimeError, match=f"different collectives.*pmax in shard {slot}"):
        within(20, torch.stack([out.sum() for out in outs]).sum().backward)
    works(executor)


@each_executor
@each_slot
def test_a_hook_that_changes_the_shape(slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = fdp.psum(argument(own)) * 1
        if i == slot:
            out.register_hook(lambda grad: grad[:1])
        return torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match="changed the size"):
        call(fn, executor)
    works(executor)


@each_executor
def test_a_second_backward_after_one_that_failed(executor: Any):
    fails = [True]

    def fn(i: int, x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> None:
            if fails[0] and i == 1:
                raise OddError("wrong")

        out = fdp.psum(argument(x)) * 1
        out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    total = torch.stack([out.sum() for out in outs]).sum()
    for _ in range(2):
        with pytest.raises(OddError, match="wrong"):
            within(20, lambda: total.backward(retain_graph=True))
    fails[0] = False
    within(20, lambda: total.backward(retain_graph=True))
    within(20, total.backward)
    works(executor)


# ---------------------------------------------------------------- interrupts


@few(2)
@first_run
@each_executor
@each_slot
@each_name
def test_an_interrupt(name: str, slot: int, executor: Any, known: bool):
    error = KeyboardInterrupt()

    def fn(i: int, x: Tensor) -> Tensor:
        fdp.axis_index()
        if i == slot:
            raise error
        return COLLECTIVES[name](argument(x))

    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT011
        call(fn, executor, known)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    works(executor)


@each_executor
@each_slot
def test_an_interrupt_in_a_backward(slot: int, executor: Any):
    def hook(grad: Tensor) -> None:
        raise KeyboardInterrupt

    def fn(i: int, x: Tensor) -> Tensor:
        out = fdp.psum(argument(x)) * 1
        if i == slot:
            out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        within(20, torch.stack([out.sum() for out in outs]).sum().backward)
    works(executor)


@each_executor
def test_an_interrupt_of_the_caller(executor: Any):
    """Ctrl-C while the slots exchange: the main thread gets it, and the slots stop."""
    main = threading.main_thread().ident
    assert main is not None
    rounds = [0] * SLOTS

    def fn(w: Any, x: Tensor) -> Tensor:
        i = fdp.axis_index()
        for k in range(many):  # without an interrupt it ends too
            rounds[i] = k
            if i == 0 and k == 20:
                signal.pthread_kill(main, signal.SIGINT)
            fdp.psum(k)
        return x

    many = 1
    fdp.dp_apply(fn, None, torch.ones(SLOTS), DEVICES, executor=executor)  # now it is known that its shards meet
    many = 3000
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fdp.dp_apply(fn, None, torch.ones(SLOTS), DEVICES, executor=executor)
    assert max(rounds) < 2900
    works(executor)
