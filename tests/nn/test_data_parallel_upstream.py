"""What PyTorch's own tests assert of nn.DataParallel and nn.parallel, on virtual devices; most names are theirs."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import collections
import contextlib
import copy
import functools
import gc
import io
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.ao.quantization as quantization
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm, spectral_norm

import fdp
from fdp import DataParallel, data_parallel
from fdp.nn import gather, parallel_apply, replicate, scatter, scatter_kwargs
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.settings import default_dtype
from tests.common.threads import many_cores

TWO = ("cpu", "cpu")
SCALARS = "Was asked to gather along dimension 0, but all input tensors were scalars"

each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
some_devices = pytest.mark.parametrize("devices", [TWO, list(TWO), ["cpu"], ["cpu"] * 5], ids=["2", "list", "1", "5"])


@pytest.fixture(autouse=True)
def float64_side_by_side() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64), many_cores():
        yield


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters()]


def close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Sparse tensors by their values, whatever the order of the entries."""
    dense = [[tensor.to_dense() if tensor.is_sparse else tensor for tensor in tree] for tree in (got, want)]
    assert_close_tree(*dense, rtol=tolerance)


# ---------------------------------------------------------------- test/distributed/test_data_parallel.py


@pytest.mark.parametrize("devices", [TWO, ["cpu"] * 3], ids=["2", "3"])
def test_data_parallel_buffers_requiring_grad(devices: Any):
    class Buffers(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.register_buffer("learned", tensor)
            self.register_buffer("fixed", tensor.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.learned**2 + self.fixed

    module, x = Buffers(numbers(10).requires_grad_()), numbers(4, 10)
    model = DataParallel(module, devices)
    assert_close_tree(model(x), module(x))
    assert gradcheck(lambda _: model(x), module.learned)
    assert gradgradcheck(lambda _: model(x), module.learned)
    (model(x) * x).sum().backward()
    assert_close_tree(module.learned.grad, (2 * module.learned * x**2).sum(0).detach())
    assert module.fixed.grad is None


def test_data_parallel_rnn():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Any:
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    def step(model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=10)
        output = model(numbers(4, 6, 3))
        F.mse_loss(output, torch.zeros_like(output)).backward()
        optimizer.step()
        return output.detach()

    module = Recurrent()
    model = DataParallel(copy.deepcopy(module), TWO)
    with torch.no_grad():
        assert_close_tree(model(numbers(2, 4, 3)), module(numbers(2, 4, 3)))
    for _ in range(2):
        assert_close_tree(step(model), step(module))
        assert_close_tree(list(model.parameters()), list(module.parameters()))


def test_data_parallel_lazy_linear():
    message = r"Modules with uninitialized parameters can't be used with `DataParallel`\. Run a dummy forward pass"
    model = DataParallel(nn.Sequential(nn.LazyLinear(4)), TWO)
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 3))
    model.module(torch.ones(2, 3))
    assert model(torch.ones(2, 3)).shape == (2, 4)


def two_layers() -> tuple[list[nn.Linear], list[Tensor]]:
    return [nn.Linear(10, 5), nn.Linear(10, 5)], [numbers(2, 10), numbers(2, 10).cos()]


