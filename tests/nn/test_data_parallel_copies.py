"""Copies of parameters are those of a call, from however many threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import side_by_side
from tests.nn.modules_of_data_parallel import mlp, run

TWO = ["cpu", "cpu"]


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
