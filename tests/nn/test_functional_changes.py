"""What the user changes in a module after `functional` has seen it is seen."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
import functools
import gc
import inspect
import types
from collections import OrderedDict, UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fdp import functional, functional_call
from tests.common.depth import few
from tests.nn.odd_modules import X, called, close, other_tensors, seeded, used

pytestmark = pytest.mark.usefixtures("float64")


class Changing(nn.Module):
    """Something of everything that can be changed from outside."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.0)
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.scale, self.flag, self.name, self.shape = 2, True, "a", (1, 2)
        self.tensor, self.config, self.options = torch.ones(3), [1, {"deep": [2.0]}], types.SimpleNamespace(add=1.0)
        self.activation = nn.functional.tanh

    def add(self):
        return 1.0

    def forward(self, x):
        x = self.bn(self.fc(x)) * self.scale + self.tensor + self.config[0] + self.config[1]["deep"][0]
        x = self.drop(self.activation(x)) + self.options.add + len(self.name) + sum(self.shape) + self.add()
        for layer in self.layers:
            x = layer(x)
        plain = [self.scale, self.flag, self.name, *self.shape, self.config[0], vars(self).get("new")]
        return self.head(self.embed(x)), plain


class ChangedClass(Changing):
    def add(self):
        return 2.0


def change(**attributes: Any) -> Callable[[nn.Module], None]:
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()] and None


def tie(module):
    module.head.weight = module.embed.weight


def replace_hooks(module):
    module.fc._forward_hooks = OrderedDict()
    module.fc.register_forward_hook(lambda mod, args, out: out * 5)


def equal_list_then_write(module):
    module.config = copy.deepcopy(module.config)
    functional_call(module, {}, torch.ones(2, 3))
    module.config[1]["deep"][0] = 7.0


def equal_object_then_write(module):
    module.options = copy.deepcopy(module.options)
    functional_call(module, {}, torch.ones(2, 3))
    module.options.add = 7.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "eval": lambda m: m.eval(),
    "eval of a part": lambda m: m.bn.eval(),
    "number": change(scale=3),
    "equal number of another type": change(scale=2.0),
    "equal flag of another type": change(flag=1),
    "string": change(name="abc"),
    "tuple": change(shape=(1, 5)),
    "equal tuple of other numbers": change(shape=(1.0, 2.0)),
    "tensor": lambda m: setattr(m, "tensor", m.tensor + 1),
    "tensor in place": lambda m: m.tensor.mul_(3),
    "number of a library's module": lambda m: setattr(m.drop, "p", 1.0),
    "list": lambda m: m.config.__setitem__(0, 5),
    "nested list": lambda m: m.config[1]["deep"].__setitem__(0, 5.0),
    "equal number in a list": lambda m: m.config.__setitem__(0, 1.0),
    "another list": change(config=[3, {"deep": [4.0]}]),
    "an equal list, written later": equal_list_then_write,
    "attribute of an object": lambda m: setattr(m.options, "add", 5.0),
    "an equal object, written later": equal_object_then_write,
    "function": change(activation=nn.functional.sigmoid),
    "function that closes over it": lambda m: setattr(m, "activation", lambda x: m.head(x)),
    "new attribute": change(new=4),
    "attribute under another name": lambda m: setattr(m, "other", vars(m).pop("name")) or setattr(m, "name", "new"),
    "written and put back": lambda m: [setattr(m, "scale", scale) for scale in (3, m.scale)],
    "patched method": lambda m: setattr(m, "add", lambda: 3.0),
    "patched forward of a part": lambda m: setattr(m.fc, "forward", lambda x: x * 2),
    "class": change(__class__=ChangedClass),
    "class of a part": lambda m: setattr(
        m.fc, "__class__", type("Twice", (nn.Linear,), {"forward": lambda self, x: 2 * x})
    ),
    "submodule": lambda m: setattr(m, "fc", nn.Sequential(nn.Linear(3, 3))),
    "submodule without parameters": lambda m: setattr(m, "drop", nn.Tanh()),
    "more submodules": lambda m: m.layers.append(nn.Linear(3, 3)),
    "fewer submodules": lambda m: m.layers.pop(0),
    "parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.randn(3, 3))),
    "no parameter": lambda m: setattr(m.fc, "bias", None),
    "tie": tie,
    "parametrization": lambda m: parametrizations.weight_norm(m.fc),
    "hook": lambda m: m.fc.register_forward_hook(lambda mod, args, out: out * 5),
    "pre-hook": lambda m: m.fc.register_forward_pre_hook(lambda mod, args: (args[0] * 5,)),
    "hook with keywords": lambda m: m.fc.register_forward_hook(
        lambda mod, args, kwargs, out: out * 5 + len(kwargs), with_kwargs=True
    ),
    "closure": lambda m: m.fc.register_forward_hook(lambda mod, args, out: out * m.head.weight.sum()),
    "another dict of hooks": replace_hooks,
    "other buffers": lambda m: [m.bn.register_buffer(name, None) for name in ("running_mean", "running_var")],
    "half": lambda m: m.to(torch.float32).to(torch.float64),
}


