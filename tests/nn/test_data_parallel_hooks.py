"""Hooks of a DataParallel and of the modules it runs: how often they run, and which module they see."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import assert_like_one_device, loss_of, mlp

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


@each_executor
def test_hooks_run_once_a_replica_in_torch_s_order(executor: Any):
    events: dict[int, list[str]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: events.setdefault(threading.get_ident(), []).append(name)

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note("forward")()
            return super().forward(input)

    module = nn.Sequential(Layer(3, 2)).double()
    module.register_forward_pre_hook(note("outer pre"))
    module.register_forward_hook(note("outer"))
    module[0].register_forward_pre_hook(note("pre"), with_kwargs=True)
    module[0].register_forward_hook(note("hook"), with_kwargs=True)
    module[0].register_forward_hook(note("always"), always_call=True)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, executor=executor)(numbers(5, 3))
    once = ["outer pre", "pre", "forward", "hook", "always", "outer"]
    ran = list(events.values())
    assert sum(map(len, ran)) == 3 * len(once)
    for each in ran:
        assert each == once * (len(each) // len(once))


def test_hooks_of_the_wrapper_run_once():
    events: list[Any] = []
    shim = DataParallel(nn.Identity(), ["cpu"] * 3)
    shim.register_forward_pre_hook(lambda _, args: events.append(len(args[0])))
    shim.register_forward_hook(lambda _, args, out: events.append(len(out)) or 2 * out)
    assert_same_tree(shim(numbers(5)), 2 * numbers(5))
    assert events == [5, 5]


@each_executor
def test_hooks_may_store_what_they_see(executor: Any):
    activations: dict[str, list[Tensor]] = {}

    def store(name: str) -> Callable[..., None]:
        return lambda module, args, out: activations.setdefault(name, []).append(out)

    module, x = mlp(), numbers(4, 3)
    for name, child in module.named_children():
        child.register_forward_hook(store(name))
    with many_cores():
        DataParallel(module, TWO, executor=executor)(x)
    for name, layer in (("0", module[:1]), ("2", module[:3])):
        got = torch.cat(sorted(activations[name], key=lambda out: out[0, 0].item()))
        parts = sorted(module[: len(layer)](x).chunk(2), key=lambda out: out[0, 0].item())
        assert_close_tree(got, torch.cat(parts))


Note = Callable[[Tensor], Any]


class Controller:
    __slots__ = ("model", "note")

    def __init__(self, model: nn.Module, note: Note) -> None:
        self.model, self.note = model, note

    def __call__(self, *_: Any) -> None:
        self.note(next(self.model.parameters()))


class Registered(nn.Linear):
    models: ClassVar[list[Any]] = []
    note: Note

    def forward(self, input: Tensor) -> Tensor:
        self.note(self.models[-1].weight)
        return super().forward(input)


class Listed(nn.Module):
    """Parts in containers that are no modules."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.layer, self.note = nn.Linear(3, 2).double(), note
        self.parts = [{"a": (self.layer, {self.layer})}]

    def forward(self, x: Tensor) -> Tensor:
        first, others = self.parts[0]["a"]
        assert first is next(iter(others)) is self.layer
        self.note(first.weight)
        return self.layer(x)


class Parent(nn.Module):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.child: Any = nn.Tanh()
        self.child.parent = weakref.ref(self)
        self.child.register_forward_hook(lambda child, *_: note(child.parent().weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.weight


def with_way_back(way: str) -> Callable[[Note], nn.Module]:
    def make(note: Note) -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
        by_name = weakref.WeakValueDictionary({"model": model})
        models["model"], first = model, model[0]
        hooks: dict[str, Callable[..., Any]] = {
            "closure": lambda *_: note(model[0].weight),
            "closure-of-a-child": lambda *_: note(first.weight),
            "default": lambda *_, model=model: note(model[0].weight),
            "global": lambda *_: note(models["model"][0].weight),
            "object": Controller(model, note),
            "partial": functools.partial(lambda model, *_: note(model[0].weight), model),
            "weak-values": lambda *_: note(by_name["model"][0].weight),
        }
        model[1].register_forward_hook(hooks[way])
        return model

    return make


def registered(note: Note) -> nn.Module:
    model = Registered(3, 2).double()
    model.note = note
    Registered.models.append(model)
    return model


models: Any = {}
WAYS = ["closure", "closure-of-a-child", "default", "global", "object", "partial", "weak-values"]
BACK: dict[str, Callable[[Note], nn.Module]] = {way: with_way_back(way) for way in WAYS}
BACK |= {"attribute-of-the-class": registered, "containers": Listed, "weak-reference": Parent}


@few()
@pytest.mark.parametrize("make", BACK.values(), ids=BACK)
def test_what_leads_back_to_the_model_finds_it(make: Any):
    """Or the replica where it is in containers and partials: torch's replicas find the module itself."""
    seen: list[Tensor] = []
    assert_like_one_device(make(seen.append), numbers(5, 3))
    assert seen


def test_a_hook_that_closes_over_the_model_and_uses_it():
    model = mlp()
    model[3].register_forward_hook(lambda module, args, out: out * model[0].weight.sum())
    assert_like_one_device(model, numbers(5, 3))


def test_backward_hooks():
    model, x = mlp(), numbers(5, 3).requires_grad_()
    seen: list[Any] = []
    model[3].register_full_backward_hook(lambda module, inner, outer: seen.append((inner[0], outer[0])))
    model[0].register_full_backward_pre_hook(lambda module, outer: (2 * outer[0],))
    assert_like_one_device(model, x)
    seen.clear()
    out = DataParallel(model, TWO)(x)
    out.backward(numbers(5, 2))
    seen.sort(key=lambda pair: -len(pair[0]))
    assert [len(inner) for inner, _ in seen] == [3, 2]
    assert_close_tree(torch.cat([outer for _, outer in seen]), numbers(5, 2))


def test_backward_hooks_of_the_wrapper_run_once():
    module, seen = nn.Linear(3, 2).double(), []
    shim, x = DataParallel(module, ["cpu"] * 3), numbers(5, 3).requires_grad_()
    shim.register_full_backward_hook(lambda shim, inner, outer: seen.append((inner[0], outer[0])))
    shim(x).backward(numbers(5, 2))
    assert len(seen) == 1
    assert_close_tree(seen[0], (numbers(5, 2) @ module.weight.detach(), numbers(5, 2)))


def test_hooks_of_parameters_run_once():
    module, seen = nn.Linear(3, 2).double(), []
    module.weight.register_hook(lambda grad: seen.append("hook") or 2 * grad)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    loss_of(DataParallel(module, TWO)(numbers(4, 3))).backward()
    assert seen == ["hook", "accumulated"]


def test_global_hooks():
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        DataParallel(nn.ReLU(), TWO)(numbers(4))
    finally:
        handle.remove()
    assert seen == ["ReLU", "ReLU", "DataParallel"]
