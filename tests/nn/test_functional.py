"""Modules as functions, against torch.func.functional_call: every odd kind of module that people have."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import contextlib
import copy
import functools
import gc
import re
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fdp
from fdp.nn._functional import functional
from fdp.nn._functional_call import _POOLS, functional_call, take
from fdp.nn._stateless import Skeleton

pytestmark = pytest.mark.usefixtures("float64")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Buffers(nn.Module):
    """One buffer is rebound, one written in place; one is not persistent."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("rebound", torch.zeros(3))
        self.register_buffer("written", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.rebound = self.rebound + self.weight.detach()
        self.written.add_(2)
        return x * self.weight + self.rebound + self.written


class TiedBuffers(nn.Module):
    """Other names than the first are rebound: what is returned is under the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("second", self.first)
        self.part = nn.Module()
        self.part.register_buffer("third", self.first)

    def forward(self, x):
        self.second = self.second + 1
        self.part.third = self.part.third + 2
        return x + self.first + self.second + self.part.third


class TwoKinds(nn.Module):
    """One tensor that is a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("same", self.weight)

    def forward(self, x):
        return x * self.weight + self.same


class NamesItself(nn.Linear):
    """Names a tensor that is in no registry."""

    def __init__(self):
        super().__init__(3, 3)
        self.extra = torch.randn(3)

    def named_parameters(self, *args, **kwargs):
        yield from super().named_parameters(*args, **kwargs)
        yield "extra", self.extra

    def forward(self, x):
        return super().forward(x) * self.extra


class Slotted(nn.Linear):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__(3, 3)
        object.__setattr__(self, "factor", 3.0)

    def forward(self, x):
        return super().forward(x) * self.factor


class Aliases(nn.Module):
    """The same submodule again: in a list, a dict, a set, a tuple, as a plain attribute, behind bound methods."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.nested = {"list": [self.fc], "tuple": (self.fc,), self.fc: "key"}
        self.bag = {self.fc}
        self.bound = self.fc.forward
        self.own = self.scaled
        self.__dict__["plain"] = self.fc

    def scaled(self, x):
        return 2 * self.fc(x)

    def forward(self, x):
        assert self.nested[self.nested["list"][0]] == "key"
        assert self.bag == {self.fc}
        parts = (*self.nested["list"], *self.nested["tuple"], *self.bag, self.bound, self.own, self.plain)
        return sum((i + 1) * part(x) for i, part in enumerate(parts))


class Unregistered(nn.Module):
    """Modules in a plain list are no parameters: their own tensors are used."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.others = [nn.Linear(3, 3), self.fc]
        self.others[0].bias = self.fc.bias

    def forward(self, x):
        return self.others[0](x) + self.others[1](x)


class Plain(nn.Module):
    """Attributes of every plain kind."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.tensor = torch.randn(3)
        self.scale, self.config, self.activation = 2.0, {"add": [1, 2]}, torch.tanh

    def forward(self, x):
        return self.activation(self.fc(x)) * self.scale + self.tensor + sum(self.config["add"])


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.layers = nn.ModuleDict({"fc": nn.Linear(3, 3)})

    def forward(self, x):
        return self.layers["fc"](x) * sum(p for p in self.parameters() if p.ndim == 1) * self.named["a"]


class Recursive(nn.Module):
    """Calls itself, and a part of itself, as functions."""

    def __init__(self, call=functional_call):
        super().__init__()
        self.fc, self.call = nn.Linear(3, 3), call

    def forward(self, x, depth=2):
        own = {name: 2 * p for name, p in self.named_parameters()}
        if depth == 0:
            return self.call(self.fc, {"weight": own["fc.weight"]}, (x,)) + self.fc(x)
        return self.call(self, own, (x, depth - 1)) + self.fc(x)


class CallsPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return functional_call(self.fc, {}, x)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    @functools.lru_cache  # noqa: B019
    def both(self, factor):
        return factor * torch.eye(self.fc.out_features)

    def forward(self, x):
        return self.fc(x) @ self.both(2)


class Weak(nn.Module):
    def __init__(self, refer=weakref.ref):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.__dict__["back"] = refer(self)

    def forward(self, x):
        return (self.back() if isinstance(self.back, weakref.ref) else self.back).fc(x)


class Deep(nn.Linear):
    """Holds a list that is deeper than the stack."""

    def __init__(self):
        super().__init__(3, 3)
        self.deep = []
        for _ in range(sys.getrecursionlimit()):
            self.deep = [self.deep]


class Caller:
    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        return self.call(*args)


def with_hooks():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].register_forward_pre_hook(lambda mod, args: (args[0] * mod.bias,))
    module[0].register_forward_hook(lambda mod, args, out: out * mod.weight.sum())
    module[1].register_forward_hook(lambda mod, args, kwargs, out: out + mod.bias, with_kwargs=True)
    return module


def with_patched_forward():
    module = nn.Linear(3, 3)
    module.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, module)
    return module


def with_closure():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].register_forward_hook(lambda mod, args, out: out + module[0].weight.sum())
    return module


def with_closure_of_forward():
    fc = nn.Linear(3, 3)

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = fc

        def forward(self, x):
            return fc(x)

    return Local()


def with_function_holding(hold):
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].forward = hold(module[0])
    return module


def twice(fc, x):
    return 2 * nn.functional.linear(x, fc.weight, fc.bias)


def default_argument(fc):
    def forward(x, fc=fc):
        return twice(fc, x)

    return forward


def keyword_default(fc):
    def forward(x, *, fc=fc):
        return twice(fc, x)

    return forward


def function_attribute(fc):
    def forward(x):
        return twice(sys._getframe().f_back.f_locals["forward_call"].fc, x)

    forward.fc = fc
    return forward


def method_closure(fc):
    return types.MethodType(lambda self, x: twice(fc, x), fc)


def with_state_dict_hook():
    module = nn.Linear(3, 3)
    module.register_load_state_dict_pre_hook(lambda mod, *args: module.weight)
    return module


def names_of_modules(fc):
    names = {fc: 2.0}
    fc.register_forward_hook(lambda mod, args, out: out * names[mod])
    return types.MethodType(type(fc).forward, fc)


def with_backward_hook():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].register_full_backward_hook(lambda mod, grads, outs: (2 * grads[0],))
    return module


def old(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(nn.Linear(3, 3))


def shared():
    return nn.Sequential(*[nn.Linear(3, 3)] * 2)


def with_compiled_function():
    module = nn.Sequential(nn.Identity(), nn.Linear(3, 3))
    module[0].forward = torch.compile(lambda x: x.tanh(), backend="eager")
    return module


def compiled_in_place():
    module = nn.Sequential(nn.Linear(3, 3))
    module.compile(backend="eager")
    return module


def traced():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def evaluated(module):
    return module.eval()


def rows(*shape) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


X = rows(2, 3)
# Name, how to make the module, how to make its arguments, whether a private clone can stand for it.
MODULES: list[tuple[str, Callable[[], nn.Module], Callable[[], tuple[Any, ...]], bool]] = [
    ("linear", lambda: nn.Linear(3, 3), X, True),
    ("no tensors", nn.Tanh, X, True),
    ("batch norm", lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), X, True),
    ("batch norm eval", lambda: evaluated(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), X, True),
    ("buffers", Buffers, X, True),
    ("tied buffers", TiedBuffers, X, True),
    ("tied", Tied, lambda: (torch.tensor([1, 2, 4]),), True),
    ("shared module", shared, X, True),
    ("GRU", lambda: nn.GRU(3, 4, 2), rows(2, 1, 3), True),
    ("LSTM", lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), rows(2, 1, 3), True),
    ("attention", lambda: nn.MultiheadAttention(4, 2), lambda: (*rows(2, 1, 4)(),) * 3, True),
    ("transformer", transformer, rows(2, 3, 4), True),
    ("transformer eval", lambda: evaluated(transformer()), rows(2, 3, 4), True),
    ("spectral_norm", lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3))), X, True),
    ("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 3)), X, True),
    ("old spectral_norm", lambda: old(nn.utils.spectral_norm), X, True),
    ("old weight_norm", lambda: old(nn.utils.weight_norm), X, True),
    ("containers", Containers, X, True),
    ("aliases", Aliases, X, True),
    ("unregistered", Unregistered, X, True),
    ("plain attributes", Plain, X, True),
    ("hooks", with_hooks, X, True),
    ("patched forward", with_patched_forward, X, True),
    ("graph", traced, X, True),
    ("state dict hook", with_state_dict_hook, X, True),
    ("recursive", Recursive, X, True),
    ("closure", with_closure, X, False),
    ("closure of forward", with_closure_of_forward, X, False),
    ("default argument", lambda: with_function_holding(default_argument), X, False),
    ("keyword default", lambda: with_function_holding(keyword_default), X, False),
    ("function attribute", lambda: with_function_holding(function_attribute), X, False),
    ("method that closes over it", lambda: with_function_holding(method_closure), X, False),
    ("partial", lambda: with_function_holding(lambda fc: functools.partial(twice, fc)), X, False),
    ("object", lambda: with_function_holding(lambda fc: Caller(functools.partial(twice, fc))), X, False),
    ("keyed by module", lambda: with_function_holding(names_of_modules), X, False),
    ("weak reference", Weak, X, False),
    ("weak proxy", lambda: Weak(weakref.proxy), X, False),
    ("names itself", NamesItself, X, False),
    ("slots", Slotted, X, False),
    ("deep list", Deep, X, False),
    ("backward hook", with_backward_hook, X, False),
    ("cached method", Cached, X, False),
    ("compiled function", with_compiled_function, X, False),
    ("compiled in place", compiled_in_place, X, False),
    ("compiled", lambda: torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager"), X, False),
]
BY_NAME = {name: (make, args) for name, make, args, _ in MODULES}
each_module = pytest.mark.parametrize(("make", "args"), BY_NAME.values(), ids=BY_NAME)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def other_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params = {name: torch.randn_like(p, requires_grad=True) for name, p in module.named_parameters()}
    return params, {name: b.clone() for name, b in module.named_buffers()}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def gradients(out: Any, params: dict[str, Tensor]) -> list[Tensor]:
    leaves = [leaf for leaf in tensors(out) if leaf.requires_grad]
    if not leaves or not params:
        return []
    total = sum((leaf * torch.arange(leaf.numel()).view_as(leaf)).sum() for leaf in leaves)
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    return [torch.zeros(()) if grad is None else grad for grad in grads]


def close(ours: Any, oracle: Any) -> None:
    torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-9)


def contents(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Everything a call could leave behind: attributes, tensors and how often they were written."""
    found = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            copied = copy.copy(value) if isinstance(value, dict | list | set) else value
            found.append((f"{path}.{name}", copied, value._version if isinstance(value, Tensor) else None))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.append((name, tensor.clone(), tensor._version))
    return found


def assert_untouched(module: nn.Module, before: list[tuple[str, Any, Any]]) -> None:
    after = contents(module)
    assert [name for name, _, _ in after] == [name for name, _, _ in before]
    for (name, now, version), (_, then, old_version) in zip(after, before, strict=True):
        assert version == old_version, name
        if isinstance(now, Tensor):
            assert torch.equal(now, then), name
        elif isinstance(now, list):
            assert all(a is b for a, b in zip(now, then, strict=True)), name
        else:
            assert now == then, name


# ---------------------------------------------------------------- values


@each_module
def test_apply_is_the_module(make, args):
    module, oracle, inputs = seeded(make), seeded(make), args()
    apply, _ = functional(module)
    before = contents(module)
    for _ in range(3):  # a new clone, then the same again
        params, buffers = other_tensors(module)
        merged = {**params, **{name: b.clone() for name, b in buffers.items()}}
        given, versions = dict(buffers), [b._version for b in buffers.values()]
        expected = torch.func.functional_call(oracle, merged, inputs)
        out, new_buffers = apply((params, buffers), *inputs)
        close(tensors(out), tensors(expected))
        close(gradients(out, params), gradients(expected, params))
        assert list(new_buffers) == list(buffers)
        close(list(new_buffers.values()), [merged[name] for name in buffers])
        assert [b._version for b in buffers.values()] == versions
        assert all(buffers[name] is given[name] for name in given)
    assert_untouched(module, before)


@each_module
@pytest.mark.parametrize("part", ["params", "buffers", "all", "pair", "one"])
def test_functional_call_is_that_of_torch(make, args, part):
    module, oracle, inputs = seeded(make), seeded(make), args()
    for _ in range(2):
        params, buffers = other_tensors(module)
        one = dict(list(params.items())[:1])
        ours = {
            "params": params,
            "buffers": buffers,
            "all": {**params, **buffers},
            "pair": (params, buffers),
            "one": one,
        }[part]
        theirs = pytree.tree_map(lambda t: t if t.requires_grad else t.clone(), ours)
        out = functional_call(module, ours, inputs)
        expected = torch.func.functional_call(oracle, theirs, inputs)
        close(tensors(out), tensors(expected))
        close(gradients(out, params), gradients(expected, params))
        close(tensors(ours), tensors(theirs))
        if make is not shared:  # torch leaves one of the given tensors in a module that has two names
            close(dict(module.state_dict()), dict(oracle.state_dict()))


@pytest.mark.parametrize(("make", "trusted"), [(make, trusted) for _, make, _, trusted in MODULES], ids=BY_NAME)
def test_a_clone_is_called_where_that_is_the_same(make, trusted):
    assert Skeleton(seeded(make)).trusted is trusted


def transformed(transform: str, call: Callable[..., Any], params: dict[str, Tensor]) -> Any:
    """The values, or the kind of error where a module does not go through the transform."""

    def loss(params):
        return sum((leaf**2).sum() for leaf in tensors(call(params)) if leaf.is_floating_point())

    stacked = {name: torch.stack([p, p + 1]) for name, p in params.items()}
    try:
        match transform:
            case "grad":
                return torch.func.grad(loss)(params)
            case "vjp":
                return torch.func.vjp(loss, params)[1](torch.ones(()))
            case "jvp":
                return torch.func.jvp(loss, (params,), (params,))
            case "vmap":
                return torch.func.vmap(loss)(stacked)
            case _:
                return torch.func.vmap(torch.func.grad(loss))(stacked)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@each_module
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "vmap of grad"])
def test_transforms(make, args, transform):
    module, oracle, inputs = seeded(make), seeded(make), args()
    apply, (params, buffers) = functional(module)

    def torchs(params):
        copies = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(oracle, {**params, **copies}, inputs)

    expected = transformed(transform, torchs, params)
    for _ in range(2):
        ours = transformed(transform, lambda params: apply((params, buffers), *inputs)[0], params)
        assert ours is expected if isinstance(expected, type) else not isinstance(ours, type)
        close(tensors(ours), tensors(expected))


