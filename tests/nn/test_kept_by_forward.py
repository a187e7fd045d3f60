"""What forward keeps in lists and dicts of a module and computes with later: as if replicas ran one by one."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, dp_apply, functional
from tests.common.numbers import numbers
from tests.common.threads import many_cores

in_order = pytest.mark.parametrize("executor", ["sequential", "auto"])

CPUS = ["cpu"] * 3


class Caching(nn.Module):
    """Its forward keeps something at first, and computes with it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make, self.cache = nn.Linear(3, 2).double(), make, dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        if "kept" not in self.cache:
            self.cache["kept"] = self.make(self, x)
        kept = self.cache["kept"]
        return self.linear(x) * kept if isinstance(kept, int) else kept(x)


KEPT = {
    "a partial": lambda module, x: functools.partial(module.linear),
    "a lambda": lambda module, x: lambda rows: module.linear(rows),
    "modules": lambda module, x: nn.Sequential(module.linear),
    "a method": lambda module, x: module.linear.forward,
    "a size": lambda module, x: x.shape[1],
}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
@in_order
def test_what_forward_keeps_is_right_in_later_calls(make: Any, executor: Any):
    module, alone, x = Caching(make), Caching(make), numbers(8, 3)
    alone.load_state_dict(module.state_dict())
    shim = DataParallel(module, CPUS, executor=executor)
    for _ in range(3):
        torch.testing.assert_close(shim(x), alone(x))
        torch.testing.assert_close(module(x), alone(x))
        with torch.no_grad():
            for each in (module, alone):
                each.linear.weight.mul_(2)


@in_order
def test_ints_of_lists_and_dicts_are_those_of_a_sequence(executor: Any):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {"calls": 0, "width": 0}
            self.order = [2, 0, 1]

        def forward(self, x: Tensor) -> Tensor:
            self.seen["calls"] += 1
            self.seen["width"] = self.seen["width"] or x.shape[1]
            self.order.sort()
            return x

    shim = DataParallel(Counting(), CPUS, executor=executor)
    for calls in (1, 2, 3):
        shim(numbers(8, 3))
        assert (shim.module.seen, shim.module.order) == ({"calls": 3 * calls, "width": 3}, [0, 1, 2])


def test_functional_call_in_shards_side_by_side_keeps_what_a_sequence_keeps():
    module, x = Caching(KEPT["a size"]), numbers(8, 3)
    params = dict(module.named_parameters())

    def call(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x,))

    with many_cores():
        for _ in range(2):
            got = dp_apply(call, params, x, CPUS, executor="threads")
            torch.testing.assert_close(got, module.linear(x) * 3)
    assert module.cache == {"kept": 3}


@pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
def test_a_container_that_leads_back_to_itself(executor: Any):
    class Linked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tree = nn.Linear(3, 2).double(), dict[str, Any](child={})
            self.tree["child"]["up"] = self.tree

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    module, x = Linked(), numbers(8, 3)
    torch.testing.assert_close(DataParallel(module, CPUS, executor=executor)(x), module(x))
    apply, state = functional(module)
    torch.testing.assert_close(apply(state, x)[0], module(x))
