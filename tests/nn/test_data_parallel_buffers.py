"""Buffers of a DataParallel: those of the first replica, or their mean, however forward writes them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import loss_of

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


class Keeps(nn.Module):
    """A module with one buffer, which `write` gives another value."""

    buffer: Tensor

    def __init__(self, write: Callable[["Keeps", Tensor], Any], buffer: Tensor) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return x * 1


@each_executor
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("rows", [6, 9])
def test_buffers_are_those_of_the_first_replica(slots: int, rows: int, executor: Any):
    module, x = nn.BatchNorm1d(3).double(), numbers(rows, 3)
    one = copy.deepcopy(module)
    shim = DataParallel(module, ["cpu"] * slots, executor=executor)
    buffers = dict(module.named_buffers())
    with many_cores():
        for factor in (1, 2):
            shim(factor * x)
            one(factor * x.chunk(slots)[0])
            assert_close_tree(module.state_dict(), one.state_dict())
    assert all(now is buffers[name] for name, now in module.named_buffers())


WRITES: dict[str, Callable[[Keeps, Tensor], Any]] = {
    "in-place": lambda module, x: module.buffer.copy_(x[:2] * 2),
    "rebound": lambda module, x: setattr(module, "buffer", x[:2] * 2),
    "detached": lambda module, x: setattr(module, "buffer", x.detach()[:2] * 2),
    "a-view-of-the-input": lambda module, x: setattr(module, "buffer", x[:2].mul_(2)),
    "data": lambda module, x: setattr(module.buffer, "data", x[:2] * 2),
    "out": lambda module, x: torch.mul(x[:2], 2, out=module.buffer),
    "dict": lambda module, x: module._buffers.update(buffer=x[:2] * 2),
    "numpy": lambda module, x: module.buffer.numpy().__setitem__(slice(None), x[:2].numpy() * 2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("slots", [2, 3])
def test_buffers_may_be_written_in_any_way(name: str, slots: int):
    """Torch loses those that forward puts in the place of others."""
    module = Keeps(WRITES[name], numbers(2))
    buffer = module.buffer
    DataParallel(module, ["cpu"] * slots)(numbers(6))
    assert (module.buffer is buffer) == (name in ("in-place", "data", "out", "numpy"))
    assert_same_tree(module.buffer, numbers(6)[:2] * 2)
    assert not module.buffer.requires_grad


@pytest.mark.parametrize("kind", ["shape", "dtype", "none-before"])
def test_buffers_may_become_others(kind: str):
    new = {"shape": numbers(7), "dtype": numbers(2).float(), "none-before": numbers(2)}[kind]
    module = Keeps(lambda module, x: setattr(module, "buffer", new.clone()), numbers(2))
    if kind == "none-before":
        module.register_buffer("buffer", None)
    DataParallel(module, TWO)(numbers(4))
    assert_same_tree(module.buffer, new)
    assert list(module.state_dict()) == ["buffer"]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)).double(),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).double(),
    "old-spectral-norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)).double(),
    "instance-norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval()
    ).double(),
}


@each_executor
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_two_calls_then_one_backward(make: Any, executor: Any):
    torch.manual_seed(0)
    module, x = make(), numbers(6, 3)
    one = copy.deepcopy(module)
    shim = DataParallel(module, ["cpu"], executor=executor)
    two = DataParallel(copy.deepcopy(module), TWO, executor=executor)
    with many_cores():
        (loss_of(two(x)) + loss_of(two(2 * x))).backward()
    (loss_of(shim(x)) + loss_of(shim(2 * x))).backward()
    (loss_of(one(x)) + loss_of(one(2 * x))).backward()
    assert_close_tree([p.grad for p in module.parameters()], [p.grad for p in one.parameters()])
    assert all(parameter.grad is not None for parameter in two.parameters())


def test_tied_and_absent_buffers():
    module: Any = nn.Sequential(
        Keeps(lambda module, x: module.buffer.add_(1), numbers(2)), nn.Identity(), nn.Identity()
    )
    module[1].register_buffer("same", module[0].buffer)
    module[2].register_buffer("none", None)
    module[2].register_buffer("hidden", numbers(1), persistent=False)
    DataParallel(module, TWO)(numbers(4))
    assert_same_tree(module[1].same, numbers(2) + 1)
    assert module[1].same is module[0].buffer
    assert list(module.state_dict()) == ["0.buffer", "1.same"]


def test_no_rows_at_all():
    module = Keeps(lambda module, x: module.buffer.add_(1), numbers(2))
    DataParallel(module, TWO)(numbers(0, 3))
    assert_close_tree(module.buffer, numbers(2) + 1)


def test_buffers_made_in_inference_mode():
    with torch.inference_mode():
        module = nn.BatchNorm1d(3).double()
        one = copy.deepcopy(module)
        DataParallel(module, TWO)(numbers(6, 3))
        one(numbers(3, 3))
    assert_close_tree(module.state_dict(), one.state_dict())


def test_a_buffer_that_is_set_anew_leaves_the_old_one_alone():
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.arange(4.0))
            self.register_buffer("head", self.get_buffer("bank")[:2])
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("cache", None)
            self.register_buffer("mask", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.head, self.count = torch.full((3,), -1.0), self.get_buffer("count") + 1
            self.cache, self.mask = torch.ones(2), None
            return x

    module, history = Sets(), []
    shim = DataParallel(module, TWO)
    for _ in range(3):
        shim(numbers(4))
        history.append(module.get_buffer("count"))
    assert_same_tree(module.get_buffer("bank"), torch.arange(4.0))
    assert_same_tree(module.get_buffer("head"), torch.full((3,), -1.0))
    assert [count.item() for count in history] == [1, 2, 3]
    assert_same_tree(module.get_buffer("cache"), torch.ones(2))
    assert module.mask is None