def test_tensor_of_two_kinds():
    (x,) = rows(3)()
    for part in ("weight", "same"):
        module, oracle = seeded(TwoKinds), seeded(TwoKinds)
        given, theirs = {part: torch.full((3,), 2.0)}, {part: torch.full((3,), 2.0)}
        close(functional_call(module, given, x), torch.func.functional_call(oracle, theirs, x))
    out, _ = functional(module)[0](({"weight": torch.ones(3)}, {"same": torch.zeros(3)}), x)
    close(out, x)


def test_forward_that_calls_itself():
    module, oracle = seeded(Recursive), seeded(lambda: Recursive(torch.func.functional_call))
    apply, (_, buffers) = functional(module)
    for _ in range(2):
        (params, _), (x,) = other_tensors(module), X()
        out, _ = apply((params, buffers), x)
        expected = torch.func.functional_call(oracle, params, x)
        close(out, expected)
        close(gradients(out, params), gradients(expected, params))
        close(functional_call(module, params, x), expected)


def test_checkpoint_runs_again_with_the_same_tensors():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    module = Checkpointed()
    apply, _ = functional(module)
    (first, _), (second, _), (x,) = other_tensors(module), other_tensors(module), X()
    outs = [apply((params, {}), x)[0] for params in (first, second)] + [functional_call(module, first, x)]
    for out, params in zip(outs, (first, second, first), strict=True):
        body = {name.removeprefix("body."): p for name, p in params.items()}
        expected = torch.func.functional_call(module.body, body, x)
        close(gradients(out, params), gradients(expected, params))


