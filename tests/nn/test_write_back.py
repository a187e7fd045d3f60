"""`set_grads` and `set_buffers`: a loop with torch.optim is the plain loop, bit by bit on one slot."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers

pytestmark = pytest.mark.usefixtures("float64")
BATCHES = [(numbers(n, 3), numbers(n, 3).cos()) for n in (7, 5, 8, 4)]


class Network(nn.Module):
    """Tied weights, statistics, a frozen parameter, one that is never used, and a buffer that is not in state dicts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.last.weight.requires_grad = False
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean()
        return self.last(torch.tanh(self.norm(self.tied(self.first(x)))))


def optimizer_of(model: nn.Module) -> Any:
    # With a small eps, AdamW would make steps of the rounding in gradients that are 0: of a bias before a norm.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)


def end_step(model: nn.Module, optimizer: Any, scheduler: Any) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    return norm


def state_of(model: nn.Module, optimizer: Any) -> Any:
    return dict(model.state_dict()), dict(model.named_buffers()), optimizer.state_dict()["state"]


def plain_loop(model: nn.Module) -> Any:
    optimizer, scheduler = optimizer_of(model)
    seen = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        (value + 0 * sum(p.sum() for p in model.parameters())).backward()  # zeros where nothing is used, as in fdp
        seen.append((value.detach(), end_step(model, optimizer, scheduler)))
    return seen, state_of(model, optimizer)


def loop(model: nn.Module, devices: Any) -> Any:
    apply, (params, buffers) = fdp.functional(model)

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        out, new = apply((params, buffers), x)
        return F.mse_loss(out, y), new

    step = fdp.value_and_grad(loss, has_aux=True, aux_dims="mean", in_dims=(None, None, 0, 0), devices=devices)
    optimizer, scheduler = optimizer_of(model)
    seen = []
    for x, y in BATCHES:
        (value, new), grads = step(params, buffers, x, y)
        fdp.set_grads(model, grads)
        fdp.set_buffers(model, new)
        seen.append((value, end_step(model, optimizer, scheduler)))
    return seen, state_of(model, optimizer)


def test_a_loop_is_the_plain_loop():
    expected = plain_loop(Network())
    assert expected[1][0]["norm.num_batches_tracked"] == len(BATCHES)
    assert_same_tree(loop(Network(), "cpu"), expected)
    synchronised = fdp.nn.convert_sync_batchnorm(Network())
    assert_close_tree(loop(synchronised, fdp.virtual_devices(3)), expected)


def test_gradients_are_replaced_and_detached():
    model = nn.Linear(2, 1)
    given = {"weight": torch.ones(1, 2).requires_grad_(), "bias": None}
    for _ in range(2):
        model.bias.grad = torch.ones(1)
        fdp.set_grads(model, given)
    assert_same_tree(model.weight.grad, torch.ones(1, 2))
    assert model.weight.grad is not None
    assert not model.weight.grad.requires_grad
    assert model.weight.grad.data_ptr() == given["weight"].data_ptr()  # no copy
    assert model.bias.grad is None


