"""What goes wrong on several GPUs, and on no CPU: backwards in threads that know nothing of slots, and locks."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import within

DEVICES = fdp.available_devices()[:2]
X = numbers(16, 4).to(DEVICES[0])
EXECUTORS: tuple[Any, ...] = ("sequential", "threads")


def host(tree: Any) -> Any:
    return fdp.gather(fdp.replicate(tree, ["cpu"]), out_dims=None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 1))
        self.double().to(DEVICES[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class InPlace(Net):
    """Its hook leads back to it, so that it is called in place, by one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, out: self and None)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def recomputed(call: Callable[..., Tensor], keeps: bool) -> Callable[..., Tensor]:
    """A loss whose backward calls this again."""

    def loss(p: Any, x: Tensor) -> Tensor:
        out: Any = checkpoint(call, p, x, use_reentrant=False, preserve_rng_state=keeps)
        return out.square().mean()

    return loss


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_module_that_is_recomputed_has_the_tensors_of_its_slot(executor: Any):
    net = Net()
    call: Any = lambda p, x: torch.func.functional_call(net, p, (x,))  # noqa: E731
    want = torch.func.grad(lambda p: call(p, X).square().mean())(params_of(net))
    step = fdp.grad(recomputed(call, keeps=False), devices=DEVICES, executor=executor)
    for _ in range(5):
        assert_close_tree(host(step(params_of(net), X)), host(want))


@pytest.mark.usefixtures("switching")
def test_a_backward_leaves_the_generator_of_the_host_where_the_forward_left_it():
    def call(p: Tensor, x: Tensor) -> Tensor:
        return F.dropout((x @ p + torch.rand(4, dtype=x.dtype).to(x.device)).tanh(), 0.5) @ p

    p = numbers(4, 4).to(DEVICES[0])
    step = fdp.grad(recomputed(call, keeps=True), devices=DEVICES)
    for _ in range(20):
        before = torch.get_rng_state()
        step(p, X)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        fdp.dp_apply(call, p, X, DEVICES)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.filterwarnings("ignore:Calls of this InPlace")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"seed": 3, "randomness": "rows"}], ids=str)
def test_locks_and_recomputing(options: Any, executor: Any):
    net = InPlace()
    apply, (params, _) = fdp.functional(net)
    loss = recomputed(lambda p, x: apply((p, {}), x)[0], keeps=True)

    def step() -> Any:
        return fdp.value_and_grad(loss, devices=DEVICES, executor=executor, **options)(params, X)

    if executor == "threads" and not options:
        with pytest.raises(RuntimeError, match="executor='threads': the function calls"):
            within(60, step)
        return
    first, second = within(60, step), within(60, step)
    if options:
        assert_close_tree(host(first), host(second))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("how", ["function", "checkpoint"])
def test_there_are_no_slots_in_a_backward(how: str, executor: Any):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * (1 + fdp.axis_index())

    def loss(w: Tensor, x: Tensor) -> Tensor:
        if how == "function":
            return Scaled.apply((x * w).sum())
        again: Any = lambda w, x: (x * w).sum() * (1 + fdp.axis_index())  # noqa: E731
        out: Any = checkpoint(again, w, x, use_reentrant=False, preserve_rng_state=False)
        return out

    w = torch.ones((), dtype=torch.float64, device=DEVICES[0])
    messages = []
    for devices in (DEVICES, fdp.virtual_devices(2)):
        try:
            fdp.grad(loss, devices=devices, executor=executor)(w.to(devices[0]), X.to(devices[0]))
            messages.append("none")
        except (RuntimeError, NameError) as error:
            messages.append(str(error))
    assert messages[0] == messages[1]
    assert messages[0] == "none" or "this code runs in a backward, where there are no slots" in messages[0]


def test_a_slot_keeps_its_thread():
    seen = defaultdict[torch.device, set[int]](set)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        seen[x.device].add(threading.get_ident())
        return (x * w).mean()

    step = fdp.grad(loss, devices=fdp.available_devices(), executor="threads")
    w = torch.ones((), dtype=torch.float64, device=DEVICES[0])
    step(w, X)
    seen.clear()
    for _ in range(20):
        step(w, X)
    assert [len(threads) for threads in seen.values()] == [1] * 4
