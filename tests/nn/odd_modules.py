"""Every odd kind of module that people have, and what it means that one is untouched."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
import functools
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

from fdp import functional_call


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
    ("partial", lambda: with_function_holding(lambda fc: functools.partial(twice, fc)), X, True),
    ("object", lambda: with_function_holding(lambda fc: Caller(functools.partial(twice, fc))), X, False),
    ("keyed by module", lambda: with_function_holding(names_of_modules), X, False),
    ("weak reference", Weak, X, False),
    ("weak proxy", lambda: Weak(weakref.proxy), X, False),
    ("names itself", NamesItself, X, False),
    ("slots", Slotted, X, False),
    ("deep list", Deep, X, False),
    ("backward hook", with_backward_hook, X, True),
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


def called(call: Callable[[], object]) -> list[tuple[type, weakref.ref[nn.Module]]]:
    """The modules that run in a call, once each: those of the caller, or others in their place, which nothing holds."""
    found: list[tuple[type, weakref.ref[nn.Module]]] = []

    def look(frame: types.FrameType, event: str, _: object) -> None:
        is_module = event == "call" and frame.f_code.co_name in ("forward", "__call__")
        module = frame.f_locals.get("self") if is_module else None
        if isinstance(module, nn.Module) and all(ref() is not module for _, ref in found):
            found.append((type(module), weakref.ref(module)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


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


used: Any = None

part: Any = None


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
        found += [
            self.pair[0][0],
            [key for key in sorted(vars(self)) if "clone" not in key],
            self.drop.p,
            len(self._forward_hooks),
            list(self._buffers),
        ]
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
        self.register_buffer("more", x)
        self.extra = nn.Tanh()
        self._buffers.pop("gone", None)
        self.count = self.count + 1
        return self.fc(x), found