@pytest.mark.parametrize("part", ["list", "_modules", "_parameters"])
def test_checkpoint_of_what_forward_took_out_of_a_container(part: str):
    """The clone is used again in the backward by way of its containers, which nobody may have filled anew since."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(1, 1, bias=False)
            self.list = [self.body]

        def forward(self, x):
            parts = {"list": self.list, "_modules": self._modules, "_parameters": self.body._parameters}[part]
            keys = {"list": 0, "_modules": "body", "_parameters": "weight"}

            def run(x):
                found = parts[keys[part]]
                return (found(x) if isinstance(found, nn.Module) else x @ found) ** 2

            return checkpoint(run, x, use_reentrant=False)

    apply, (params, _) = functional(Checkpointed())
    threes = {name: torch.full_like(param, 3.0).requires_grad_() for name, param in params.items()}
    outs = [apply((threes, {}), torch.full((1, 1), 2.0))[0] for _ in range(2)]
    for out in outs:
        close(out, torch.full((1, 1), 36.0))
        close(torch.autograd.grad(out, list(threes.values())), (torch.full((1, 1), 24.0),))


def test_output_that_is_a_container_of_the_module():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, x):
            self.kept.append(x)
            return self.kept

    module = Keeping()
    apply, state = functional(module)
    outs = [apply(state, torch.full((1,), float(i)))[0] for i in range(2)]
    assert [[x.item() for x in out] for out in outs] == [[0.0], [1.0]]
    assert module.kept == []


def test_output_that_is_computed_later():
    class Lazily(nn.Linear):
        def forward(self, x):
            return (nn.functional.linear(row, self.weight, self.bias) for row in x)

    module = Lazily(3, 3)
    apply, _ = functional(module)
    (first, _), (second, _), (x,) = other_tensors(module), other_tensors(module), X()
    one, two = apply((first, {}), x)[0], apply((second, {}), x)[0]
    for out, params in ((one, first), (two, second)):
        close(torch.stack(list(out)), nn.functional.linear(x, **params))


# ---------------------------------------------------------------- the module as it is now


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
    "closure": lambda m: m.fc.register_forward_hook(lambda mod, args, out: out * m.head.weight.sum()),
    "another dict of hooks": replace_hooks,
    "other buffers": lambda m: [m.bn.register_buffer(name, None) for name in ("running_mean", "running_var")],
    "half": lambda m: m.to(torch.float32).to(torch.float64),
}


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


used: Any = None
unused: Any = None
part: Any = None


@pytest.mark.parametrize("name", ["used", "unused", "part"])
def test_global_names(name, monkeypatch):
    module, (x,) = ReadsGlobals(), X()
    monkeypatch.setitem(globals(), name, module.part)
    assert Skeleton(module).trusted is (name != "used")
    params, _ = other_tensors(module)
    close(functional(module)[0]((params, {}), x)[0], torch.func.functional_call(module, params, x))


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


def test_a_plain_value_set_every_step_keeps_the_clone(monkeypatch):
    made = []
    monkeypatch.setattr(
        "fdp.nn._functional_call.Skeleton", lambda module, **kw: made.append(Skeleton(module, **kw)) or made[-1]
    )
    module = seeded(Changing)
    apply, state = functional(module)
    for step in range(5):
        module.scale, module.tensor, module.fc.weight = step, torch.full((3,), step), nn.Parameter(torch.randn(3, 3))
        _, plain = apply(state, torch.ones(2, 3))[0]
        assert plain[0] == step
    assert len(made) == 1
    monkeypatch.setattr(made[0], "_take_over", None)  # not needed again
    apply(state, torch.ones(2, 3))


# ---------------------------------------------------------------- what forward writes


class Writing(nn.Module):
    """Writes whatever a forward can write, and returns what it found."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("gone", None)
        self.n, self.zero, self.none, self.calls, self.empty = 1, 0, None, [[0]], {}
        self.queue, self.bag, self.pair = deque([1], maxlen=2), {1}, ([0],)

    def forward(self, x):
        found = [
            self.n,
            self.zero,
            self.none,
            copy.deepcopy(self.calls),
            len(self.empty),
            list(self.queue),
            set(self.bag),
        ]
        found += [self.pair[0][0], sorted(vars(self)), self.drop.p, len(self._forward_hooks), list(self._buffers)]
        found += [list(self._modules), [name for name, _ in self.named_parameters()], vars(self.fc).get("last")]
        self.n = True
        self.zero = torch.zeros(())
        self.none = self.calls
        self.calls.append(x)
        self.calls[0][0] += 1
        self.empty[self.fc] = [self.fc]
        self.queue.append(x)
        self.bag.add(2)
        self.pair[0][0] = x
        self.drop.p = 0.5
        self.fc.last = (self.drop, self.fc.forward)
        self.register_forward_hook(lambda mod, args, out: out)
        self.register_buffer("more", x)
        self.extra = nn.Tanh()
        self._buffers.pop("gone", None)
        self.count = self.count + 1
        return self.fc(x), found


