"""Which modules are cloned, to be called from several threads at once, and that the others are called themselves."""

import contextvars
import dataclasses
import enum
import functools
import itertools
import logging
import re
import threading
import types
import warnings
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, dp_apply, functional, functional_call
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores

CPUS = ["cpu"] * 2


class Mode(enum.Enum):
    FAST = "fast"


class Plain:
    """Settings, as libraries of models have them."""

    def __init__(self) -> None:
        self.hidden, self.names, self.nested = 3, ["a", "b"], {"rope": {"theta": 1e4, "type": None}}
        self.dtype, self.mode, self.inner = torch.float64, Mode.FAST, types.SimpleNamespace(eps=1e-5)

    @property
    def size(self) -> int:
        return self.hidden * len(self.names)


@dataclasses.dataclass(slots=True)
class Slots:
    width: int = 3
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    holds: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


def gelu_scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    LOGGER.debug("gelu")
    return nn.functional.gelu(x) * scale


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.functional.relu6)


LOGGER = logging.getLogger(__name__)
KNOWN: dict[str, Callable[[], Any]] = {
    "settings": Plain,
    "settings in slots": Slots,
    "named tuple": lambda: Pair(1, "a"),
    "user dict": lambda: UserDict(a=[1]),
    "enum": lambda: Mode.FAST,
    "logger": lambda: LOGGER,
    "pattern": lambda: re.compile("a"),
    "lock": threading.Lock,
    "array": lambda: numpy.ones(3),
    "generator": torch.Generator,
    "function": lambda: gelu_scaled,
    "another module": lambda: closed_over(nn.BatchNorm1d(3)),
    "lambda": lambda: (lambda scale: lambda x: x * scale)(2.0),
    "partial": lambda: functools.partial(gelu_scaled, scale=3.0),
    "class": lambda: nn.LayerNorm,
    "method of settings": lambda: types.MethodType(lambda self: self.size, Plain()),
    "without gradients": lambda: torch.no_grad()(gelu_scaled),
    "cached function": lambda: functools.lru_cache(gelu_scaled),
    "operator": lambda: torch.ops.aten.relu.default,
    "method of tensors": lambda: Tensor.relu,
    "scripted function": scripted,
    "weak reference to a tensor": lambda: weakref.ref(torch.ones(1)),
}


