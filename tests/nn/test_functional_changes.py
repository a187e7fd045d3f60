"""What the user changes in a module after `functional` has seen it is seen."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
import gc
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

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
