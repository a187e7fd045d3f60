"""Shards that do not come to the backward of a collective, and interrupts."""

import signal
import threading
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

LINEAR = [name for name in COLLECTIVES if name not in ("pmax", "pmin")]
each_linear = pytest.mark.parametrize("name", LINEAR)


@few(2)
@each_executor
@each_slot
@each_linear
@pytest.mark.parametrize("kind", [OddError, KeyboardInterrupt])
def test_one_raises_in_an_outside_backward(kind: type[BaseException], name: str, slot: int, executor: Any):
    raised: list[BaseException] = []

    def hook(grad: Tensor) -> None:
        raised.append(kind("wrong"))
        raise raised[-1]

    def fn(i: int, x: Tensor) -> Tensor:
        out = COLLECTIVES[name](argument(x)) * 1
        if i == slot:
            out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    total = torch.stack([out.sum() for out in outs]).sum()
    with pytest.raises(kind, match=r"^wrong") as caught:
        within(LIMIT, total.backward)
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
        def loss(own: Tensor) -> Tensor:
            out = COLLECTIVES[name](argument(own)) * 1
            if i == slot:
                out.register_hook(hook)
            return (out * 2).sum()

        return torch.func.grad(loss)(x)

    with pytest.raises(OddError, match=r"^wrong") as caught:
        call(fn, executor)
    assert caught.value is error
    works(executor)


@each_executor
@pytest.mark.parametrize("meets", [True, False])
def test_a_note_says_which_backward_failed(meets: bool, executor: Any):
    """Of slots that have met there is one."""
    error = OddError("wrong")

    def hook(grad: Tensor) -> None:
        raise error

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = w * (x - fdp.pmean(x) if meets else x)
        if fdp.axis_index() == 1:
            y.register_hook(hook)
        return y.square().mean()

    with pytest.raises(OddError, match="wrong") as caught:
        fdp.grad(loss, devices=fdp.virtual_devices(3), executor=executor)(torch.tensor(2.0), torch.ones(3))
    assert caught.value is error
    (note,) = caught.value.__notes__
    assert note == ("in the one backward of 3 shards, on cpu" if meets else "in shard 1 of 3, rows 1:2, on cpu")


@few(2)
@each_executor
@each_slot
@each_linear
@pytest.mark.parametrize("comes", [False, True], ids=["leaves it out", "calls another"])
def test_one_does_not_come_to_its_backward(comes: bool, name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Any:
        out, vjp, *_ = torch.func.vjp(lambda own: COLLECTIVES[name](argument(own)), x)
        if i == slot:
            return fdp.pmax(x) if comes else x
        return vjp(out)[0]

    absent = f"in shard . waits for .*shard {slot}, which has returned"
    another = f"the shards call different collectives: .*pmax in shard {slot}"
    with pytest.raises(RuntimeError, match=another if comes else absent):
        call(fn, executor)
    works(executor)


@few(2)
@each_executor
@pytest.mark.parametrize("name", [name for name in LINEAR if name != "ppermute"])
@pytest.mark.parametrize("method", ["grad", "backward"])
def test_a_backward_of_autograd_inside_is_refused(method: str, name: str, executor: Any):
    """The graph is that of all slots, which are under way."""

    def fn(i: int, x: Tensor) -> Any:
        own = x.detach().requires_grad_()
        total = COLLECTIVES[name](argument(own)).sum() * own.sum()
        return torch.autograd.grad(total, own)[0] if method == "grad" else (total.backward(), own.grad)[1]

    with pytest.raises(
        RuntimeError, match=r"^torch\.autograd\.grad or \.backward\(\) inside.*use torch\.func\.grad or"
    ):
        call(fn, executor)
    works(executor)


@each_executor
def test_a_backward_of_autograd_inside_that_leads_to_other_slots_only(executor: Any):
    """What a slot has received is a constant for its own tensors."""

    def fn(i: int, x: Tensor) -> Tensor:
        own = (x + i).requires_grad_()
        received = fdp.ppermute(own, [(0, 1), (1, 2), (2, 0)])
        return torch.autograd.grad((received * own).sum(), own)[0]

    outs = call(lambda i, x: fn(i, x.detach()), executor)
    assert [out.unique().item() for out in outs] == [3, 1, 2]


IN_HOOKS = {**COLLECTIVES, "axis_index": lambda grad: grad * fdp.axis_index()}


@few(2)
@each_executor
@pytest.mark.parametrize("how", ["backward", "grad"])
@pytest.mark.parametrize("name", IN_HOOKS)
def test_in_a_hook_is_refused(name: str, how: str, executor: Any):
    """One slot after the other, so that they cannot wait for each other."""

    def fn(i: int, x: Tensor) -> Tensor:
        out = fdp.psum(argument(x)) * 1
        out.register_hook(IN_HOOKS[name])
        return out * 2

    if how == "backward":
        run = torch.stack([out.sum() for out in call(fn, executor)]).sum().backward
    else:
        run = lambda: fdp.grad(lambda w, x: fn(0, w * x).sum(), devices=DEVICES, executor=executor)(  # noqa: E731
            torch.ones(()), torch.ones(SLOTS, 3, 2)
        )
    with pytest.raises(RuntimeError, match=f"^{name}: this code runs in a backward.*fdp.checkpoint_context"):
        within(LIMIT, run)
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
            within(LIMIT, lambda: total.backward(retain_graph=True))
    fails[0] = False
    within(LIMIT, lambda: total.backward(retain_graph=True))
    within(LIMIT, total.backward)
    works(executor)


# ---------------------------------------------------------------- interrupts


@few(2)
@each_executor
@each_slot
@each_name
def test_an_interrupt(name: str, slot: int, executor: Any):
    error = KeyboardInterrupt()

    def fn(i: int, x: Tensor) -> Tensor:
        fdp.axis_index()
        if i == slot:
            raise error
        return COLLECTIVES[name](argument(x))

    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT011
        call(fn, executor)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    works(executor)


@each_executor
def test_an_interrupt_of_the_caller(executor: Any):
    """Ctrl-C while the slots exchange: the main thread gets it, and the slots stop."""
    main = threading.main_thread().ident
    assert main is not None
    rounds = [0] * SLOTS

    def fn(w: Any, x: Tensor) -> Tensor:
        i = fdp.axis_index()
        for k in range(3000):  # without an interrupt it ends too
            rounds[i] = k
            if i == 0 and k == 20:
                signal.pthread_kill(main, signal.SIGINT)
            fdp.psum(k)
        return x

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fdp.dp_apply(fn, None, torch.ones(SLOTS), DEVICES, executor=executor)
    assert max(rounds) < 2900
    works(executor)
