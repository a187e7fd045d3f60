"""What test/distributed/test_data_parallel.py of PyTorch asserts, on virtual devices; most names are its own."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import contextlib
import copy
import functools
import gc
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from fdp import DataParallel, data_parallel
from fdp.nn import gather, parallel_apply, replicate, scatter
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import HAS_LOCK
from tests.nn.modules_of_data_parallel import grads_of

TWO = ("cpu", "cpu")

each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
some_devices = pytest.mark.parametrize("devices", [TWO, list(TWO), ["cpu"], ["cpu"] * 5], ids=["2", "list", "1", "5"])


pytestmark = pytest.mark.usefixtures("float64_side_by_side")


def close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Sparse tensors by their values, whatever the order of the entries."""
    dense = [[tensor.to_dense() if tensor.is_sparse else tensor for tensor in tree] for tree in (got, want)]
    assert_close_tree(*dense, rtol=tolerance)


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


@pytest.mark.skipif(not HAS_LOCK, reason="without the GIL a collection counts what threads have dropped of each other")
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


@few(3)
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