class Holding(nn.Module):
    """Holds something, and says whether it is a clone."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(numbers(3, 3)), nn.Parameter(numbers(3))
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        CALLED.append(id(self))
        return nn.functional.linear(x, self.weight, self.bias)


class Scaled(Holding):
    """Comes to itself by way of what it holds."""

    def __init__(self, hold: Callable[[Any], Any], find: Callable[[Any], Any]) -> None:
        super().__init__()
        self.find = find
        self.__dict__["held"] = hold(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.find(self.held).weight.sum()


CALLED: list[int] = []


@pytest.mark.parametrize("name", KNOWN)
def test_what_leads_to_no_module_is_shared_with_a_clone(name: str):
    module, x = Holding(KNOWN[name]()), numbers(4, 3)
    want = module(x)
    CALLED.clear()
    apply, state = functional(module)
    assert_close_tree(apply(state, x)[0], want)
    assert_close_tree(functional_call(module, {}, x), want)
    assert_close_tree(DataParallel(module, CPUS)(x), want)
    assert len(CALLED) == 4
    assert id(module) not in CALLED


def test_clones_of_modules_with_settings_run_side_by_side():
    meeting = threading.Barrier(2)

    class Meeting(Holding):
        def forward(self, x: Tensor) -> Tensor:
            meet(meeting)
            return super().forward(x)

    def meet(barrier: Any) -> None:
        barrier.wait(10)

    module, x = Meeting(Plain()), numbers(4, 3)
    vars(module)["lock"] = threading.Lock()
    with many_cores():
        assert_close_tree(
            DataParallel(module, CPUS, executor="threads")(x), nn.functional.linear(x, module.weight, module.bias)
        )


def in_context(module: Any) -> contextvars.ContextVar[Any]:
    variable = contextvars.ContextVar[Any]("module")
    variable.set(module)
    return variable


def in_array(module: Any) -> Any:
    array = numpy.empty(1, dtype=object)
    array[0] = module
    return array


def in_thread(module: Any) -> Any:
    local = threading.local()
    local.module = module
    return local


def closed_over(module: Any) -> Callable[[], Any]:
    return lambda: module


class OfClass:
    kept: list[Any]

    @classmethod
    def holding(cls, module: Any) -> Any:
        return type("Kept", (cls,), {"kept": [module]})()


UNKNOWN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weak reference": (weakref.ref, lambda held: held()),
    "weak proxy": (weakref.proxy, lambda held: held),
    "closure": (closed_over, lambda held: held()),
    "closure of a cached function": (lambda module: functools.lru_cache(closed_over(module)), lambda held: held()),
    "decorated function": (lambda module: torch.no_grad()(closed_over(module)), lambda held: held()),
    "slots": (lambda module: Slots(holds=[module]), lambda held: held.holds[0]),
    "slot of a dict": (lambda module: SlottedDict(module), lambda held: held.holds),
    "attribute of a tuple": (lambda module: DatedTuple(module), lambda held: held.holds),
    "factory of a dict": (lambda module: defaultdict(closed_over(module)), lambda held: held[0]),
    "user dict": (lambda module: UserDict(a=module), lambda held: held["a"]),
    "namespace": (lambda module: types.SimpleNamespace(inner={"a": module}), lambda held: held.inner["a"]),
    "class": (OfClass.holding, lambda held: held.kept[0]),
    "array of objects": (in_array, lambda held: held[0]),
    "context variable": (in_context, lambda held: held.get()),
    "object of a thread": (in_thread, lambda held: held.module),
    "exception": (lambda module: ValueError(module), lambda held: held.args[0]),
    "iterator": (lambda module: itertools.repeat(module), next),
    "its registry": (lambda module: Slots(holds=vars(module)["_parameters"]), lambda held: Registry(held.holds)),
    "its attributes": (lambda module: Slots(holds=vars(module)), lambda held: Registry(held.holds["_parameters"])),
}


class SlottedDict(dict[str, Any]):
    __slots__ = ("holds",)

    def __init__(self, module: Any) -> None:
        self.holds = module


class DatedTuple(tuple[Any, ...]):
    holds: Any

    def __new__(cls, module: Any) -> Any:
        made = super().__new__(cls, (1, 2))
        made.holds = module
        return made


class Registry:
    def __init__(self, registry: Any) -> None:
        self.weight = registry["weight"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_lead_to_the_module_is_called_in_place(name: str):
    module, x = Scaled(*UNKNOWN[name]), numbers(4, 3)
    apply, _ = functional(module)
    given = {"weight": numbers(3, 3).requires_grad_(), "bias": numbers(3).requires_grad_()}
    want = torch.func.functional_call(module, given, x)
    for got in (
        apply((given, {}), x)[0],
        functional_call(module, given, x),
        dp_apply(lambda given, x: apply((given, {}), x)[0], given, x, CPUS),
    ):
        assert_close_tree(got, want)
        grads = torch.autograd.grad(got.sum(), list(given.values()))
        assert_close_tree(grads, torch.autograd.grad(want.sum(), list(given.values()), retain_graph=True))
    only = "executor='threads': the function calls a module that can only be called"
    with many_cores(), pytest.raises(RuntimeError, match=only):
        dp_apply(lambda given, x: apply((given, {}), x)[0], given, x, CPUS, executor="threads")
    got, out, params = DataParallel(module, CPUS)(x), module(x), list(module.parameters())
    assert_close_tree(got, out)
    assert_close_tree(torch.autograd.grad(got.sum(), params), torch.autograd.grad(out.sum(), params))


def test_settings_that_a_module_and_an_object_share_are_no_reason():
    settings = Plain()
    module, x = Holding(settings), numbers(4, 3)
    module.__dict__["names"] = settings.names
    CALLED.clear()
    apply, state = functional(module)
    apply(state, x)
    assert id(module) not in CALLED


def test_a_list_that_a_module_and_an_object_share_is_filled_once():
    """A clone would have a list of its own, and the object the module's: so the module is called itself."""

    class Recording(Holding):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.held = self.seen.append

        def forward(self, x: Tensor) -> Tensor:
            self.held(x)
            return self.seen[-1]

    module, x = Recording(), numbers(4, 3)
    apply, state = functional(module)
    assert_close_tree(apply(state, x)[0], x)
    assert len(module.seen) == 1
    functional_call(module, {}, x)
    assert len(module.seen) == 2
