"""`functional` and `functional_call` against torch.func.functional_call: values, transforms, checkpoints."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fdp import functional, functional_call
from tests.common.depth import deep, few
from tests.nn.odd_modules import (
    BY_NAME,
    MODULES,
    Recursive,
    X,
    assert_untouched,
    called,
    close,
    contents,
    other_tensors,
    rows,
    seeded,
    shared,
    tensors,
)

pytestmark = pytest.mark.usefixtures("float64")


class TwoKinds(nn.Module):
    """One tensor that is a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("same", self.weight)

    def forward(self, x):
        return x * self.weight + self.same


def gradients(out: Any, params: dict[str, Tensor]) -> list[Tensor]:
    leaves = [leaf for leaf in tensors(out) if leaf.requires_grad]
    if not leaves or not params:
        return []
    total = sum((leaf * torch.arange(leaf.numel()).view_as(leaf)).sum() for leaf in leaves)
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    return [torch.zeros(()) if grad is None else grad for grad in grads]


# Torch leaves a parameter where it is no parameter: in a list, or in a module in a list.
AS_TORCH = {name: rest for name, rest in BY_NAME.items() if name != "unregistered"}
as_torch = pytest.mark.parametrize(("make", "args"), AS_TORCH.values(), ids=AS_TORCH)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_parameter_is_the_given_tensor_wherever_it_is():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.hidden = nn.Linear(3, 3), [nn.Linear(3, 3)]
            self.hidden[0].bias = self.part.bias
            self.weights, self.pair = [self.part.weight], ({"bias": self.part.bias},)
            self.named = Pair(self.part.weight, self.part)
            self.__dict__["alias"] = self.part.weight

        def forward(self, x):
            out = self.hidden[0](self.part(x)) + self.weights[0].sum() + self.pair[0]["bias"]
            return out @ self.alias + self.named.second(x) @ self.named.first

    module, (x,) = Twice(), X()
    params = {name: torch.randn_like(p, requires_grad=True) for name, p in module.named_parameters()}
    one = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in one.named_parameters():
            p.copy_(params[name])
    for out in (functional(module)[0]((params, {}), x)[0], functional_call(module, params, x)):
        expected = one(x)
        close(out, expected)
        close(gradients(out, params), gradients(expected, dict(one.named_parameters())))


@as_torch
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


@few()
@as_torch
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


CALLED = {name: rest for name, *rest in MODULES if name != "deep list"}  # whose search ends `called`, too


@pytest.mark.parametrize(("make", "args", "trusted"), CALLED.values(), ids=CALLED)
def test_a_clone_is_called_where_that_is_the_same(make, args, trusted):
    module = seeded(make)
    ran = called(lambda: functional_call(module, {}, args()))
    assert any(ref() is part for _, ref in ran for part in module.modules()) is not trusted


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


@few()
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@as_torch
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
    with pytest.raises(ValueError, match=r"multiple values for keys \['same', 'weight'\], which are tied"):
        functional(module)[0](({"weight": torch.ones(3)}, {"same": torch.zeros(3)}), x)


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


COMPILED = ["batch norm", "buffers", "tied", "transformer", "spectral_norm", "plain attributes", "hooks"]


@pytest.mark.parametrize("name", deep(COMPILED, ["batch norm", "plain attributes", "transformer", "hooks"]))
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
