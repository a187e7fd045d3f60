"""What forward writes to a module of a DataParallel, and what the user changes between calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, functional_call
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import assert_like_one_device, mlp

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


@each_executor
def test_what_forward_registers_is_lost(executor: Any):
    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not hasattr(self, "cache")
            self.register_buffer("cache", x[0])
            self.layer, self.weight = nn.Linear(3, 2), nn.Parameter(x[0])
            return x * self.get_buffer("cache") * self.weight

    module = Registers()
    before = set(vars(module))
    with many_cores():
        for _ in range(2):
            DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert set(vars(module)) == before
    assert (dict(module.state_dict()), list(module.children())) == ({}, [])


@each_executor
def test_what_the_first_replica_writes_to_parameters_stays(executor: Any):
    """Once."""

    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(input)

    module = Writes(3, 2).double()
    weight = module.weight.detach().clone()
    shim = DataParallel(module, TWO, executor=executor)
    with many_cores():
        out = shim(numbers(4, 3))
    assert_close_tree(module.weight.detach(), 2 * weight)
    assert_close_tree(out.detach(), nn.functional.linear(numbers(4, 3), 2 * weight, module.bias).detach())


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


def test_what_is_changed_between_calls_is_seen():
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor: Any = 1
            self.options = {"shift": 0}
            self.layer: nn.Module = nn.Identity()
            self.plain = numbers(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.factor) + self.options["shift"] + self.plain

    module: Any = Scales()
    shim: Any = DataParallel(module, TWO)
    x = numbers(4, 2)

    def assert_same() -> None:
        assert_same_tree(shim(x), module(x))
        with torch.no_grad():
            assert_same_tree(shim(x), module(x))

    assert_same()
    module.factor = 3
    assert_same()
    module.factor = torch.tensor(2.5)
    assert_same()
    module.options["shift"] = 7
    assert_same()
    module.options = {"shift": -1}
    assert_same()
    module.layer = nn.Tanh()
    assert_same()
    module.layer = nn.Linear(2, 2).double()
    assert_same()
    module.layer.weight = nn.Parameter(numbers(2, 2))
    assert_same()
    module.plain = 2 * numbers(2)
    assert_same()
    module.plain.add_(1)
    assert_same()
    module.register_parameter("extra", nn.Parameter(numbers(2)))
    assert_same()
    module.forward = lambda x: x - 1
    assert_same()
    del module.forward
    assert_same()
    module.register_forward_hook(lambda module, args, out: out * 10)
    assert_same()
    module.__class__ = type("Other", (Scales,), {"forward": lambda self, x: x + self.factor})
    assert_same()
    shim.module = nn.ReLU()
    assert_same_tree(shim(x), x.relu())


def test_the_dtype_may_change():
    module = mlp()
    shim = DataParallel(module, TWO)
    assert shim(numbers(4, 3)).dtype is torch.float64
    shim.float()
    assert_same_tree(shim(numbers(4, 3).float()).detach(), module(numbers(4, 3).float()).detach())


def test_tensors_as_plain_attributes_are_shared():
    seen: list[Tensor] = []

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = numbers(2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.plain)
            return x

    module = Plain()
    DataParallel(module, TWO)(numbers(4))
    assert len(seen) == 2
    assert all(tensor is module.plain for tensor in seen)


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


class SaysWhatItIs(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale + getattr(self, "_is_replica", 0)


def test_replicas_of_a_changed_module_are_replicas():
    module, x = SaysWhatItIs(), torch.arange(3.0)
    model = DataParallel(module, ["cpu"] * 2)
    for scale in (1.0, 2.0, 3.0):
        module.scale = scale
        assert model(x).tolist() == (x * scale + 1).tolist()
        assert functional_call(module, {}, x).tolist() == (x * scale).tolist()
    vars(module)["_is_replica"] = 5
    assert model(x).tolist() == (x * 3 + 1).tolist()
    assert functional_call(module, {}, x).tolist() == (x * 3 + 5).tolist()
