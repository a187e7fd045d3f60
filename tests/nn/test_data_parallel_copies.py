"""Copies of parameters that a DataParallel uses again: they are never stale, from however many threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import side_by_side
from tests.nn.modules_of_data_parallel import mlp, run

TWO = ["cpu", "cpu"]


def change_by_numpy(module: nn.Linear) -> None:
    module.weight.detach().numpy()[0, 0] = 7


def change_by_swap(module: nn.Linear) -> None:
    module.weight.detach().numpy()[[0, 1]] = module.weight.detach().numpy()[[1, 0]]


def change_by_optimizer(module: nn.Linear) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module(numbers(4, 3)).sum().backward()
    optimizer.step()


def change_by_set(module: nn.Linear) -> None:
    module.weight.data = numbers(2, 3) * 3


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in-place": lambda module: module.weight.mul_(2),
    "optimizer": change_by_optimizer,
    "data": lambda module: module.weight.data.mul_(2),
    "data-of-one": lambda module: module.weight.data[1, 1].add_(1e-9),
    "negated": lambda module: module.weight.data.neg_(),
    "numpy": change_by_numpy,
    "set-data": change_by_set,
    "new-parameter": lambda module: setattr(module, "weight", nn.Parameter(numbers(2, 3) * 5)),
    "load": lambda module: module.load_state_dict({"weight": numbers(2, 3) * 3, "bias": numbers(2)}),
    "load-assign": lambda module: module.load_state_dict(
        {"weight": numbers(2, 3) * 3, "bias": numbers(2)}, assign=True
    ),
    "inference-mode": lambda module: change_in_inference_mode(module),
    "vector": lambda module: nn.utils.vector_to_parameters(torch.arange(8.0, dtype=torch.float64), module.parameters()),
    "swapped-rows": change_by_swap,
    "swapped-columns": lambda module: module.weight.data.copy_(module.weight.data.flip(1).clone()),
    "exchanged": lambda module: exchange(module.weight, module.bias),
}


def change_in_inference_mode(module: nn.Linear) -> None:
    with torch.inference_mode():
        module.weight.mul_(2)


def exchange(weight: Tensor, bias: Tensor) -> None:
    """Two numbers of the same tensor change places, behind torch's back."""
    array = weight.detach().numpy()
    array[0, 0], array[1, 2] = array[1, 2].copy(), array[0, 0].copy()


@few()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies_are_never_stale(change: Any, mode: Any):
    module, x = nn.Linear(3, 2).double(), numbers(6, 3)
    shim: Any = DataParallel(module, ["cpu"] * 3)
    for _ in range(3):
        with mode():
            assert_close_tree(shim(x), module(x))
        with torch.no_grad():
            change(module)
        with mode():
            assert_close_tree(shim(x), module(x))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copies_of_frozen_parameters_are_never_stale(change: Any):
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    shim, x = DataParallel(module, ["cpu"] * 3), numbers(6, 3)
    for _ in range(2):
        module[0].requires_grad_(False)
        assert_close_tree(run(shim, module, x), run(module, module, x))
        module[0].requires_grad_(True)
        with torch.no_grad():
            change(module[0])
        module[0].requires_grad_(False)
        assert_close_tree(run(shim, module, x), run(module, module, x))


def test_a_transposed_parameter_is_another():
    module, x = nn.Linear(3, 3).double(), numbers(6, 3)
    shim = DataParallel(module, TWO)
    with torch.no_grad():
        shim(x)
        module.weight.data = module.weight.data.T
        assert_close_tree(shim(x), module(x))


def test_a_copy_that_forward_writes_is_not_used_again():
    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            self.weight.data.zero_()
            return out

    module, x = Writes(3, 2).double(), numbers(4, 3)
    weight = module.weight.detach().clone()
    with torch.no_grad():
        want = nn.functional.linear(x, weight, module.bias)
        got = DataParallel(module, TWO)(x)
        assert_close_tree(got, want)
        assert_same_tree(module.weight.detach(), torch.zeros(2, 3, dtype=torch.float64))
        assert_close_tree(DataParallel(module, TWO)(x), module(x))


@pytest.mark.parametrize("grad", [True, False])
def test_copies_that_forward_writes_through_data_are_not_used_again(grad: bool):
    """Only the second replica writes to its own copy."""

    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            if 100 in input:
                self.weight.data.zero_()
            return out

    module, x = Writes(3, 2).double(), numbers(4, 3)
    shim = DataParallel(module, TWO)
    with torch.set_grad_enabled(grad):
        bad = x.clone()
        bad[3] = 100
        shim(bad)
        assert module.weight.abs().sum() > 0
        assert_close_tree(shim(x).detach(), module(x).detach())


def test_switching_between_gradients_and_none():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    want = run(module, module, x)
    for _ in range(3):
        with torch.no_grad():
            assert_close_tree(shim(x), want[0])
        with torch.inference_mode():
            assert_close_tree(shim(x), want[0])
        assert_close_tree(run(shim, module, x), want)


def call_from_threads(call: Callable[[int], Any], count: int = 8, repeats: int = 5) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def caller(i: int) -> None:
        try:
            start.wait(30)
            for _ in range(repeats):
                call(i)
        except BaseException as error:
            failures.append(error)

    with side_by_side(4):
        threads = [threading.Thread(target=caller, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [False, True])
def test_calls_from_many_threads(mode: Any, in_place: bool):
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    if in_place:
        module[2].register_forward_hook(lambda layer, args, out: out * module[0].weight.sum())
    shim = DataParallel(module, ["cpu"] * 4)
    inputs = [(i + 1) * numbers(5 + i, 3) for i in range(8)]
    want = [module(x).detach() for x in inputs]

    def call(i: int) -> None:
        with mode():
            assert_close_tree(shim(inputs[i]).detach(), want[i])

    call_from_threads(call)


def test_gradients_from_many_threads():
    module = mlp()
    shim = DataParallel(module, ["cpu"] * 4)
    inputs = [(i + 1) * numbers(5 + i, 3) for i in range(8)]
    want = [run(module, module, x) for x in inputs]
    call_from_threads(lambda i: assert_close_tree(run(shim, module, inputs[i]), want[i]))
