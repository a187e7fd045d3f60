"""Lists, dicts and sets of a module that its forward fills: shared, as torch's replicas share them."""

import copy
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, functional, functional_call
from fdp.nn import parallel_apply, replicate
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores, side_by_side

in_order = pytest.mark.parametrize("executor", ["sequential", "auto"])

CPUS = ["cpu"] * 3


class Filling(nn.Module):
    """Keeps what passes through it, as scripts do to look at activations later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.maps: list[Tensor] = []
        self.seen, self.last = deque[int](), deque[float](maxlen=2)
        self.by_name: dict[str, Any] = {"inner": {"layer": []}}
        self.by_rows, self.found = defaultdict[int, list[float]](list), set[float]()
        self.count = {"rows": 0}
        self.nested = ([], {"calls": [0]})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        self.maps.append(hidden)
        self.seen.append(len(x))
        self.last.append(x[0, 0].item())
        self.by_name["inner"]["layer"].append(hidden[:, 0])
        self.by_rows[len(x)].append(x[0, 0].item())
        self.found.add(x[0, 0].item())
        self.count["rows"] += len(x)
        self.nested[0].append(hidden.detach().sum())
        self.nested[1]["calls"][0] += 1
        return self.head(hidden)


def contents(module: Any) -> Any:
    names = ("maps", "seen", "last", "by_name", "by_rows", "found", "count", "nested")
    return {name: copy.copy(getattr(module, name)) for name in names}


@in_order
def test_replicas_put_together_what_they_kept_in_order(executor: Any):
    module = Filling()
    one, x = copy.deepcopy(module), numbers(8, 3)
    shim = DataParallel(module, CPUS, executor=executor)
    with side_by_side():
        for factor in (1, 2, 3):
            shim(factor * x)
            for part in (factor * x).chunk(3):
                one(part)
    assert_close_tree(contents(module), contents(one))
    torch.cat(module.maps).square().mean().backward()
    torch.cat(one.maps).square().mean().backward()
    assert_close_tree(module.layer.weight.grad, one.layer.weight.grad)


def test_replicas_beside_others_fill_them_in_any_order():
    module, x = Filling(), numbers(8, 3)
    with many_cores():
        DataParallel(module, CPUS, executor="threads")(x)
    assert sorted(module.seen) == [2, 3, 3]


def test_a_list_that_gets_modules_is_mapped_from_then_on():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.parts = nn.Linear(3, 3).double(), list[nn.Module]()

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    module, x = Chosen(), numbers(8, 3)
    shim = DataParallel(module, CPUS)
    assert_close_tree(shim(x), x)
    module.parts.append(module.layer)
    assert_close_tree(shim(x), module(x))
    replicas = replicate(module, ["cpu", "cpu"])
    assert [replica.parts[0] is replica.layer for replica in replicas] == [True, True]


class Keeping(nn.Module):
    """Its forward keeps something at first, and computes with it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make, self.cache = nn.Linear(3, 2).double(), make, dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        if "kept" not in self.cache:
            self.cache["kept"] = self.make(self, x)
        kept = self.cache["kept"]
        return self.linear(x) * kept if isinstance(kept, int) else kept(x)


CALLS: dict[str, Callable[[Any], Any]] = {
    "DataParallel": lambda module: DataParallel(module, CPUS)(X),
    "functional_call": lambda module: functional_call(module, {}, X),
}
MODULES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a partial": lambda module, x: functools.partial(module.linear),
    "a lambda": lambda module, x: lambda rows: module.linear(rows),
    "a module": lambda module, x: module.linear,
    "a method": lambda module, x: module.linear.forward,
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_module_that_forward_has_kept_is_not_there_in_the_next_call(make: Any):
    module = Keeping(make)
    apply, _ = functional(module)
    for factor in (1.0, 2.0):
        given = {name: factor * p for name, p in module.named_parameters()}
        assert_close_tree(functional_call(module, given, X), factor * module.linear(X))
        assert_close_tree(apply((given, {}), X)[0], factor * module.linear(X))
    assert module.cache == {}


def test_a_number_that_replicas_have_kept_is_there_in_the_next_call():
    module = Keeping(lambda module, x: x.shape[1])
    for _ in range(2):
        assert_close_tree(DataParallel(module, CPUS)(X), 3 * module.linear(X))
    assert module.cache == {"kept": 3}


X = numbers(8, 3)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_with_modules_or_parameters_in_it_is_a_copy(call: Any):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.state, self.used = {"part": self.layer, "kept": None}, [self.layer.weight]

        def forward(self, x: Tensor) -> Tensor:
            assert self.used[0] is self.layer.weight
            self.state["kept"] = x
            self.used.append(x)
            return self.state["part"](x)

    module = Mixed()
    for _ in range(2):
        assert_close_tree(call(module), module.layer(X))
    assert module.state == {"part": module.layer, "kept": None}
    assert len(module.used) == 1


@pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
def test_one_that_leads_back_to_itself(executor: Any):
    class Linked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tree = nn.Linear(3, 2).double(), dict[str, Any](child={})
            self.tree["child"]["up"] = self.tree

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    module = Linked()
    assert_close_tree(DataParallel(module, CPUS, executor=executor)(X), module(X))
    apply, state = functional(module)
    assert_close_tree(apply(state, X)[0], module(X))


def test_replicas_share_them_with_the_module():
    module = Filling()
    parallel_apply(replicate(module, CPUS), list(X.chunk(3)))
    assert list(module.seen) == [3, 3, 2]


def test_a_function_leaves_them_as_they_are():
    """What forward does not return is lost."""
    module = Filling()
    before = copy.deepcopy(contents(module))
    apply, state = functional(module)
    for _ in range(2):
        apply(state, X)
        functional_call(module, {}, X)
    assert contents(module) == before