def test_parallel_apply():
    layers, xs = two_layers()
    want = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    for inputs in ([(x,) for x in xs], xs, [[x] for x in xs]):
        for devices in (None, TWO):
            assert_same_tree(parallel_apply(layers, inputs, None, devices), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parallel_apply_autocast(dtype: torch.dtype):
    """Torch's threads fall back to float16."""
    layers, xs = two_layers()
    layers, xs = [layer.float() for layer in layers], [x.float() for x in xs]
    with torch.autocast("cpu", dtype=dtype):
        want = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        for inputs in ([(x,) for x in xs], xs):
            got = parallel_apply(layers, inputs)
            assert [output.dtype for output in got] == [dtype] * 2
            assert_same_tree(got, want)
        model = DataParallel(layers[0], TWO)
        assert model(xs[0]).dtype is dtype
        assert_close_tree(model(xs[0]), want[0], rtol=1e-2)


def test_parallel_apply_passes_exception():
    """What torch puts into the text of another exception are notes of the same one, above the original traceback."""

    class Failing(nn.Module):
        def forward(self, *args: Any) -> Any:
            return {}["wonderful"]

    module = Failing()
    with pytest.raises(KeyError, match=r"wonderful[\s\S]*Caught KeyError in replica \d on device cpu\.") as caught:
        parallel_apply((module, module), (None, None))
    assert caught.value.args == ("wonderful",)
    assert caught.traceback[-1].name == "forward"
    with pytest.raises(KeyError, match=r"wonderful[\s\S]*Caught KeyError in replica \d on device cpu\.") as caught:
        DataParallel(module, TWO)(numbers(2))
    assert caught.traceback[-1].name == "forward"


@some_devices
def test_data_parallel_multiple_input(devices: Any):
    class Several(nn.Module):
        def forward(self, a: Tensor, b: Tensor, number: float, c: Tensor | None = None) -> Tensor:
            return number * (a * b) if c is None else number * (a * b + c)

    module, a, b, c = Several(), numbers(5, 5).requires_grad_(), numbers(5, 5).cos().requires_grad_(), numbers(5, 5)
    model = DataParallel(Several(), devices)
    for kwargs in ({}, {"c": c}):
        want = module(a, b, 2.5, **kwargs)
        grads = torch.autograd.grad(want.sum(), (a, b))
        for got in (model(a, b, 2.5, **kwargs), data_parallel(module, (a, b, 2.5), devices, module_kwargs=kwargs)):
            assert_close_tree(got, want)
            assert_close_tree(torch.autograd.grad(got.sum(), (a, b)), grads)


def test_data_parallel_small_back():
    layer, x = nn.Linear(10, 5), numbers(20, 10)
    assert_close_tree(data_parallel(layer, x, TWO), layer(x))


@pytest.mark.parametrize(
    "run",
    [DataParallel, lambda module, devices: functools.partial(data_parallel, module, device_ids=devices)],
    ids=["class", "function"],
)
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(2, 2), lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda: nn.BatchNorm1d(2)],
    ids=["layer", "part", "buffers"],
)
def test_data_parallel_model_device(run: Any, make: Callable[[], nn.Module]):
    message = r"module must have its parameters and buffers on device {} \(device_ids\[0\]\) but found .* device: {}"
    module, x = make().eval(), numbers(4, 2)
    call = run(module, TWO)
    assert_close_tree(call(x), module(x))
    part = module[1] if isinstance(module, nn.Sequential) else module
    part.to("meta")
    with pytest.raises(RuntimeError, match=message.format("cpu", "meta")):
        call(x)
    with pytest.raises(RuntimeError, match=message.format("meta", "cpu")):
        run(make(), ["meta", "cpu"])(x)
    part.to_empty(device="cpu")
    assert call(x).shape == (4, 2)


@pytest.mark.parametrize("executor", ["threads", "sequential"])
@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["1", "2"])
def test_data_parallel_model_no_refcycles(devices: Any, executor: Any):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    x = numbers(4, 1)
    DataParallel(Model(), devices, executor=executor)(x)
    gc.collect()
    gc.disable()
    try:
        model = DataParallel(Model(), devices, executor=executor)
        model(x)
        assert gc.collect() == 0
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        assert gc.collect() == 0
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(numbers(4, 2))
        assert gc.collect() == 0
        del model
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_data_parallel_no_grad():
    class Checking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise AssertionError("gradients are enabled")
            return x

    for call in (DataParallel(Checking(), TWO), lambda x: data_parallel(Checking(), x, TWO)):
        with torch.no_grad():
            assert_same_tree(call(numbers(20, 10)), numbers(20, 10))
        with pytest.raises(AssertionError, match="gradients are enabled"):
            call(numbers(20, 10))


@some_devices
def test_data_parallel(devices: Any):
    layer, x = nn.Linear(10, 5), numbers(20, 10)
    want = layer(x)
    want.sum().backward()
    grads = grads_of(layer)
    layer.zero_grad()
    got = data_parallel(layer, x, devices)
    got.sum().backward()
    assert_close_tree(got, want)
    assert_close_tree(grads_of(layer), grads)
    assert_close_tree(data_parallel(layer, x), want)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@some_devices
def test_data_parallel_sparse(devices: Any, kind: type[nn.Module]):
    layer, tokens = kind(10, 5, sparse=True), numbers(20, 5, dtype=torch.int64) % 10
    want = layer(tokens)
    (want * want.cos()).sum().backward()
    grads = grads_of(layer)
    assert grads[0].is_sparse
    for call in (DataParallel(layer, devices), lambda x: data_parallel(layer, x, devices)):
        layer.zero_grad()
        got = call(tokens)
        (got * got.cos()).sum().backward()
        assert_close_tree(got, want)
        assert layer.weight.grad.is_sparse
        close(grads_of(layer), grads)


@some_devices
def test_data_parallel_nested_output(devices: Any):
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x, (x.sin(), x.cos(), [x + 1]), x, OrderedDict(a=x, b=[x.sin()])]

    x = numbers(6, 2)
    assert_same_tree(data_parallel(Nested(), x, devices), Nested()(x))


