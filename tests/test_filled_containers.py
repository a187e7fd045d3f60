"""Lists, dicts and sets of a module that its forward fills."""

import copy
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, functional, functional_call
from fdp.nn import parallel_apply, replicate
from tests.helpers import assert_close_tree, many_cores, numbers, side_by_side

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


def test_nothing_is_lost_in_threads():
    module, x = Filling(), numbers(8, 3)
    with side_by_side():
        for _ in range(20):
            DataParallel(module, CPUS, executor="threads")(x)
    assert sorted(module.seen) == sorted([3, 3, 2] * 20)
    assert len(module.maps) == len(module.by_name["inner"]["layer"]) == 60
    assert module.found == {x[i, 0].item() for i in (0, 3, 6)}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_replicas_serve_again_while_a_list_grows(executor: Any):
    module = Filling()
    shim = DataParallel(module, CPUS, executor=executor)
    roots: set[int] = set()
    module.register_forward_pre_hook(lambda part, args: roots.add(id(part)))
    with many_cores():
        for _ in range(4):
            shim(numbers(8, 3))
    assert len(roots) == 3


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
        assert module.by_part == {module.layer: [module.layer]}


X = numbers(8, 3)


def test_a_container_with_modules_in_it_is_not_shared_and_says_so():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.state = {"part": self.layer, "kept": None}

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.state["kept"] = x
            return self.state["part"](x)

    module = Mixed()
    shim = DataParallel(module, CPUS)
    with pytest.warns(UserWarning, match=r"DataParallel: forward wrote to the module's 'state', .* is lost. Keep it"):
        out = shim(X)
    assert_close_tree(out, module.layer(X))
    assert module.state == {"part": module.layer, "kept": None}
    module.eval()
    shim(X)


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
