"""What forward writes to a module of a DataParallel, and what the user changes between calls."""

from typing import Any

import pytest
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import assert_like_one_device

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
in_order = pytest.mark.parametrize("executor", ["sequential", "auto"])


@each_executor
def test_plain_attributes_that_forward_writes_are_lost(executor: Any):
    class Writes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.calls, self.seen = 0, []

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            self.last = input
            self.seen = [*self.seen, len(input)]
            assert self.calls == len(self.seen) == 1
            return super().forward(input)

    module = Writes().double()
    before = dict(vars(module))
    with many_cores():
        for _ in range(3):
            DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert vars(module) == before


def test_replicas_see_the_mode():
    seen: list[bool] = []

    class Mode(nn.Identity):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(self.training)
            return input

    shim: Any = DataParallel(nn.Sequential(Mode(), nn.Dropout(0.5)), TWO)
    shim.eval()
    assert_same_tree(shim(numbers(4)), numbers(4))
    shim.train()
    shim(numbers(4))
    shim.module[0].eval()
    shim(numbers(4))
    assert seen == [False, False, True, True, False, False]


@in_order
def test_methods_bound_to_the_module_are_those_of_the_replica(executor: Any):
    """Torch calls the module itself: its weights are on another device."""

    class Bound(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.fn = self.compute
            self.table = {"a": [self.compute]}

        def compute(self, x: Tensor) -> Tensor:
            seen.append(self)
            return nn.functional.linear(x, self.weight)

        def forward(self, input: Tensor) -> Tensor:
            assert self.fn.__self__ is self
            return self.fn(input) + self.table["a"][0](input)

    seen: list[Any] = []
    module = Bound().double()
    module.forward = module.forward
    with many_cores():
        DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert len(set(map(id, seen))) == 2
    assert all(each is not module for each in seen)
    seen.clear()
    assert_close_tree(DataParallel(module, TWO, executor=executor)(numbers(4, 3)), module(numbers(4, 3)))


def test_what_leads_back_to_the_module_writes_to_it():
    class Cyclic(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.fn = lambda x: self.compute(x)
            self.calls = 0

        def compute(self, x: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.linear(x, self.weight)

        def forward(self, input: Tensor) -> Tensor:
            return self.fn(input)

    module = Cyclic().double()
    DataParallel(module, TWO)(numbers(4, 3))
    assert module.calls == 2
    assert_like_one_device(module, numbers(4, 3))