@some_devices
def test_data_parallel_nested_input(devices: Any):
    class Nested(nn.Module):
        def forward(self, *inputs: Any) -> Tensor:
            assert len(inputs) == 3
            assert type(inputs[1]) is tuple
            return inputs[1][0]

    x = numbers(20, 3)
    assert_same_tree(data_parallel(Nested(), (x.cos(), (x.sin(), x), x.sin()), devices), x.sin())


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["1", "2"])
def test_data_parallel_module_zero_inputs(devices: Any):
    calls = []

    class Nothing(nn.Module):
        def forward(self) -> Tensor:
            calls.append(0)
            return torch.ones(3)

    for call in (
        lambda: DataParallel(Nothing(), devices)(),
        lambda: data_parallel(Nothing(), None, devices),
        lambda: data_parallel(Nothing(), (), devices),
    ):
        assert_same_tree(call(), torch.ones(3))
        assert len(calls) == 1
        calls.clear()


def test_data_parallel_device_args():
    layer, x = nn.Linear(10, 5), numbers(20, 10).requires_grad_()
    cpu = torch.device("cpu")
    for devices in (TWO, (cpu, cpu), [cpu, "cpu:0"]):
        for output in (None, cpu, "cpu"):
            assert_close_tree(data_parallel(layer, x, devices, output), layer(x))
            assert_close_tree(DataParallel(layer, devices, output)(x), layer(x))


@some_devices
def test_data_parallel_function_deletion(devices: Any):
    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        output = net(x)
        (slope,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
        return slope.mean()

    net, x = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
    penalty(DataParallel(net, devices), x).backward()
    assert_close_tree(net.weight.grad, torch.full((1, 4), 0.25))
    assert net.bias.grad is None or not net.bias.grad.any()

    curved, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), numbers(5, 4).requires_grad_()
    want = torch.autograd.grad(penalty(curved, x), [x, *curved[:2].parameters()])
    got = torch.autograd.grad(penalty(DataParallel(curved, devices), x), [x, *curved[:2].parameters()])
    assert_close_tree(got, want)


