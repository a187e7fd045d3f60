"""What test/test_nn.py and others of PyTorch assert of DataParallel, on virtual devices."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, fx, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm, spectral_norm

import fdp
from fdp import DataParallel
from fdp.nn import replicate
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.nn.modules_of_data_parallel import grads_of

TWO = ("cpu", "cpu")


pytestmark = pytest.mark.usefixtures("float64_side_by_side")


def test_broadcast_double_backwards():
    shapes = ((3,), (2, 2), ())

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        holder = nn.Module()
        for i, tensor in enumerate(tensors):
            holder.register_buffer(f"t{i}", tensor)
        return tuple(buffer**2 for each in replicate(holder, ["cpu"] * 3) for buffer in each.buffers())

    tensors = [numbers(*shape).requires_grad_() for shape in shapes]
    assert gradcheck(run, tensors, check_batched_grad=True)
    assert gradgradcheck(run, tensors, check_batched_grad=True)


def test_broadcast_not_requiring_grad():
    bag = nn.Module()
    for i, needs in enumerate((False, True, False, True)):
        bag.register_parameter(f"p{i}", nn.Parameter(numbers(2), requires_grad=needs))
        bag.register_buffer(f"b{i}", numbers(2).requires_grad_(needs))
    for replica in replicate(bag, TWO):
        for kind in "pb":
            assert [getattr(replica, f"{kind}{i}").requires_grad for i in range(4)] == [False, True, False, True]


def test_broadcast_no_grad():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        _, second = replicate(layer, TWO)
    assert not any(param.requires_grad for param in second.parameters())
    assert all(param.requires_grad for param in layer.parameters())


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (2, 0, 4, 5)], ids=str)
def test_data_parallel_with_empty_parameter_shapes(shape: tuple[int, ...]):
    """Torch makes them flat."""
    shapes = []

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hollow = nn.Parameter(torch.empty(shape))
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            shapes.append(self.hollow.shape)
            return self.layer(x) + self.hollow.sum()

    module = Hollow()
    DataParallel(module, ["cpu"] * 3)(numbers(5, 3)).sum().backward()
    assert shapes == [shape] * 3
    assert module.hollow.grad.shape == shape


class Normal:
    """Spectral norm of both kinds, which name their parts differently."""

    def __init__(self, kind: str) -> None:
        self._is_new = kind == "parametrization"
        self.original = "parametrizations.weight.original" if self._is_new else "weight_orig"

    def on(self, layer: nn.Module) -> nn.Module:
        return parametrizations.spectral_norm(layer) if self._is_new else spectral_norm(layer)

    def off(self, layer: nn.Module) -> None:
        if self._is_new:
            parametrize.remove_parametrizations(layer, "weight")
        else:
            remove_spectral_norm(layer)

    def vectors(self, layer: nn.Module) -> list[Tensor]:
        inner: Any = layer.parametrizations.weight[0] if self._is_new else layer
        return [inner._u, inner._v] if self._is_new else [inner.weight_u, inner.weight_v]


@pytest.mark.parametrize("devices", [["cpu"], TWO, ["cpu"] * 3], ids=["1", "2", "3"])
@pytest.mark.parametrize("kind", ["hook", "parametrization"])
def test_spectral_norm(kind: str, devices: Any):
    normal = Normal(kind)
    layer, alone = normal.on(nn.Linear(3, 4)), normal.on(nn.Linear(3, 4))  # a copy would have the same class
    alone.load_state_dict(layer.state_dict())
    x = numbers(6, 3)
    model = DataParallel(layer, devices)
    vectors = normal.vectors(layer)
    before = [vector.clone() for vector in vectors]

    # In training each call is a step of the power iteration, and two of them have one graph.
    got, want = model(x) + 2 * model(x), alone(x) + 2 * alone(x)
    assert_close_tree(got, want)
    assert not any(torch.equal(now, then) for now, then in zip(vectors, before, strict=True))
    assert all(a is b for a, b in zip(normal.vectors(layer), vectors, strict=True))
    assert_close_tree(vectors, normal.vectors(alone))
    (got**2).sum().backward()
    (want**2).sum().backward()
    assert layer.get_parameter(normal.original).grad is not None
    assert_close_tree(grads_of(layer), grads_of(alone))

    # In evaluation nothing changes.
    model.eval()
    alone.eval()
    before = [vector.clone() for vector in vectors]
    assert_close_tree(model(x), alone(x))
    assert_same_tree(model(x), model(x))
    assert_same_tree(vectors, before)

    # Back in training, then without.
    model.train()
    alone.train()
    assert_close_tree(model(x), alone(x))
    model.eval()
    alone.eval()
    for each in (layer, alone):
        normal.off(each)
    assert "weight" in dict(layer.named_parameters())
    assert_close_tree(model(x), alone(x))


@pytest.mark.parametrize("kind", ["hook", "parametrization"])
def test_spectral_norm_gradients(kind: str):
    """The iteration has no part in the gradient, which in evaluation is that of a fixed function."""
    normal = Normal(kind)
    layer = normal.on(nn.Linear(3, 2))
    model, x = DataParallel(layer, TWO).eval(), numbers(4, 3)
    original = layer.get_parameter(normal.original)
    assert gradcheck(lambda _: model(x), original)
    assert gradgradcheck(lambda _: model(x), original)


@pytest.mark.parametrize("call", [torch.func.functional_call, fdp.functional_call], ids=["torch", "fdp"])
def test_functional_call_with_data_parallel(call: Callable[..., Any]):
    """Torch refuses its own DataParallel."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = nn.Linear(1, 1)
            self.register_buffer("buffer", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.l1(x) + self.buffer

    module, x = Shifted(), numbers(5, 1)
    before = copy.deepcopy(module.state_dict())
    weight, bias = torch.ones(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    given = {"module.l1.weight": weight, "module.l1.bias": bias, "module.buffer": torch.zeros(1)}
    model = DataParallel(module, ["cpu"] * 3)
    got = call(model, given, x)
    assert_same_tree(got, x)
    (got**2).sum().backward()
    assert_close_tree(weight.grad, 2 * (x**2).sum().reshape(1, 1))
    assert_close_tree(bias.grad, 2 * x.sum().reshape(1))
    assert grads_of(module) == [None, None]
    assert_same_tree(module.state_dict(), before)

    params = {name: value.detach() for name, value in given.items()}
    per_row = torch.func.vmap(torch.func.grad(lambda params, x: call(model, params, (x[None],)).sum()), (None, 0))
    assert_close_tree(per_row(params, x)["module.l1.weight"].reshape(5, 1), x)


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["1", "2"])
def test_graph_module_replicate_for_dp(devices: Any):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.scale = nn.Parameter(numbers(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.scale).relu()

    graph, x = fx.symbolic_trace(Net()), numbers(4, 3)
    want = graph(x)
    for replica in replicate(graph, devices):
        assert isinstance(replica, fx.GraphModule)
        assert_same_tree(replica(x), want)
    grads = torch.autograd.grad((want**2).sum(), list(graph.parameters()))
    got = DataParallel(graph, devices)(x)
    assert_close_tree(got, want)
    (got**2).sum().backward()
    assert_close_tree(grads_of(graph), list(grads))


quiet = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")


@quiet
@pytest.mark.filterwarnings("ignore:.*reduce_range:UserWarning")
def test_qat_data_parallel():
    torch.set_default_dtype(torch.float32)
    module = nn.Sequential(
        *(quantization.QuantStub(), nn.Conv2d(3, 1, 1, bias=False), nn.BatchNorm2d(1), nn.ReLU()),
        *(nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2), nn.AvgPool2d(4)),
        *(nn.Sigmoid(), quantization.DeQuantStub()),
    )
    quantization.fuse_modules_qat(module, [["1", "2", "3"], ["4", "5"]], inplace=True)
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(module, inplace=True)
    alone = copy.deepcopy(module)
    model = DataParallel(module, TWO)
    for epoch in range(3):
        x = numbers(4, 3, 8, 8, dtype=torch.float32) * (epoch + 1)
        if epoch == 1:
            model.apply(quantization.disable_observer)
            alone.apply(quantization.disable_observer)
        got, want = model(x), torch.cat([alone(x[:2]), copy.deepcopy(alone)(x[2:])])
        got.sum().backward()
        assert got.shape == want.shape
        assert_close_tree(got[:2], want[:2], rtol=1e-5)
        assert_close_tree(dict(module.named_buffers()), dict(alone.named_buffers()), rtol=1e-5)
    assert all(param.grad is not None for param in module.parameters())
    model.eval()
    assert model(numbers(4, 3, 8, 8, dtype=torch.float32)).shape == (4, 2, 1, 1)


OBSERVERS: dict[str, Callable[[], nn.Module]] = {
    "min-max": lambda: quantization.MinMaxObserver.with_args(dtype=torch.qint8)(),
    "moving": lambda: quantization.MovingAverageMinMaxObserver.with_args(dtype=torch.qint8)(),
    "per-channel": lambda: quantization.PerChannelMinMaxObserver.with_args(dtype=torch.qint8)(),
    "moving-per-channel": lambda: quantization.MovingAveragePerChannelMinMaxObserver.with_args(dtype=torch.qint8)(),
    "fake-quant": lambda: quantization.FakeQuantize(),
}


@quiet
@pytest.mark.parametrize("name", OBSERVERS)
def test_observers_preserve_buffers(name: str):
    """Buffers are written in place, also where forward gives them another size."""
    torch.set_default_dtype(torch.float32)
    observer = OBSERVERS[name]()
    alone, model = copy.deepcopy(observer), DataParallel(observer, TWO)
    before = {name: id(buffer) for name, buffer in observer.named_buffers()}
    for i in range(3):
        x = numbers(4, 4, 4, dtype=torch.float32) * (i + 1)
        model(x)
        alone(x[:2])
        assert_same_tree(dict(observer.named_buffers()), dict(alone.named_buffers()))
        assert {name: id(buffer) for name, buffer in observer.named_buffers()} == before


@quiet
def test_fake_quant_preserves_buffers():
    torch.set_default_dtype(torch.float32)
    module = quantization.FakeQuantize()
    model, before = DataParallel(module, TWO), {name: id(buffer) for name, buffer in module.named_buffers()}
    for change in (
        *(quantization.enable_fake_quant, quantization.disable_fake_quant),
        *(quantization.enable_observer, quantization.disable_observer),
    ):
        model.apply(change)
        model(numbers(4, 4, 4, dtype=torch.float32))
        assert {name: id(buffer) for name, buffer in module.named_buffers()} == before