def with_closure_over_writing():
    module = Writing()
    module.fc.register_forward_hook(lambda mod, args, out: out + module.count)
    return module


class Single(nn.Module):
    """Writes one thing, and returns what it found of all."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.plain, self.note = nn.Linear(3, 3), nn.Sequential(), "note"
        self.register_buffer("count", torch.zeros(()))
        self.fc.register_forward_hook(lambda mod, args, out: out)
        self.items, self.empty = [1, 2], []
        self.write = write

    def forward(self, x):
        found = [(name, str(vars(part)), list(part._parameters)) for name, part in self.named_modules()]
        self.write(self)
        return self.fc(x), found


def raises_after(write):
    def both(module):
        write(module)
        raise ArithmeticError("in forward")

    return both


WRITES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "note", "other"),
    "new attribute": lambda m: setattr(m.fc, "new", 1),
    "no attribute": lambda m: delattr(m, "note"),
    "dict of attributes": lambda m: vars(m).update(note=2),
    "list": lambda m: m.items.append(3),
    "item of a list": lambda m: m.items.__setitem__(0, True),
    "empty list": lambda m: m.empty.append(3),
    "first hook": lambda m: m.register_forward_hook(lambda mod, args, out: out),
    "first hook with kwargs": lambda m: m.register_forward_hook(lambda mod, args, kwargs, out: out, with_kwargs=True),
    "second hook": lambda m: m.fc.register_forward_pre_hook(lambda mod, args: None),
    "no hook": lambda m: m.fc._forward_hooks.clear(),
    "first submodule": lambda m: m.plain.append(nn.Tanh()),
    "another submodule": lambda m: setattr(m, "new", nn.Tanh()),
    "submodule": lambda m: setattr(m, "plain", nn.Tanh()),
    "registries": lambda m: vars(m).update(_modules={"fc": m.fc}, _buffers={}),
    "first buffer": lambda m: m.fc.register_buffer("new", torch.zeros(())),
    "another buffer": lambda m: m.register_buffer("new", torch.zeros(()), persistent=False),
    "no buffer": lambda m: delattr(m, "count"),
    "parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.zeros(3, 3))),
    "no parameter": lambda m: setattr(m.fc, "bias", None),
    "mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_apply_keeps_nothing_of_one_write(how, failing, hooked):
    module = Single(raises_after(WRITES[how]) if failing else WRITES[how])
    if hooked:
        module.fc.register_forward_hook(lambda mod, args, out, owner=module: out)
    apply, state = functional(module)
    before = contents(module)
    if failing:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="in forward"):
                apply(state, torch.ones(3))
        module.write = WRITES[how]
        apply(state, torch.ones(3))
        return
    (_, first), new_buffers = apply(state, torch.ones(3))
    (_, second), _ = apply(state, torch.ones(3))
    assert first == second
    assert list(new_buffers) == ([] if how == "no buffer" else ["count"]) or how == "registries"
    assert_untouched(module, before)


@pytest.mark.parametrize("make", [Writing, with_closure_over_writing])
def test_apply_keeps_nothing_of_what_forward_writes(make):
    module = seeded(make)
    apply, (params, buffers) = functional(module)
    before = contents(module)
    deep = copy.deepcopy([module.calls, module.empty, module.queue, module.bag, module.pair])
    first = apply((params, buffers), torch.ones(2, 3))
    second = apply((params, buffers), torch.ones(2, 3))
    assert str(first) == str(second)  # as text, where 1 is not True
    assert first[1] == {"count": torch.ones(())}
    assert_untouched(module, before)
    assert deep == [module.calls, module.empty, module.queue, module.bag, module.pair]


@pytest.mark.parametrize("make", [Writing, with_closure_over_writing])
def test_functional_call_writes_what_torchs_writes(make):
    module, oracle, x = seeded(make), seeded(make), torch.ones(2, 3)
    for _ in range(2):
        given, theirs = {"fc.weight": torch.ones(3, 3)}, {"fc.weight": torch.ones(3, 3)}
        out, found = functional_call(module, given, x)
        expected, expected_found = torch.func.functional_call(oracle, theirs, x)
        close(out, expected)
        assert str(found) == str(expected_found)
    assert module.none is module.calls
    assert module.empty == {module.fc: [module.fc]}
    assert module.fc.last == (module.drop, module.fc.forward)
    assert [len(part._forward_hooks) for part in (module, oracle)] == [2, 2]
    for part, theirs in zip(module.modules(), oracle.modules(), strict=True):
        assert list(vars(part)) == list(vars(theirs))
    close(dict(module.state_dict()), dict(oracle.state_dict()))


def test_attribute_that_was_deleted_in_forward():
    class Deleting(nn.Linear):
        def forward(self, x):
            del self.note
            return super().forward(x)

    module = Deleting(3, 3)
    module.note = [1]
    apply, state = functional(module)
    for _ in range(2):
        apply(state, torch.ones(3))
    assert module.note == [1]
    functional_call(module, {}, torch.ones(3))
    assert not hasattr(module, "note")
    with pytest.raises(AttributeError, match="note"):
        apply(state, torch.ones(3))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.fc.history = {"all": [torch.zeros(3)]}
        self.others, self.pair = [nn.BatchNorm1d(3)], (torch.zeros(1),)

    def forward(self, x, which):
        if which == "list":
            self.fc.history["all"][0] += 1
        elif which == "tuple":
            self.pair[0].add_(1)
        elif which == "module":
            self.others[0](x)
        elif which == "other":
            self.fc.history["all"][0] = torch.ones(3)
        return self.fc(x)


WRITTEN = {"list": r"fc\.history\.all\.0", "tuple": r"pair\.0", "module": r"others\.0\.num_batches_tracked"}


@pytest.mark.parametrize("which", WRITTEN)
@pytest.mark.parametrize("hooked", [False, True])
def test_plain_tensor_written_in_place(which, hooked):
    module = InPlace()
    if hooked:
        module.fc.register_forward_hook(lambda mod, args, out: out + module.fc.bias)
    apply, state = functional(module)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"apply: forward wrote in place to \['{WRITTEN[which]}'\].*register_buffer"
        ):
            apply(state, torch.ones(2, 3), which)
        apply(state, torch.ones(2, 3), "none")
        apply(state, torch.ones(2, 3), "other")  # another tensor in its place is no write
    functional_call(module, {}, (torch.ones(2, 3), which))


def test_inference_tensors():
    module = Plain()
    with torch.inference_mode():
        module.tensor = torch.ones(3)
        apply, state = functional(module)
        close(apply(state, torch.ones(3))[0], module(torch.ones(3)))
    close(apply(state, torch.ones(3))[0], module(torch.ones(3)))


# ---------------------------------------------------------------- threads, references


def wrong_calls(call: Callable[[int], tuple[Any, Any]], calls: int, threads: int = 4) -> list[object]:
    """The calls that failed or did not give what they should, with threads that change as often as they can."""
    wrong: list[object] = []

    def run(i: int) -> None:
        for n in range(calls):
            try:
                ours, expected = call(i)
                if not all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(expected), strict=True)):
                    wrong.append((i, n))
            except Exception as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    return wrong


def counted():
    class Counted(nn.Sequential):
        n = 0

        def forward(self, x):
            self.n = self.n + 1
            return super().forward(x)

    return Counted(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3))


@pytest.mark.parametrize(("make", "calls"), [(counted, 100), (with_closure, 100), (Recursive, 10)])
def test_threads(make, calls):
    module, (x,) = seeded(make), X()
    apply, _ = functional(module)
    states = [other_tensors(module) for _ in range(4)]
    expected = [functional(seeded(make))[0](state, x) for state in states]

    def call(i):
        params, buffers = states[i]
        merged = {**params, **{name: b.clone() for name, b in buffers.items()}}
        out = functional_call(module, merged, x)
        again = out, {name: merged[name] for name in buffers}
        return (apply(states[i], x), again), (expected[i], expected[i])

    assert wrong_calls(call, calls) == []


@pytest.mark.parametrize("through", ["apply", "functional_call"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", [CallsPart, Recursive])
def test_calls_of_parts_in_forward_leave_nothing(make, closure, through, monkeypatch):
    module, (x,) = make(), X()
    if closure:
        module.register_forward_hook(lambda mod, args, out: out + module.fc.bias)
    apply, _ = functional(module)
    made = []
    monkeypatch.setattr(
        "fdp.nn._functional_call.Skeleton", lambda module, **kw: made.append(id(module)) or Skeleton(module, **kw)
    )

    def refs() -> list[weakref.ref[Tensor]]:
        params, _ = other_tensors(module)
        with torch.no_grad():
            apply((params, {}), x) if through == "apply" else functional_call(module, params, x)
        return [weakref.ref(p) for p in params.values()]

    gc.disable()
    try:
        for _ in range(3):
            assert [ref() for ref in refs() if ref() is not None] == []
    finally:
        gc.enable()
    assert made.count(id(module)) == 1 or closure  # as though there were no calls inside


def test_call_that_begins_while_another_is_in_place():
    started, go = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x):
            self.note = "in forward"
            started.set()
            assert go.wait(30)
            return super().forward(x)

    module, (x,) = Waiting(3, 3), X()
    module.register_forward_hook(lambda mod, args, out: out + module.bias)
    apply, _ = functional(module)
    before, states, outs = contents(module), [other_tensors(module) for _ in range(2)], {}
    threads = [threading.Thread(target=lambda i=i: outs.update({i: apply(states[i], x)[0]})) for i in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # by now it has met the module in the middle of the other call
    go.set()
    for thread in threads:
        thread.join()
    assert_untouched(module, before)
    for i, (params, _) in enumerate(states):
        close(outs[i], nn.functional.linear(x, **params) + params["bias"])


def test_threads_that_call_a_part_of_one_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, weights):
            own = functional_call(self.fc, {}, x)
            outs: list[Any] = [None] * 4

            def work(i):
                outs[i] = [functional_call(self.fc, {"weight": weights[i]}, x) for _ in range(20)]

            workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            [worker.start() for worker in workers]
            [worker.join() for worker in workers]
            return own, outs, functional_call(self.fc, {}, x)

    module, (x,) = Outer(), X()
    apply, _ = functional(module)
    weights = [torch.randn(3, 3) for _ in range(4)]
    for _ in range(3):
        params, _ = other_tensors(module)
        own, outs, again = apply((params, {}), x, weights)[0]
        expected = nn.functional.linear(x, params["fc.weight"], params["fc.bias"])
        close([own, again], [expected, expected])
        for weight, several in zip(weights, outs, strict=True):
            close(several, [nn.functional.linear(x, weight, params["fc.bias"])] * 20)


def fails(mod, args):
    raise ArithmeticError("in forward")


@each_module
@pytest.mark.parametrize("through", ["apply", "functional_call"])
@pytest.mark.parametrize("failing", [False, True])
def test_no_reference_is_left(make, args, through, failing):
    module, inputs = seeded(make), args()
    apply, _ = functional(module)
    if failing:
        list(module.modules())[-1].register_forward_pre_hook(fails)

    def call() -> list[weakref.ref[Tensor]]:
        params, buffers = other_tensors(module)
        with torch.no_grad(), contextlib.suppress(ArithmeticError):
            if through == "apply":
                apply((params, buffers), *inputs)
            else:
                functional_call(module, {**params, **buffers}, inputs)
        return [weakref.ref(tensor) for tensor in [*params.values(), *buffers.values()]]

    gc.disable()
    try:
        for _ in range(2):
            assert [ref() for ref in call() if ref() is not None] == []
    finally:
        gc.enable()


def test_functional_call_does_not_keep_modules():
    def call(make, args):
        module = seeded(make)
        functional_call(module, {}, args())
        return weakref.ref(module)

    refs = {name: call(make, args) for name, (make, args) in BY_NAME.items() if make is not Cached}
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == []
    assert all(ref() is not None for ref, _ in _POOLS.values())


def test_another_module_at_the_same_address(monkeypatch):
    gone, module, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.ones(3)
    monkeypatch.setitem(_POOLS, id(module), (weakref.ref(gone), [Skeleton(gone)]))
    close(functional_call(module, {}, x), module(x))


def test_pool_that_another_thread_empties():
    class Emptied(list):
        def __bool__(self):
            return True

    assert take(Emptied(), nn.Linear(3, 3)).trusted


def test_modules_called_in_place_are_searched_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        "fdp.nn._functional_call.Skeleton", lambda module, **kw: made.append(1) or Skeleton(module, **kw)
    )
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first = module[0]
    module[1].register_forward_hook(lambda mod, args, out: out + first.bias)
    apply, state = functional(module)
    for _ in range(3):
        apply(state, torch.ones(3))
    assert len(made) == 1


# ---------------------------------------------------------------- state, errors, compilation


def test_state_of_functional():
    module = nn.Sequential(Tied(), Buffers(), nn.BatchNorm1d(3))
    apply, (params, buffers) = functional(module)
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert list(buffers) == [name for name, _ in module.named_buffers()]
    assert "0.head.weight" not in params
    assert "1.written" in buffers
    assert apply.out_dims == (0, "mean")
    for tree, named in ((params, module.named_parameters()), (buffers, module.named_buffers())):
        for name, tensor in named:
            assert tree[name].data_ptr() == tensor.data_ptr()
            assert type(tree[name]) is Tensor
            assert not tree[name].requires_grad
    _, (params, buffers) = functional(module, detach=False)
    assert all(params[name] is p for name, p in module.named_parameters())
    assert all(buffers[name] is b for name, b in module.named_buffers())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.tanh, "functional: expected a torch.nn.Module, got builtin_function_or_method"),
        (nn.Linear, "functional: expected a torch.nn.Module, got the class Linear; make an instance"),
        (nn.DataParallel(nn.Linear(1, 1)), "functional: expected the module inside DataParallel; pass .module"),
    ],
)
def test_not_a_module(module, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        functional(module)


def test_not_a_module_to_functional_call():
    with pytest.raises(TypeError, match=r"functional_call: expected a torch\.nn\.Module, got dict"):
        functional_call({}, {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules():
    with pytest.raises(TypeError, match=r"functional: a scripted module .* pass the Python module"):
        functional(torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with Jitted modules"):
        functional_call(torch.jit.script(nn.Tanh()), {}, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with nn\.DataParallel module"):
        functional_call(nn.DataParallel(nn.Linear(3, 3)), {}, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with Jitted modules"):
        torch.jit.trace(lambda x: functional_call(nn.Tanh(), {}, x), torch.ones(3))
    module = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3))
    (params, _), (x,) = other_tensors(module), X()
    theirs = outcome(lambda: torch.func.functional_call(module, dict(params), x))
    close(outcome(lambda: functional_call(module, dict(params), x)), theirs)
    close(functional(module)[0]((params, {}), x)[0], theirs[0])


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return tensors(call())
    except Exception as error:
        return type(error), str(error)


def test_lazy_modules():
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(
        ValueError, match=r"functional: \['0.weight', .*'1.running_var'\] have no shape yet; run a dummy"
    ):
        functional(module)
    functional_call(module, {}, torch.ones(2, 3))
    assert type(module[0]) is nn.Linear
    apply, state = functional(module)
    assert apply(state, torch.ones(2, 3))[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ({"weight": torch.ones(1)}, "dict"),
        (({},), "tuple"),
        (({}, {}, {}), "tuple"),
        (({}, None), "tuple"),
        ((torch.ones(1), {}), "tuple"),
        (torch.ones(2), "Tensor"),
        ("ab", "str"),
    ],
)
def test_state_that_is_no_pair(state, got):
    apply, _ = functional(nn.Linear(3, 3))
    with pytest.raises(
        TypeError, match=rf"apply: .*pair \(params, buffers\).*got {got}\. Call apply\(\(params, buffers\)"
    ):
        apply(state, torch.ones(3))


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3), with_closure_over_writing])
def test_names_that_do_not_fit(make):
    apply, (params, buffers) = functional(make())
    (first, *_) = params
    (lacks, *_) = buffers
    del params[first], buffers[lacks]
    params["x"] = buffers["y"] = buffers["z"] = torch.ones(3)
    expected = (
        f"apply: params lacks ['{first}']; params has unexpected ['x']; buffers lacks ['{lacks}']; "
        "buffers has unexpected ['y', 'z']. Pass (params, buffers) with the names functional(module) returns"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(expected)):
            apply((params, buffers), torch.ones(2, 3))


def test_params_and_buffers_exchanged():
    apply, (params, buffers) = functional(nn.BatchNorm1d(3, track_running_stats=True))
    with pytest.raises(ValueError, match=r"params lacks .*params has unexpected .*buffers lacks"):
        apply((buffers, params), torch.ones(2, 3))


CALLS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "kwargs": lambda call, m: call(m, {}, (), {"tokens": torch.tensor([1])}),
    "args and kwargs": lambda call, m: call(m, {}, None, {"tokens": torch.tensor([1])}),
    "args that are a list": lambda call, m: call(m, {}, [torch.tensor([1])]),
    "one tensor": lambda call, m: call(m, {}, torch.tensor([1])),
    "tied by one name": lambda call, m: call(m, {"head.weight": torch.ones(5, 4)}, torch.tensor([1])),
    "tied by both": lambda call, m: call(
        m, dict.fromkeys(["embed.weight", "head.weight"], torch.ones(5, 4)), torch.tensor([1])
    ),
    "tied, different": lambda call, m: call(
        m, {"embed.weight": torch.ones(5, 4), "head.weight": torch.zeros(5, 4)}, torch.tensor([1])
    ),
    "untied": lambda call, m: call(m, {"embed.weight": torch.ones(5, 4)}, torch.tensor([1]), tie_weights=False),
    "untied, different": lambda call, m: call(
        m, {"embed.weight": torch.ones(5, 4), "head.weight": torch.ones(5, 4)}, torch.tensor([1]), tie_weights=False
    ),
    "strict": lambda call, m: call(m, {"embed.weight": torch.ones(5, 4)}, torch.tensor([1]), strict=True),
    "strict, missing": lambda call, m: call(m, {}, torch.tensor([1]), strict=True),
    "strict, unexpected": lambda call, m: call(m, {"embed.weight": torch.ones(5, 4), "x": torch.ones(1)}, strict=True),
    "unexpected": lambda call, m: call(m, {"x": torch.ones(1)}, torch.tensor([1])),
    "no such module": lambda call, m: call(m, {"x.y": torch.ones(1)}, torch.tensor([1])),
    "no tensor": lambda call, m: call(m, {"embed.weight": 3}, torch.tensor([1])),
    "several dicts": lambda call, m: call(m, ({"embed.weight": torch.ones(5, 4)}, {}), torch.tensor([1])),
    "a name twice": lambda call, m: call(m, [{"embed.weight": torch.ones(5, 4)}] * 2, torch.tensor([1])),
    "not dicts": lambda call, m: call(m, ({}, 3), torch.tensor([1])),
    "not a dict": lambda call, m: call(m, 3, torch.tensor([1])),
    "wrong shape": lambda call, m: call(m, {"embed.weight": torch.ones(5, 3)}, torch.tensor([1])),
    "wrong arguments": lambda call, m: call(m, {}, (1, 2, 3)),
    "plain tensor": lambda call, m: call(m, {"note": torch.ones(1)}, torch.tensor([1])),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("hooked", [False, True])
def test_calls_as_torch_does(how, hooked):
    module, oracle = seeded(Tied), seeded(Tied)
    for m in (module, oracle):
        m.note = torch.zeros(1)
        m.register_forward_hook(
            (lambda mod, args, out, m=m: out + m.note) if hooked else (lambda mod, args, out: out + mod.note)
        )
    for _ in range(2):
        ours = outcome(lambda: CALLS[how](functional_call, module))
        expected = outcome(lambda: CALLS[how](torch.func.functional_call, oracle))
        if isinstance(expected, list):
            close(ours, expected)
        else:
            assert ours == expected
        close(dict(module.state_dict()), dict(oracle.state_dict()))
        assert list(vars(module)) == list(vars(oracle))
        close(module.note, oracle.note)


class WithAllBuffers(nn.Module):
    """Tied weights, a buffer with two names, one that is not persistent, one that is None, a module with two names."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=1.0)
        self.second, self.again = nn.Linear(3, 3), self.norm
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("sums", torch.zeros(3))
        self.register_buffer("same", self.sums)
        self.register_buffer("nothing", None)

    def forward(self, x):
        x = self.again(self.second(self.first(x)))
        self.hidden = self.hidden + x[0].detach()
        self.sums += x[-1].detach()
        return x + self.hidden + self.same