@few()
@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_changes_are_seen(how, made_before):
    module = seeded(Changing)
    apply, state = functional(module)
    (x,) = X()
    apply(state, x)
    functional_call(module, {}, x)
    if made_before:
        CHANGES["hook"](module)  # changed once already: what was kept must be renewed, too
        apply(state, x)
    CHANGES[how](module)
    params, buffers = functional(module)[1]  # names may have changed
    params = {name: p + 1 for name, p in params.items()}
    merged = {**params, **{name: b.clone() for name, b in buffers.items()}}
    for _ in range(2):
        out, new_buffers = apply((params, buffers), x)
        called = functional_call(module, {**params, **{name: b.clone() for name, b in buffers.items()}}, x)
        theirs = {name: t.clone() for name, t in merged.items()}
        expected = torch.func.functional_call(module, theirs, x)
        for ours, plain in (out, called):
            close(ours, expected[0])
            assert [(type(value), value) for value in plain] == [(type(value), value) for value in expected[1]]
        close(new_buffers, {name: theirs[name] for name in buffers})


class ReadsGlobals(nn.Module):
    """A global is read by a function inside a helper. The one that `__init__` reads has no part in a forward."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(3, 3) if unused is None else unused

    def forward(self, x):
        return self.part(x) + helper()


def helper() -> Any:
    return sum(value.weight.sum() if isinstance(value, nn.Module) else 0.0 for value in (lambda: [used])())


unused: Any = None


@pytest.mark.parametrize("name", ["used", "unused", "part"])
def test_global_names(name, monkeypatch):
    module, (x,) = ReadsGlobals(), X()
    monkeypatch.setitem(globals(), name, module.part)
    params, _ = other_tensors(module)
    apply, _ = functional(module)
    close(apply((params, {}), x)[0], torch.func.functional_call(module, params, x))
    ran = called(lambda: apply((params, {}), x))
    assert any(ref() is module for _, ref in ran) is (name == "used")


def test_clones_are_not_finalized():
    finalized = []

    class Finalized(nn.Linear):
        def __del__(self):
            finalized.append(self)

    module = Finalized(3, 3)
    apply, state = functional(module)
    apply(state, torch.ones(3))
    del apply
    gc.collect()
    assert finalized == []


def test_what_is_set_every_step_is_seen():
    module = seeded(Changing)
    apply, state = functional(module)
    for step in range(5):
        module.scale, module.tensor = step, torch.full((3,), step)
        module.fc.weight = nn.Parameter(torch.randn(3, 3))
        _, plain = apply(state, torch.ones(2, 3))[0]
        assert plain[0] == step
        given = dict(module.named_parameters())
        expected = torch.func.functional_call(module, given, torch.ones(2, 3))
        close(functional_call(module, given, torch.ones(2, 3))[0], expected[0])


class Holding(nn.Module):
    """Calls what an object holds, after its own layer."""

    def __init__(self, held):
        super().__init__()
        self.first, self.last, self.held = nn.Linear(3, 3), nn.Linear(3, 3), held

    def forward(self, x):
        x = self.first(x)
        for call in list(vars(self.held).values()) if isinstance(self.held, types.SimpleNamespace) else list(self.held):
            x = call(x)
        return x


class Growing(list[Any]):
    """A list of a class of its own."""


def put_in(module):
    module.held.call = module.last


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (types.SimpleNamespace, put_in),
    "list": (list, lambda module: module.held.append(module.last)),
    "list of a class of its own": (Growing, lambda module: module.held.append(module.last)),
    "user list": (UserList, lambda module: module.held.append(module.last)),
    "bound method in a list": (list, lambda module: module.held.append(module.last.forward)),
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(("make", "change"), HELD.values(), ids=HELD)
def test_an_object_that_gets_a_part_of_the_module_later(make, change, called_before):
    module, (x,) = seeded(lambda: Holding(make())), X()
    apply, state = functional(module)
    if called_before:
        apply(state, x)
        functional_call(module, {}, x)
    change(module)
    params, _ = other_tensors(module)
    expected = torch.func.functional_call(module, params, x) if make is types.SimpleNamespace else None
    hidden = nn.functional.linear(x, params["first.weight"], params["first.bias"])
    one = nn.functional.linear(hidden, params["last.weight"], params["last.bias"])
    for out in (apply((params, {}), x)[0], functional_call(module, params, x)):
        close(out, one)
        assert expected is None or torch.equal(out, expected)
        assert all(grad is not None for grad in torch.autograd.grad(out.sum(), list(params.values())))


class Strict(dict[str, Any]):
    """A config whose attributes are its keys, and all others an error of its own."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Bound(nn.Module):
    """Has bound methods and partials as attributes, and looks at what they are."""

    def __init__(self):
        super().__init__()
        self.fc, self.config = nn.Linear(3, 3), Strict(width=3)
        self.method, self.partial = self.twice, functools.partial(self.twice, scale=3.0)
        self.gelu = functools.partial(nn.functional.gelu, approximate="tanh")
        self.gelu.layer = self.fc
        self.calls = {self.method: 2.0}

    def twice(self, x, scale=2.0):
        return scale * self.fc(x)

    def forward(self, x):
        assert inspect.ismethod(self.method)
        assert self.method == self.twice
        assert self.method.__self__ is self
        assert list(inspect.signature(self.method).parameters) == ["x", "scale"]
        assert isinstance(self.partial, functools.partial)
        assert self.partial.keywords == {"scale": 3.0}
        assert self.gelu.layer is self.fc
        x = checkpoint(self.method, x, use_reentrant=False) + self.partial(x)
        return self.gelu(x) * self.calls[self.method] * self.config.width


