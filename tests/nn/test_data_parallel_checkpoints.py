"""Activation checkpoints inside and around a DataParallel, and effects that happen once a replica."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import Checkpointed, loss_of

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
in_order = pytest.mark.parametrize("executor", ["sequential", "auto"])


@each_executor
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoints_inside(use_reentrant: bool, preserve: bool, executor: Any):
    module = Checkpointed(0.0, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    x = numbers(5, 3).requires_grad_()
    want = torch.autograd.grad(loss_of(module.body(x)), [x, *module.parameters()])
    shim = DataParallel(module, TWO, executor=executor)
    if preserve and executor == "threads":  # the state of the generator from which others draw
        with pytest.raises(
            RuntimeError, match=r"executor='threads': the function calls torch\.get_rng_state.*preserve"
        ):
            shim(x)
        return
    with many_cores():
        for _ in range(2):
            module.zero_grad()
            x.grad = None
            first, second = shim(x), shim(2 * x.detach().requires_grad_())
            del second
            loss_of(first).backward()
            assert_close_tree([x.grad, *(p.grad for p in module.parameters())], list(want))


@in_order
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_with_dropout_draw_the_same_again(use_reentrant: bool, executor: Any):
    """The gradient of a row is the product that its own output was made with."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        def inner(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight, 0.5)

    module, x = Drops(), torch.ones(64, 2, dtype=torch.float64, requires_grad=True)
    with many_cores():
        out = DataParallel(module, ["cpu"] * 4, executor=executor)(x)
        torch.rand(3)
        out.sum().backward()
    assert_close_tree(x.grad, out.detach())
    assert_close_tree(module.weight.grad, out.detach().sum())


@in_order
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_writes_as_on_one_device(use_reentrant: bool, executor: Any):
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.norm, x, use_reentrant=use_reentrant)

    module = Norms()
    one, other = copy.deepcopy(module), copy.deepcopy(module)
    x, y = numbers(6, 3).requires_grad_(), numbers(6, 3).requires_grad_()
    with many_cores():
        loss_of(DataParallel(module, TWO, executor=executor)(x)).backward()
    loss_of(torch.cat([one(y[:3]), other(y[3:])])).backward()
    assert_close_tree(x.grad, y.grad)
    assert_close_tree(dict(module.named_buffers()), dict(one.named_buffers()))


def test_collectors_are_those_of_the_caller():
    def collect(x: Tensor, seen: list[int], by_name: dict[str, int]) -> Tensor:
        seen.append(len(x))
        by_name[str(len(x))] = len(x)
        return x

    class Collects(nn.Module):
        def forward(self, x: Tensor, seen: list[int], *, by_name: dict[str, int]) -> Tensor:
            return collect(x, seen, by_name)

    seen: list[int] = []
    by_name: dict[str, int] = {}
    DataParallel(Collects(), TWO, executor="sequential")(numbers(5), seen, by_name=by_name)
    assert (seen, by_name) == ([3, 2], {"3": 3, "2": 2})