def test_gradients_that_share_memory_are_clipped_once():
    """Of a sum, gradients are one expanded tensor: clipped as they are, each would be scaled twice, or raise."""
    model = nn.ParameterDict({name: torch.ones(3) for name in "abc"})

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["a"] + params["b"] + 2 * params["c"]).sum() * x.mean()

    loss(model, x := torch.ones(4)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = {name: p.grad for name, p in model.items()}
    grads = fdp.grad(loss, devices="cpu")({name: p.detach() for name, p in model.items()}, x)
    fdp.set_grads(model, grads)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert_same_tree({name: p.grad for name, p in model.items()}, expected)
    assert_same_tree(grads["a"], torch.ones(3))


def test_a_gradient_that_is_the_parameter_is_copied():
    """A backward of the user's may return what it has saved; clipping would write to the parameter."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return w.square().sum() / 2

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            return ctx.saved_tensors[0]

    model = nn.ParameterDict({"w": torch.ones(4)})
    params: Any = {name: p.detach() for name, p in model.items()}
    half: Any = Half.apply
    fdp.set_grads(model, fdp.grad(lambda p, x: half(p["w"]) * x.mean(), devices="cpu")(params, torch.ones(2)))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert_same_tree(params["w"], torch.ones(4))


def test_sparse_gradients():
    model = nn.Embedding(4, 2, sparse=True)
    apply, (params, buffers) = fdp.functional(model)
    x = torch.tensor([0, 1, 1])
    fdp.set_grads(model, fdp.grad(lambda p, x: apply((p, buffers), x)[0].mean(), devices="cpu")(params, x))
    grad, model.weight.grad = model.weight.grad, None
    model(x).mean().backward()
    assert grad is not None
    assert model.weight.grad is not None
    assert_same_tree(grad.to_dense(), model.weight.grad.to_dense())


def test_frozen_parameters_may_be_missing():
    model = Network()
    fdp.set_grads(model, {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad})
    assert model.last.weight.grad is None


WIDE = torch.float64
LINEAR = {"weight": torch.ones(1, 2, dtype=WIDE), "bias": torch.ones(1, dtype=WIDE)}


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (
            {"bias": LINEAR["bias"]},
            ValueError,
            "grads lacks ['weight']. The names are those of functional(module); for a",
        ),
        (LINEAR | {"w": None}, ValueError, "grads has unexpected ['w']"),
        (
            LINEAR | {"bias": torch.ones(2, dtype=WIDE)},
            ValueError,
            "grads['bias'] is float64[2] on cpu, the module has float64[1]",
        ),
        (LINEAR | {"bias": torch.ones(1).float()}, ValueError, "grads['bias'] is float32[1] on cpu, the module has"),
        (
            LINEAR | {"bias": torch.ones(1, dtype=WIDE, device="meta")},
            ValueError,
            "grads['bias'] is float64[1] on meta",
        ),
        (LINEAR | {"bias": 1.0}, TypeError, "expected tensors: grads['bias'] is float"),
        (fdp.replicate(LINEAR, ["cpu"] * 2), TypeError, "grads are on every slot. Pass fdp.unreplicate(grads)"),
        ((LINEAR, {}), TypeError, "expected grads as a dict by name, as functional(module) returns, got tuple"),
    ],
)
def test_other_than_the_gradients_of_the_module(grads: Any, error: Any, message: str):
    model = nn.Linear(2, 1)
    with pytest.raises(error, match=f"^set_grads: {re.escape(message)}"):
        fdp.set_grads(model, grads)
    assert model.weight.grad is None  # nothing is written before all is known to be right


def test_gradients_for_what_takes_none():
    with pytest.raises(TypeError, match=r"set_grads: expected a torch\.nn\.Module first, got dict"):
        fdp.set_grads({}, nn.Linear(2, 1))  # pyright: ignore[reportArgumentType]
    frozen = nn.Linear(2, 1).requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match=r"no parameter requires a gradient. Call Linear\.requires_grad_\(\)"):
        fdp.set_grads(frozen, {name: torch.zeros_like(p) for name, p in frozen.named_parameters()})
    model = nn.ParameterDict({"w": torch.ones(3)})

    def step(w: Tensor) -> Tensor:
        fdp.set_grads(model, {"w": w * 2})
        return w.sum()

    with pytest.raises(TypeError, match="set_grads: grads are those of a transform that is under way"):
        torch.func.grad(step)(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seen": None}, TypeError, "expected tensors: buffers['seen'] is NoneType"),
        ({"other": torch.ones(1)}, ValueError, "buffers has unexpected ['other']"),
        ({"norm.running_mean": torch.zeros(4)}, ValueError, "buffers['norm.running_mean'] is float32[4] on cpu, the"),
        ({"norm.num_batches_tracked": torch.ones(())}, ValueError, "buffers['norm.num_batches_tracked'] is float32[]"),
        (
            None,
            ValueError,
            "buffers lacks ['seen', 'norm.running_mean', 'norm.running_var', 'norm.num_batches_tracked']",
        ),
    ],
)
def test_other_than_the_buffers_of_the_module(change: Any, error: Any, message: str):
    model = Network()
    buffers = {} if change is None else {n: b + 1 for n, b in model.named_buffers()} | change
    with pytest.raises(error, match=f"^set_buffers: {re.escape(message)}"):
        fdp.set_buffers(model, buffers)
    assert model.norm.num_batches_tracked == 0


def test_buffers_that_nobody_can_write_to():
    model = nn.Module()
    model.register_buffer("positions", torch.arange(3.0)[:, None].expand(3, 2))
    fdp.set_buffers(model, {"positions": torch.arange(3.0)[:, None].repeat(1, 2)})  # as it is
    with pytest.raises(ValueError, match=r"set_buffers: \['positions'\] are expanded: register tensor.clone\(\)"):
        fdp.set_buffers(model, {"positions": torch.ones(3, 2)})


def test_buffers_that_take_each_others_place():
    model = nn.Module()
    for name in "abc":
        model.register_buffer(name, torch.full((2,), float(ord(name))))
    old = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = dict(model.named_buffers())
    fdp.set_buffers(model, {"a": buffers["b"], "b": buffers["c"], "c": buffers["a"]})
    assert_same_tree(dict(model.named_buffers()), {"a": old["b"], "b": old["c"], "c": old["a"]})


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "another dtype": lambda module: module.float(),
    "assigned": lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
    "data": lambda module: setattr(next(module.parameters()), "data", numbers(2, 3)),
    "another parameter": lambda module: setattr(module, "weight", nn.Parameter(numbers(2, 3))),
}


@pytest.mark.parametrize("name", MOVES)
def test_gradients_of_parameters_that_are_no_more_those_of_the_module(name: str):
    """The tree that was differentiated stays as it is whatever the optimizer does: the loss would not go down."""
    module = nn.Linear(3, 2).double()
    apply, (params, _) = fdp.functional(module)
    MOVES[name](module)
    grads = fdp.grad(lambda params, x: apply((params, {}), x)[0].square().mean())(params, numbers(4, 3))
    grads = {key: grad.to(module.weight.dtype) for key, grad in grads.items()}
    with pytest.raises(ValueError, match=r"set_grads: .*'weight'.* other memory .* call functional\(module\) again"):
        fdp.set_grads(module, grads)
    assert all(p.grad is None for p in module.parameters())
    apply, (params, _) = fdp.functional(module)
    x = numbers(4, 3).to(module.weight.dtype)
    fdp.set_grads(module, fdp.grad(lambda params, x: apply((params, {}), x)[0].square().mean())(params, x))
    assert all(p.grad is not None for p in module.parameters())


def test_gradients_of_a_module_that_was_written_in_place():
    module = nn.Linear(3, 2).double()
    apply, (params, _) = fdp.functional(module)
    module.load_state_dict(nn.Linear(3, 2).double().state_dict())
    nn.init.ones_(module.weight)
    fdp.set_grads(module, fdp.grad(lambda params, x: apply((params, {}), x)[0].mean())(params, numbers(4, 3)))