@pytest.mark.parametrize("leaf", [True, False])
def test_scatter(leaf: bool):
    x = numbers(4, 4).requires_grad_()
    first, second = scatter(x if leaf else x * 1, TWO)
    assert_same_tree([first, second], [x[:2], x[2:]])
    first.backward(torch.full((2, 4), 2.0))
    assert_same_tree(x.grad, torch.tensor([2.0, 2, 0, 0])[:, None].expand(4, 4))
    assert gradcheck(lambda x: scatter(x, TWO), x)
    assert gradgradcheck(lambda x: scatter(x, TWO), x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@some_devices
def test_data_parallel_complex(devices: Any, dtype: torch.dtype):
    """Torch once showed replicas a real view with a trailing dimension of 2."""
    shapes = []

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(3, dtype=dtype))
            self.register_buffer("shift", numbers(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            shapes.append((self.weight.shape, self.weight.dtype, self.shift.dtype))
            return x * self.weight + self.shift

    module, x = Complex(), numbers(6, 3, dtype=dtype)
    want = module(x)
    (grad,) = torch.autograd.grad((want * want.conj()).real.sum(), module.weight)
    got = DataParallel(module, devices)(x)
    assert_same_tree(got, want)
    (got * got.conj()).real.sum().backward()
    assert_close_tree(module.weight.grad, grad, rtol=1e-5)
    assert set(shapes) == {((3,), dtype, dtype)}


@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("target", ["cpu", -1], ids=str)
def test_gather(target: Any):
    warns = pytest.warns(FutureWarning, match="Using -1 to represent CPU") if target == -1 else contextlib.nullcontext()
    parts = (numbers(2, 4).requires_grad_(), numbers(2, 4).cos().requires_grad_())
    scalars = (torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True))
    with warns:
        joined, vector = gather(parts, target), gather(scalars, target)
        for inputs in (parts, scalars):
            assert gradcheck(lambda *inputs: gather(inputs, target), inputs)
            assert gradgradcheck(lambda *inputs: gather(inputs, target), inputs)
    assert_same_tree(joined, torch.cat(parts))
    joined.backward(numbers(4, 4))
    assert_same_tree([part.grad for part in parts], list(numbers(4, 4).chunk(2)))
    assert_same_tree(vector, torch.tensor([2.0, 3.0]))
    vector.backward(torch.tensor([5.0, 7.0]))
    assert_same_tree([scalar.grad for scalar in scalars], [torch.tensor(5.0), torch.tensor(7.0)])


def test_gather_different_len_dicts():
    with pytest.raises(ValueError, match=r"a dict with keys \['a'\] in shard 0, a dict with keys \['a', 'b'\]"):
        gather(({"a": numbers(1, 2)}, {"b": numbers(1, 2), "a": numbers(1, 2)}), "cpu")


@pytest.mark.parametrize("devices", [TWO, list(TWO)], ids=["tuple", "list"])
def test_replicate(devices: Any):
    module, x = nn.Linear(10, 5), numbers(2, 10)
    for replica in replicate(module, devices):
        assert [param.device.type for param in replica.parameters()] == ["cpu", "cpu"]
        assert_same_tree(replica(x), module(x))


@pytest.mark.parametrize("devices", [TWO, list(TWO)], ids=["tuple", "list"])
def test_replicate_buffers(devices: Any):
    net = nn.Module()
    net.bn = nn.BatchNorm2d(10)
    net.bn(numbers(2, 10, 3, 3))
    for replica in replicate(net, devices):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_same_tree(getattr(replica.bn, name), getattr(net.bn, name))


def test_zero_grad():
    class ZeroGrad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.warns(
                UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"
            ):
                self.zero_grad()
            return x

    assert_same_tree(DataParallel(ZeroGrad(), TWO, executor="sequential")(numbers(4, 3, 6, 5)), numbers(4, 3, 6, 5))


@some_devices
def test_autocast(devices: Any):
    class Casting(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = DataParallel(Casting(8, 8).float(), devices)
    assert model(numbers(8, 8, dtype=torch.float32)).dtype is torch.bfloat16


@pytest.mark.parametrize("detach", [False, True])
def test_save_replica_module(detach: bool):
    module, file = nn.Linear(8, 8), io.BytesIO()
    torch.save(replicate(module, TWO, detach), file)
    file.seek(0)
    for replica in torch.load(file, weights_only=False):
        assert_same_tree(replica.state_dict(), module.state_dict())


FORMATS = {
    "contiguous": [torch.contiguous_format] * 4,
    "both": [torch.channels_last] * 2 + [torch.contiguous_format] * 2,
    "channels_last": [torch.channels_last] * 4,
}
MIXES = {
    "float": [torch.float32] * 4,
    "mixed": [torch.float32] * 2 + [torch.bfloat16] * 2,
    "bfloat16": [torch.bfloat16] * 4,
}


@pytest.mark.parametrize("dtypes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_strided_grad_layout(formats: list[torch.memory_format], dtypes: list[torch.dtype]):
    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (4, 6, 8, 6, 4)
            self.convs = nn.ModuleList(
                nn.Conv2d(*width, 2).to(memory_format=layout, dtype=dtype)
                for width, layout, dtype in zip(itertools.pairwise(widths), formats, dtypes, strict=True)
            )

        def forward(self, x: Tensor) -> Tensor:
            for conv, dtype in zip(self.convs, dtypes, strict=True):
                x = conv(x.to(dtype))
            return x

    module = ConvNet()
    model = DataParallel(copy.deepcopy(module), TWO)
    tolerance = 3e-2 if torch.bfloat16 in dtypes else 1e-5
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, model)]
    x, target = numbers(6, 4, 8, 8, dtype=torch.float32), numbers(6, 4, 4, 4, dtype=torch.float32)
    for set_to_none in (False, True):  # the second gradients go where zeros are, the third where there are none
        for each in (module, model):
            F.mse_loss(each(x).float(), target).backward()
        for conv, layout in zip(model.module.convs, formats, strict=True):
            assert conv.weight.grad.is_contiguous(memory_format=layout)
        assert_close_tree(grads_of(model), grads_of(module), rtol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("devices", [["cpu"], TWO, ["cpu"] * 4], ids=["1", "2", "4"])
def test_parameter_list_dict_replica(devices: Any):
    """In torch parameters() of a replica is empty, and those of the first have a `grad_fn` too."""
    leaves: list[bool] = []

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([numbers(3), numbers(3).cos()])
            self.dict = nn.ParameterDict({"a": numbers(3).exp(), "b": nn.Parameter(numbers(3), requires_grad=False)})

        def forward(self, x: Tensor) -> Tensor:
            own = [*self.list, *self.dict.values()]
            assert_same_tree(own, [numbers(3), numbers(3).cos(), numbers(3).exp(), numbers(3)])
            assert list(self.dict) == ["a", "b"]
            assert [tensor.requires_grad for tensor in own] == [True, True, True, False]
            assert len(list(self.parameters())) == 4
            leaves.append(self.list[0].is_leaf)
            return x * self.list[0] + self.list[1] * self.dict["a"] + self.dict["b"]

    module, x = Holding(), numbers(5, 3)
    want = module(x)
    grads = torch.autograd.grad((want**2).sum(), [*module.list, module.dict["a"]])
    leaves.clear()
    got = DataParallel(module, devices, executor="sequential")(x)
    assert leaves == [True] + [False] * (len(leaves) - 1)
    (got**2).sum().backward()
    assert_close_tree(got, want)
    assert_close_tree([param.grad for param in (*module.list, module.dict["a"])], list(grads))


@each_dtype
@some_devices
def test_data_parallel_module(devices: Any, dtype: torch.dtype):
    layer, x = nn.Linear(10, 5).to(dtype), numbers(20, 10, dtype=dtype)
    assert_close_tree(DataParallel(layer, devices)(x), layer(x), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("unused", [None, [], {}, ()], ids=["alone", "list", "dict", "tuple"])
@each_dtype
@some_devices
def test_data_parallel_module_kwargs_only(devices: Any, dtype: torch.dtype, unused: Any):
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *, input: Any) -> Tensor:
            assert input["unused"] == unused
            return self.layer(input["data"])

    layer, x = nn.Linear(10, 5).to(dtype), numbers(20, 10, dtype=dtype)
    got = DataParallel(Keyword(), devices)(input={"data": x, "unused": unused})
    assert_close_tree(got, layer(x), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


# ---------------------------------------------------------------- test/jit/test_data_parallel.py


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2))


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Torch warns of torch.jit wherever it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


with without_warnings():

    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.m = block()

        @torch.jit.script_method
        def forward(self, x):
            return self.m(x)

    class Around(torch.jit.ScriptModule):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @torch.jit.script_method
        def forward(self, x):
            return self.inner(x)


class Holder(nn.Module):
    """A Python module around others."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def shared() -> nn.Module:
    part = Scripted()
    return Holder(Holder(part), part)


SCRIPTS: dict[str, Callable[[], Any]] = {
    "in-python": lambda: Holder(Scripted()),
    "shared": shared,
    "traced": lambda: torch.jit.trace(Holder(block()), torch.ones(2, 2)),
    "in-script": lambda: Around(Scripted()),
    "function": lambda: torch.jit.script(block()),
}


def check_replicas(name: str) -> None:
    with without_warnings():
        module = SCRIPTS[name]()
        x = numbers(4, 2)
        replicas = replicate(module, TWO)
        for replica in replicas:
            assert [tensor.device.type for tensor in replica.state_dict().values()].count("cpu") == len(
                replica.state_dict()
            )
        module.eval()  # a call in training changes the buffers of the first replica
        want = module(x)
        for replica in replicate(module, TWO):
            assert_same_tree(replica(x), want)
        halves = torch.cat([module(half) for half in x.chunk(2)])  # a trace knows of no evaluation
        grads = torch.autograd.grad((halves**2).sum(), list(module.parameters()))
        got = gather(parallel_apply(replicate(module, TWO), x.chunk(2)), "cpu")
        assert_close_tree(torch.autograd.grad((got**2).sum(), list(module.parameters())), grads)


def test_python_submodule_script():
    check_replicas("in-python")
    with without_warnings():
        (replica,) = replicate(Holder(Scripted()), {"cpu"})
        assert replica(numbers(4, 2)).shape == (4, 2)


def test_shared_module():
    check_replicas("shared")
    with without_warnings():
        for replica in replicate(shared(), TWO):
            assert replica.parts[0].parts[0] is replica.parts[1]


def test_traced_module():
    check_replicas("traced")


@pytest.mark.parametrize("name", SCRIPTS)
def test_replicas_of_scripts_have_all_tensors(name: str):
    with without_warnings():
        module = SCRIPTS[name]()
        for replica in replicate(module, TWO):
            assert_same_tree(dict(replica.named_parameters()), dict(module.named_parameters()))
            assert_same_tree(dict(replica.named_buffers()), dict(module.named_buffers()))


def tensors_of_script(module: Any) -> list[Tensor]:
    """What the script itself computes with."""
    script: Any = getattr(module, "_c", module)
    own = [tensor for kind in (torch._C.ParameterDict, torch._C.BufferDict) for _, tensor in kind(script).items()]
    return own + [tensor for _, part in torch._C.ModuleDict(script).items() for tensor in tensors_of_script(part)]


def test_tensor_sharing():
    with without_warnings():
        module = Around(Scripted())
        first, second = replicate(module, TWO)
        own, same, other = map(tensors_of_script, (module, first, second))
    assert len(own) == len(list(module.state_dict())) == 9
    assert [tensor.data_ptr() for tensor in same] == [tensor.data_ptr() for tensor in own]
    assert {tensor.data_ptr() for tensor in other}.isdisjoint(tensor.data_ptr() for tensor in own)
    assert_same_tree(other, own)


def test_tensor_sharing_with_forward():
    with without_warnings():
        module, x = Around(Scripted()), numbers(4, 2)
        first, second = replicate(module, TWO)
        before = module(x)
        before.sum().backward()
        with torch.no_grad():
            for param in module.parameters():
                param.data -= param.grad
        after = module(x)
        assert not torch.allclose(before, after)
        assert_close_tree(first(x), after)
        assert_close_tree(second(x), before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_data_parallel_of_scripts(name: str):
    """Values, gradients, and the buffers that the first replica has written."""
    with without_warnings():
        module = SCRIPTS[name]()
        alone, x = copy.deepcopy(module), numbers(6, 2)
        got = DataParallel(module, TWO)(x)
        halves = [copy.deepcopy(alone)(half) for half in x.chunk(2)]
        assert_close_tree(got, torch.cat(halves))
        alone(x[:3])
        assert_close_tree(dict(module.named_buffers()), dict(alone.named_buffers()))
        (got**2).sum().backward()
        want = torch.cat([alone(half) for half in x.chunk(2)])
        grads = torch.autograd.grad((want**2).sum(), list(alone.parameters()))
        assert_close_tree(grads_of(module), list(grads))


def test_script_module_with_a_python_child():
    """Today's torch.jit lets nobody build one; its check is kept for those who do all the same."""
    message = "Cannot replicate network where python modules are children of ScriptModule"

    class Ignoring(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(2, 2)

    with without_warnings():
        assert all(isinstance(part, torch.jit.ScriptModule) for part in Ignoring().modules())
        module: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
        for put in (setattr, lambda script, name, child: script.add_module(name, child)):
            with pytest.raises(
                RuntimeError, match="Cannot re-assign modules in a ScriptModule with non-scripted module"
            ):
                put(module, "child", nn.Linear(2, 2))
        module._modules._python_modules["child"] = nn.Linear(2, 2)
        for network in (module, nn.Sequential(module)):
            with pytest.raises(RuntimeError, match=message):
                replicate(network, TWO)
            with pytest.raises(RuntimeError, match=message):
                DataParallel(network, TWO)(numbers(2, 2))


# ---------------------------------------------------------------- test/test_cuda_multigpu.py


class Bag(nn.Module):
    """Tensors of any kind as parameters and buffers, to be broadcast by replicate."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self.register_parameter(f"t{i}", nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(f"t{i}", tensor)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f"t{i}") for i in range(len(self._parameters) + len(self._buffers))]


def sparse(rows: int, dtype: torch.dtype) -> Tensor:
    index = torch.tensor([[0, rows - 1, 0], [1, 0, 1]])  # one place twice
    return torch.sparse_coo_tensor(index, numbers(3, dtype=dtype), (rows, 3), check_invariants=True)


def dense_of_many_dtypes() -> list[Tensor]:
    dtypes = [torch.float64, torch.uint8, torch.float32, torch.int64, torch.float16, torch.bool, torch.complex128]
    return [numbers(7 + i, 2, dtype=dtype) for i, dtype in enumerate(dtypes * 2)]


def test_broadcast():
    x = numbers(5, 5)
    bag = Bag([x])
    replicas = replicate(bag, ["cpu"] * 3)
    for replica in replicas:
        assert_same_tree(replica.t0, x)
    assert len({replica.t0.data_ptr() for replica in replicas}) == 3


def test_broadcast_makes_no_copy_on_the_source():
    bag = Bag([numbers(5, 5), numbers(3).requires_grad_()])
    first, _ = replicate(bag, TWO)
    assert first.t0 is bag.t0
    assert first.t1 is bag.t1
    assert first.t1.data_ptr() == bag.t1.data_ptr()


BAGS: dict[str, Callable[[], list[Tensor]]] = {
    "dense": dense_of_many_dtypes,
    "sparse": lambda: [*dense_of_many_dtypes()[:3], sparse(4, torch.float64), sparse(5, torch.float32)],
    "empty": lambda: [*dense_of_many_dtypes(), torch.tensor([], dtype=torch.uint8), numbers(0, 16), numbers(3, 0, 8)],
}


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", BAGS)
def test_broadcast_coalesced(name: str, detach: bool):
    """Torch makes empty tensors flat."""
    bag = Bag(BAGS[name]())
    first, second, third = replicate(bag, ["cpu"] * 3, detach)
    assert all(copied is own for copied, own in zip(first.tensors(), bag.tensors(), strict=True))
    for replica in (second, third):
        for copied, own in zip(replica.tensors(), bag.tensors(), strict=True):
            assert copied is not own
            assert (copied.shape, copied.layout, copied.dtype) == (own.shape, own.layout, own.dtype)
            assert_same_tree(copied.to_dense(), own.to_dense())


@pytest.mark.parametrize("detach", [False, True])
def test_broadcast_coalesced_versions(detach: bool):
    """A write to one copy is no write to another, nor to the original."""
    bag = Bag([numbers(3), numbers(4), numbers(0), sparse(4, torch.float64)])
    own = [tensor._version for tensor in bag.tensors()]
    _, second, third = replicate(bag, ["cpu"] * 3, detach)
    copies = [*second.tensors(), *third.tensors()]
    before = [tensor._version for tensor in copies]
    for i, tensor in enumerate(copies):
        tensor.zero_()
        assert [t._version - v for t, v in zip(copies, before, strict=True)] == [1] * (i + 1) + [0] * (7 - i)
    assert [tensor._version for tensor in bag.tensors()] == own
    assert_same_tree(bag.t0, numbers(3))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_reduce_add(count: int):
    given = [numbers(5, 5), numbers(2, 0), numbers(3, dtype=torch.complex64)]
    bag = Bag([tensor.requires_grad_() for tensor in given])
    weights = [[numbers(*tensor.shape, dtype=tensor.dtype) * (i + 1) for tensor in bag.tensors()] for i in range(count)]
    losses = [
        (tensor * weight.conj()).real.sum() if tensor.is_complex() else (tensor * weight).sum()
        for replica, given in zip(replicate(bag, ["cpu"] * count), weights, strict=True)
        for tensor, weight in zip(replica.tensors(), given, strict=True)
    ]
    torch.stack([loss.double() for loss in losses]).sum().backward()
    want = [functools.reduce(torch.add, column) for column in zip(*weights, strict=True)]
    assert_close_tree([tensor.grad for tensor in bag.tensors()], want, rtol=1e-6)


def test_reduce_add_of_sparse_gradients():
    layer, tokens = nn.Embedding(6, 2, sparse=True), [torch.tensor([0, 3, 3]), torch.tensor([5]), torch.tensor([3, 1])]
    parallel = parallel_apply(replicate(layer, ["cpu"] * 3), tokens)
    torch.cat([(i + 1) * output for i, output in enumerate(parallel)]).sum().backward()
    assert layer.weight.grad.is_sparse
    want = torch.tensor([1.0, 3, 0, 5, 0, 2])[:, None].expand(6, 2)
    assert_close_tree(layer.weight.grad.to_dense(), want)


def test_reduce_add_of_sparse_and_dense_gradients():
    layer, tokens = nn.Embedding(6, 2, sparse=True), torch.tensor([0, 3])
    first, second = replicate(layer, TWO)
    (first(tokens).sum() + (2 * second.weight).sum()).backward()
    assert_close_tree(layer.weight.grad.to_dense(), torch.tensor([3.0, 2, 2, 3, 2, 2])[:, None].expand(6, 2))


def test_reduce_add_leaves_independent_gradients():
    bag = Bag([numbers(3).requires_grad_(), numbers(3).cos().requires_grad_()])
    torch.stack([tensor.sum() for replica in replicate(bag, TWO) for tensor in replica.tensors()]).sum().backward()
    one, other = (tensor.grad for tensor in bag.tensors())
    version = other._version
    one.zero_()
    assert other._version == version
    assert_same_tree(other, torch.full((3,), 2.0))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_scatter_slices(dim: int):
    x = numbers(4, 6)
    parts = scatter(x, TWO, dim)
    size = x.shape[dim] // 2
    for i, part in enumerate(parts):
        assert_same_tree(part, x.narrow(dim, i * size, size))
        assert part.data_ptr() == x.narrow(dim, i * size, size).data_ptr()
        assert part._base is not None


def test_scatter_by_sizes():
    seen = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x * 2

    x = numbers(6, 3).requires_grad_()
    got = DataParallel(Seeing(), TWO, weights=(2, 4), executor="sequential")(x)
    assert_same_tree(got, 2 * x)
    assert seen == [2, 4]
    got.backward(numbers(6, 3))
    assert_same_tree(x.grad, 2 * numbers(6, 3))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_gather_order_and_size(dim: int):
    parts = [numbers(2, 5), numbers(2, 5).cos()] if dim in (0, -2) else [numbers(4, 2), numbers(4, 3)]
    assert_same_tree(gather(parts, "cpu", dim), torch.cat(parts, dim))
    with pytest.raises(ValueError, match="there are no outputs; expected at least one tree to gather from"):
        gather([], "cpu", dim)
    with pytest.raises(ValueError, match=r"which cannot be concatenated along dim"):
        gather([numbers(3, 3, 3), numbers(3, 3)], "cpu", dim)
    with pytest.raises(ValueError, match=r"has shapes .* which cannot be concatenated along dim"):
        gather([numbers(2, 5, 7), numbers(3, 4, 7)], "cpu", dim)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_memory_format_scatter_gather(layout: torch.memory_format):
    x = numbers(10, 3, 32, 32).contiguous(memory_format=layout)
    parts = scatter(x, ["cpu"] * 4)
    assert all(part.is_contiguous(memory_format=layout) for part in parts)
    joined = gather(parts, "cpu")
    assert joined.is_contiguous(memory_format=layout)
    assert_same_tree(joined, x)


Untyped = collections.namedtuple("Untyped", ("a", "b"))


class Typed(NamedTuple):
    a: Tensor
    b: Tensor


@pytest.mark.parametrize("kind", [Untyped, Typed])
def test_scatter_namedtuple(kind: Any):
    a, b = numbers(6), numbers(6, 2).cos()
    parts = scatter(kind(a, b), ["cpu"] * 3)
    assert_same_tree(parts, [kind(a[i : i + 2], b[i : i + 2]) for i in (0, 2, 4)])
    args, _ = scatter_kwargs((kind(a, b),), None, ["cpu"] * 3)
    assert_same_tree([part for (part,) in args], parts)
    assert parts[0]._fields == ("a", "b")


@pytest.mark.parametrize("kind", [Untyped, Typed])
def test_gather_namedtuple(kind: Any):
    parts = [kind(numbers(2), numbers(2, 2)), kind(numbers(3).cos(), numbers(3, 2).cos())]
    joined = gather(parts, "cpu")
    assert_same_tree(joined, kind(*(torch.cat(column) for column in zip(*parts, strict=True))))


# ---------------------------------------------------------------- test/test_nn.py and others


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


# ---------------------------------------------------------------- test/cpp/api/parallel.cpp


def test_differentiable_scatter():
    x = torch.ones(10, requires_grad=True)
    first, second = scatter(x, TWO)
    assert (len(first), len(second)) == (5, 5)
    (first + second).sum().backward()
    assert float(x.grad.sum()) == 10


def test_differentiable_gather():
    one, other = torch.ones(5, requires_grad=True), torch.full((5,), 2.0, requires_grad=True)
    joined = gather([one, other], "cpu")
    assert_same_tree(joined, torch.tensor([1.0] * 5 + [2.0] * 5))
    joined.sum().backward()
    assert_same_tree([one.grad, other.grad], [torch.ones(5)] * 2)


def test_cpp_replicate():
    """There also the first replica is a copy; here it is the module's own, as in Python."""
    layer = nn.Linear(3, 4)
    replicas = replicate(layer, ["cpu"] * 3)
    for replica in replicas:
        assert_same_tree(list(replica.parameters()), list(layer.parameters()))
    pointers = [param.data_ptr() for module in (layer, *replicas[1:]) for param in module.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_cpp_parallel_apply():
    layers = [nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(3, 6)]
    xs = [numbers(rows, 3) for rows in (1, 2, 3)]
    assert_same_tree(parallel_apply(layers, xs, None, ["cpu"] * 3), [a(x) for a, x in zip(layers, xs, strict=True)])


def test_cpp_parallel_apply_with_different_devices():
    outputs = parallel_apply(
        [nn.Linear(3, 4), nn.Linear(3, 4, device="meta")], [numbers(1, 3), numbers(1, 3).to("meta")]
    )
    assert [output.device.type for output in outputs] == ["cpu", "meta"]


def test_cpp_parallel_apply_rethrows_exception():
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("Badness!")

    for call in (lambda x: parallel_apply([Bad(), Bad()], [x, x]), DataParallel(Bad(), TWO)):
        with pytest.raises(RuntimeError, match=r"^Badness!") as caught:
            call(torch.ones(10, 3))
        assert caught.value.args == ("Badness!",)


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["1", "2"])
def test_cpp_places_the_output_on_the_requested_device(devices: Any):
    """In Python torch ignores output_device if there is but one device."""
    layer = nn.Linear(3, 2)
    for output in (
        data_parallel(layer, numbers(10, 3), devices, "meta"),
        DataParallel(layer, devices, "meta")(numbers(10, 3)),
    ):
        assert (output.device.type, output.shape) == ("meta", (10, 2))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_cpp_uses_all_available_devices(count: int):
    """Each replica returns a scalar; of a single device it stays one."""
    calls = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return torch.tensor(float(len(x)))

    warns = pytest.warns(UserWarning, match=SCALARS) if count > 1 else contextlib.nullcontext()
    with warns:
        output = data_parallel(Counting(), numbers(8, 10), ["cpu"] * count)
    assert_same_tree(output, torch.tensor([8.0 / count] * count) if count > 1 else torch.tensor(8.0))
    assert len(calls) == count


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_cpp_uses_the_module_itself_without_devices():
    assert_same_tree(data_parallel(nn.Identity(), numbers(8, 10)), numbers(8, 10))
