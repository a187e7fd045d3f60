"""Lists, dicts and sets of a module that its forward fills."""

import copy
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

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


def hooked(module: nn.Module) -> nn.Module:
    module.register_full_backward_hook(lambda *_: None)  # the module itself is called
    return module


def contents(module: Any) -> Any:
    names = ("maps", "seen", "last", "by_name", "by_rows", "found", "count", "nested")
    return {name: copy.copy(getattr(module, name)) for name in names}


@pytest.mark.parametrize("prepare", [lambda module: module, hooked], ids=["clones", "in-place"])
def test_they_have_what_one_device_puts_in_part_by_part(prepare: Callable[[Any], Any]):
    module = Filling()
    one, x = copy.deepcopy(module), numbers(8, 3)
    shim = DataParallel(prepare(module), CPUS, executor="sequential")
    for factor in (1, 2, 3):
        shim(factor * x)
        for part in (factor * x).chunk(3):
            one(part)
    assert_close_tree(contents(module), contents(one))


def test_gradients_pass_through_what_was_kept():
    module, x = Filling(), numbers(8, 3)
    one = copy.deepcopy(module)
    DataParallel(module, CPUS, executor="sequential")(x)
    one(x)
    for each in (module, one):
        torch.cat(each.maps).square().mean().backward()
    assert_close_tree(torch.cat(module.maps), one.maps[0])
    assert_close_tree(module.layer.weight.grad, one.layer.weight.grad)


@pytest.mark.parametrize("executor", ["sequential", "auto"])
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


class ReadingBack(nn.Module):
    """Keeps what it needs later in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.cache: dict[str, Any] = {"depth": 0, "inner": [[]]}
        self.stack, self.pair = list[Tensor](), ([], {})
        self.alias = self.stack
        self.with_part = {"part": self.layer, "kept": {}}
        self.layer.kept = []  # pyright: ignore[reportArgumentType]
        self.layer.register_forward_hook(lambda part, args, out: cast(Any, part).kept.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.stack.append(x)
        self.cache["x"], self.pair[1]["x"], self.with_part["kept"]["x"] = x, x, x
        self.cache["inner"][0].append(x)
        hidden = self.layer(x).tanh()
        time.sleep(0.005)  # so that the others write too
        found = [self.alias.pop(), self.cache["x"], self.pair[1]["x"], self.with_part["kept"]["x"]]
        return torch.stack([*found, self.cache["inner"][0].pop(), cast(Any, self.layer).kept[-1], hidden], -1)


@in_order
def test_forward_reads_back_what_it_has_put_there(executor: Any):
    module = ReadingBack()
    one, x = copy.deepcopy(module), numbers(8, 3)
    shim = DataParallel(module, CPUS, executor=executor)
    with many_cores():
        for factor in (1, 2):
            assert_close_tree(shim(factor * x), one(factor * x))
    assert module.stack == []
    assert module.alias is module.stack
    assert_close_tree(module.cache, {"depth": 0, "inner": [[]], "x": 2 * x[6:]})
    assert_close_tree(module.with_part["kept"], {"x": 2 * x[6:]})


class Indirect(nn.Module):
    """Fills a list that an object of another class has too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Tensor]()
        self.record = self.seen.append

    def forward(self, x: Tensor) -> Tensor:
        self.record(x)
        time.sleep(0.005)
        return self.seen[-1]


def test_replicas_beside_others_that_fill_containers_are_refused():
    module, x = Filling(), numbers(8, 3)
    before = contents(module)
    with pytest.raises(RuntimeError, match=r"DataParallel: executor='threads': forward puts something into a list"):
        DataParallel(module, CPUS, executor="threads")(x)
    assert_close_tree(contents(module), before)


@pytest.mark.parametrize("executor", ["sequential", "auto"])
def test_replicas_run_in_order_where_something_else_leads_to_a_list(executor: Any):
    module, x = Indirect(), numbers(8, 3)
    with many_cores():
        assert_close_tree(DataParallel(module, CPUS, executor=executor)(x), x)
    assert [len(part) for part in module.seen] == [3, 3, 2]


@in_order
def test_replicas_serve_again_while_a_list_grows(executor: Any):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            roots.add(id(self))
            self.maps.append(x)
            return x

    shim = DataParallel(Growing(), CPUS, executor=executor)
    roots: set[int] = set()
    with many_cores():
        for _ in range(8):
            shim(numbers(8, 3))
    assert len(roots) <= 9  # three more after the list was empty, and three that began side by side
    assert len(shim.module.maps) == 24


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


def test_modules_that_forward_keeps_are_the_modules_own():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.used, self.by_part = nn.Linear(3, 3).double(), list[Any](), dict[Any, Any]()

        def forward(self, x: Tensor) -> Tensor:
            self.used.append((self, self.layer))
            self.by_part[self.layer] = [self.layer]
            return self.layer(x)

    for call in (lambda module: functional_call(module, {}, X), lambda module: DataParallel(module, CPUS)(X)):
        module = Chosen()
        call(module)
        assert {id(part) for pair in module.used for part in pair} == {id(module), id(module.layer)}
        assert set(module.by_part) == {module.layer}
        assert set(module.by_part[module.layer]) == {module.layer}


X = numbers(8, 3)


def test_a_container_with_modules_in_it_is_filled_too():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.state, self.used = {"part": self.layer, "kept": None}, [self.layer]

        def forward(self, x: Tensor) -> Tensor:
            self.state["kept"] = x
            self.used.append(self.state["part"])
            return self.used[-1](x)

    module = Mixed()
    shim = DataParallel(module, CPUS)
    for count in (4, 7):
        assert_close_tree(shim(X), module.layer(X))
        assert module.used == [module.layer] * count
    assert_close_tree(module.state, {"part": module.layer, "kept": X[6:]})


def test_recurrent_networks_keep_their_weights():
    module = nn.LSTM(3, 2, batch_first=True).double()
    weights = list(module._flat_weights)
    for _ in range(2):
        DataParallel(module, CPUS)(numbers(9, 4, 3))
    assert all(now is weight for now, weight in zip(module._flat_weights, weights, strict=True))


def test_replicas_share_them_with_the_module():
    module = Filling()
    parallel_apply(replicate(module, CPUS), list(X.chunk(3)))
    assert list(module.seen) == [3, 3, 2]


def test_functional_call_fills_them_from_several_threads():
    module = Filling()
    threads = [threading.Thread(target=lambda: [functional_call(module, {}, X) for _ in range(20)]) for _ in range(4)]
    with side_by_side():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(module.maps) == len(module.seen) == 80


def test_apply_of_functional_leaves_them_as_they_are():
    """A pure function has no side effects: what forward does not return is lost."""
    module = Filling()
    before = copy.deepcopy(contents(module))
    apply, state = functional(module)
    for _ in range(2):
        apply(state, X)
    assert contents(module) == before
