"""Params and buffers of `functional`, mistakes in them, and calls as torch's functional_call takes them."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import functional, functional_call
from tests.nn.odd_modules import (
    Buffers,
    Plain,
    Tied,
    X,
    assert_untouched,
    close,
    contents,
    other_tensors,
    seeded,
    shared,
    tensors,
)

pytestmark = pytest.mark.usefixtures("float64")


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


def in_place() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(3))
    module.register_forward_hook(lambda mod, args, out: module.training and None)
    return module


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3), in_place])
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


def test_global_hooks_get_the_clone():
    module, seen = Plain(), []
    apply, state = functional(module)
    handle = nn.modules.module.register_module_forward_hook(lambda mod, args, out: seen.append(mod))
    try:
        apply(state, torch.ones(3))
        functional_call(module, {}, torch.ones(3))
    finally:
        handle.remove()
    assert list(map(type, seen)) == [nn.Linear, Plain] * 2
    assert module not in seen


def test_shared_module_that_is_called_in_place_keeps_its_tensors():
    module = shared()
    module.register_forward_hook(lambda mod, args, out: out + module[0].bias)
    before = contents(module)
    params, _ = other_tensors(module)
    for _ in range(2):
        functional_call(module, params, torch.ones(3))
        assert_untouched(module, before)


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