def test_buffers_are_written_back_to_the_module():
    """By the loop that the migration page has."""
    module, (x,) = seeded(WithAllBuffers), X()
    oracle = copy.deepcopy(module)
    apply, (params, buffers) = functional(module)
    for factor in (1, 2):
        _, buffers = apply((params, buffers), factor * x)
        oracle(factor * x)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    close(dict(module.named_buffers()), dict(oracle.named_buffers()))
    close(dict(module.state_dict()), dict(oracle.state_dict()))
    assert module.same is module.sums
    close(module(x), oracle(x))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*second.weight.*Unexpected key.*hidden"):
        module.load_state_dict(params | buffers)


def test_functional_call_writes_rebound_tensors_into_an_only_dict():
    for make in (Buffers, lambda: with_function_over(Buffers())):
        module = make()
        given = {"rebound": torch.ones(3), "written": torch.ones(3)}
        rebound, written = given.values()
        functional_call(module, given, torch.ones(3))
        assert given["written"] is written
        assert given["rebound"] is not rebound
        close(given, {"rebound": 1 + module.weight.detach(), "written": torch.full((3,), 3.0)})
        pair = ({"rebound": rebound}, {"written": written})
        functional_call(module, pair, torch.ones(3))
        assert pair[0]["rebound"] is rebound
        close(written, torch.full((3,), 5.0))
        close([module.rebound, module.written], [torch.zeros(3), torch.zeros(3)])