def test_bound_methods_and_partials_are_those_of_the_clone():
    module, (x,) = seeded(Bound), X()
    params, _ = other_tensors(module)
    one = Bound()
    one.load_state_dict(params)
    expected = one(x)
    want = torch.autograd.grad(expected.sum(), list(one.parameters()))
    for out in (functional(module)[0]((params, {}), x)[0], functional_call(module, params, x)):
        close(out, expected)
        close(torch.autograd.grad(out.sum(), list(params.values())), want)


def test_a_partial_with_attributes_has_the_given_tensors():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)
            self.call = functools.partial(nn.functional.linear, weight=self.fc.weight)
            self.call.__doc__ = "as functools.update_wrapper leaves it"

        def forward(self, x):
            return self.call(x)

    module, (x,), weight = seeded(Partly), X(), torch.randn(3, 3)
    for out in (
        functional(module)[0](({"fc.weight": weight}, {}), x)[0],
        functional_call(module, {"fc.weight": weight}, x),
    ):
        close(out, x @ weight.T)


def test_other_names_of_a_tied_tensor():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.weights = [self.a.weight]

        def forward(self, x):
            return self.b(self.a(x)) @ self.weights[0]

    module, (x,), weight = Listed(), X(), torch.randn(3, 3)
    want = x @ weight.T @ weight.T @ weight
    for given in ({"a.weight": weight}, {"b.weight": weight}, {"a.weight": weight, "other": torch.ones(1)}):
        close(functional_call(module, given, x), want)
