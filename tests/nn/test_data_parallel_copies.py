"""Copies of parameters are those of a call, from however many threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import side_by_side
from tests.nn.modules_of_data_parallel import mlp, run


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
def test_calls_from_many_threads(mode: Any):
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
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