def with_function_over(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda mod, args, out: out + module.weight)
    return module


def test_global_hooks_get_the_module_itself():
    module, seen = Plain(), []
    apply, state = functional(module)
    handle = nn.modules.module.register_module_forward_hook(lambda mod, args, out: seen.append(mod))
    try:
        apply(state, torch.ones(3))
        functional_call(module, {}, torch.ones(3))
    finally:
        handle.remove()
    assert seen == [module.fc, module] * 2


def test_shared_module_that_is_called_in_place_keeps_its_tensors():
    module = shared()
    module.register_forward_hook(lambda mod, args, out: out + module[0].bias)
    before = contents(module)
    params, _ = other_tensors(module)
    for _ in range(2):
        functional_call(module, params, torch.ones(3))
        assert_untouched(module, before)


@pytest.mark.parametrize(
    "name", ["batch norm", "buffers", "tied", "transformer", "spectral_norm", "plain attributes", "hooks"]
)
def test_fullgraph(name):
    make, args = BY_NAME[name]
    module, inputs = seeded(make), args()
    apply, _ = functional(module)
    params, buffers = other_tensors(module)

    def call(params, buffers, given, *inputs):
        return apply((params, buffers), *inputs), functional_call(module, given, inputs)

    before = contents(module)
    given, theirs = [{**params, **{name: b.clone() for name, b in buffers.items()}} for _ in range(2)]
    ours, called = torch.compile(call, backend="eager", fullgraph=True)(params, buffers, given, *inputs)
    assert_untouched(module, before)
    expected = torch.func.functional_call(module, theirs, inputs)
    close([tensors(ours[0]), tensors(called)], [tensors(expected)] * 2)
    close([ours[1], given], [{name: theirs[name] for name in buffers}, theirs])


def test_a_batch_that_is_a_list_is_named_in_the_error():
    """As a loader makes it of pairs."""
    apply, state = functional(nn.Linear(3, 2).double())
    batch = [torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 2)]
    hint = r"argument 1 of apply is a list, as it was passed.*write apply\(state, \*batch\), or pass tuple\(batch\)"

    def loss(params: Any, given: dict[str, Any]) -> Tensor:
        return apply((params, {}), given["batch"])[0].mean()

    calls: list[Callable[[], Any]] = [
        lambda: apply(state, batch),
        lambda: fdp.dp_apply(lambda state, given: apply(state, given["batch"]), state, {"batch": batch}, ["cpu"] * 2),
        lambda: fdp.value_and_grad(loss, devices=["cpu"] * 2)(state[0], {"batch": batch}),
        lambda: fdp.dp_apply(apply, state, batch, ["cpu"] * 2),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="must be Tensor, not list") as caught:
            call()
        assert len(re.findall(hint, "\n".join(caught.value.__notes__))) == 1
