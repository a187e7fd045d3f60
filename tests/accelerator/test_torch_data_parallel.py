"""DataParallel beside torch.nn.DataParallel, on several devices: the same calls, compared in all that they do."""

import contextlib
import copy
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parallel import scatter_gather
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map_only

import fdp
from fdp.testing._virtual_tensor import Copied, record_copies
from tests.accelerator.torch_copies import torch_copies
from tests.common.comparing import assert_close_tree
from tests.common.containers import Batch, Pixel, Point, tensors_of
from tests.common.numbers import numbers
from tests.common.threads import many_cores

DEVICES = [torch.device("virtual", i) for i in range(4)]
CPU = torch.device("cpu")


def to(tree: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(device), tree)


def assert_same(got: Any, want: Any) -> None:
    """Structure, types, devices, and values up to rounding."""
    assert [tensor.device for tensor in tensors_of(got)] == [tensor.device for tensor in tensors_of(want)]
    assert_close_tree(to(got, CPU), to(want, CPU))


def on(tree: Any) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of(tree)}


@pytest.fixture(autouse=True)
def _cores() -> Iterator[None]:
    with many_cores(4):
        yield


# ---- modules


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.third = self.first

    def tied(self) -> "Tied":
        self.second.weight = self.first.weight
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).sin()).sin())


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(numbers(3, 3)), nn.Parameter(numbers(3))])
        self.biases = nn.ParameterDict({"a": nn.Parameter(numbers(3))})

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] * self.weights[1] + self.biases["a"]


class Buffers(nn.Module):
    """One buffer with a gradient, one that each call writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", numbers(3).requires_grad_())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.get_buffer("scale")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.cell.flatten_parameters()
        return self.cell(x)[0]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex128) @ self.weight


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))

    def forward(self, x: Tensor, factor: float, y: Tensor, *, bias: Tensor | None = None, name: str = "") -> Tensor:
        assert name == "name"
        return (x @ self.weight * factor + y) * (1 if bias is None else bias)


class Nest(nn.Module):
    """Gets and gives nested containers, and tells their types."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))

    def forward(self, tree: Any) -> Any:
        (a, [b, options]), named = tree["pair"], tree["named"]
        assert type(named) is Point
        assert type(options) is OrderedDict
        w = self.weight
        ordered = OrderedDict(z=a * w, y=[named.x * w, None])
        return {"b": (b * w, [a.sum(1)]), "a": ordered, "point": Pixel(options["c"] * w, named.y)}


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))

    def forward(self, x: Tensor) -> Any:
        return {"loss": (x * self.weight).square().mean(), "rows": x * self.weight}


class PerDevice(nn.Module):
    """One of its arguments comes once for each device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))

    def forward(self, x: Tensor, mixing: Tensor, *, shift: Tensor) -> Tensor:
        return (x * self.weight) @ mixing[0] + shift.sum()


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(2, 3))

    def forward(self) -> Tensor:
        return self.weight.sin()


class Times(nn.Module):
    """Treats rows alike along any dim."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x * self.weight, [y.sin() * self.weight]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.0), nn.GELU())


def tree(rows: int) -> Any:
    options = OrderedDict(c=numbers(rows, 3), d=())
    return {"pair": (numbers(rows, 3), [numbers(rows, 3), options]), "named": Point(numbers(rows, 3), numbers(rows))}


# ---- the table


class Case(NamedTuple):
    """A module and its arguments, of which all floats get gradients."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]] = lambda: (numbers(7, 3),)
    kwargs: Callable[[], dict[str, Any]] = dict
    dim: int = 0
    training: bool = True
    alike: bool = True
    """Whether the module treats rows alike, so that one device gives the same."""


CASES = {
    "linear": Case(lambda: nn.Linear(3, 2)),
    "linear-few-rows": Case(lambda: nn.Linear(3, 2), lambda: (numbers(2, 3),)),
    "linear-one-row": Case(lambda: nn.Linear(3, 2), lambda: (numbers(1, 3),)),
    "linear-no-rows": Case(lambda: nn.Linear(3, 2), lambda: (numbers(0, 3),)),
    "linear-no-bias": Case(lambda: nn.Linear(3, 2, bias=False)),
    "linear-kwargs": Case(lambda: nn.Linear(3, 2), tuple, lambda: {"input": numbers(7, 3)}),
    "linear-last-dim": Case(lambda: nn.Linear(3, 2), lambda: (numbers(2, 7, 3),), dim=1),
    "mlp": Case(mlp, lambda: (numbers(8, 3),), alike=False),
    "mlp-eval": Case(mlp, training=False),
    "layer-norm": Case(normalized),
    "conv": Case(lambda: nn.Conv2d(2, 3, 2), lambda: (numbers(5, 2, 4, 4),)),
    "tied": Case(Tied),
    "parameter-list": Case(Lists),
    "buffers": Case(Buffers),
    "embedding": Case(lambda: nn.Embedding(6, 2), lambda: (torch.arange(10).reshape(5, 2) % 6,)),
    "lstm": Case(Recurrent, lambda: (numbers(5, 2, 3),)),
    "spectral-norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), alike=False),
    "spectral-norm-eval": Case(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), training=False),
    "weight-norm": Case(lambda: parametrizations.weight_norm(nn.Linear(3, 2))),
    "complex": Case(Complex),
    "complex-dim-1": Case(Times, lambda: (numbers(2, 5, dtype=torch.complex128), numbers(2, 5)), dim=1),
    "several": Case(
        Several,
        lambda: (numbers(7, 3), 2.5, numbers(7, 1)),
        lambda: {"bias": numbers(7, 3), "name": "name"},
    ),
    "nest": Case(Nest, lambda: (tree(7),)),
    "scalar": Case(Scalar, alike=False),
    "no-arguments": Case(Constant, tuple),
    "dim-1": Case(Times, lambda: (numbers(2, 7), numbers(1, 7, 2)), dim=1),
    "dim--1": Case(Times, lambda: (numbers(2, 7), numbers(1, 2, 7)), dim=-1),
    "dim--2": Case(Times, lambda: (numbers(7, 2), numbers(1, 7, 2)), dim=-2),
}
ORDERS: dict[str, Any] = {"0,1": (0, 1), "1,0": (1, 0), "0": (0,), "2,0,3": (2, 0, 3), "all": None}

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


class Ran(NamedTuple):
    """What two calls and their backward have left behind."""

    output: Any
    grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    state: dict[str, Tensor]


def made(case: Case, device: Any) -> Any:
    torch.manual_seed(0)
    module = case.module().double().to(device).train(case.training)
    for name, buffer in module._buffers.items():  # nn.Module.to makes them results of the copy
        module._buffers[name] = buffer if buffer is None else buffer.detach().requires_grad_(buffer.requires_grad)
    return module.tied() if isinstance(module, Tied) else module  # which the virtual accelerator's `to` undoes


def loss_of(output: Any) -> Tensor:
    """Of every differentiable number of an output, each with a weight of its own."""
    tensors = [t.reshape(-1) for t in tensors_of(output) if t.requires_grad]
    reals = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in tensors]
    return torch.stack([(t * numbers(len(t)).to(t.device)).square().sum() for t in reals]).sum()


def ran(call: Callable[..., Any], case: Case, module: nn.Module, source: Any = CPU) -> Ran:
    inputs, kwargs = to((case.inputs(), case.kwargs()), source)
    leaves = [leaf.requires_grad_() for leaf in tensors_of((inputs, kwargs)) if leaf.is_floating_point()]
    call(*inputs, **kwargs)
    output = call(*inputs, **kwargs)
    loss_of(output).backward()
    grads: Any = {name: p.grad for name, p in (*module.named_parameters(), *module.named_buffers())}
    return Ran(output, grads, [leaf.grad for leaf in leaves], dict(module.state_dict()))


def running(torchs: bool) -> contextlib.AbstractContextManager[None]:
    return torch_copies() if torchs else contextlib.nullcontext()


def wrapped(torchs: bool, module: nn.Module, order: Any = (0, 1), **options: Any) -> Callable[..., Any]:
    return nn.DataParallel(module, order, **options) if torchs else fdp.DataParallel(module, order, **options)


def function(torchs: bool, module: nn.Module, order: Any = (0, 1), **options: Any) -> Callable[..., Any]:
    call: Any = parallel.data_parallel if torchs else fdp.data_parallel
    return lambda *args, **kwargs: call(module, args, order, module_kwargs=kwargs, **options)


def ran_by(torchs: bool, form: Any, case: Case, order: Any, source: torch.device, **options: Any) -> Ran:
    module = made(case, first_of(order))
    with running(torchs):
        return ran(form(torchs, module, order, dim=case.dim, **options), case, module, source)


def first_of(order: Any) -> torch.device:
    return DEVICES[(order or (0,))[0]]


vectors = pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")


@cases
@orders
@vectors
def test_as_torch(case: Case, order: Any):
    got = ran_by(False, wrapped, case, order, CPU)
    assert_same(got, ran_by(True, wrapped, case, order, CPU))
    if case.alike:
        module = made(case, first_of(order))
        one = ran(
            lambda *args, **kwargs: module(*to(args, first_of(order)), **to(kwargs, first_of(order))), case, module
        )
        assert_same(got, one)


@cases
@pytest.mark.parametrize("form", [wrapped, function])
@vectors
def test_as_torch_between_other_devices(case: Case, form: Any):
    """Inputs come from a device that is none of the slots, outputs go to another one."""
    got, want = (ran_by(torchs, form, case, (2, 0), DEVICES[1], output_device=3) for torchs in (False, True))
    assert_same(got, want)
    assert on(got.output) == {DEVICES[3]}
    assert on(got.input_grads) <= {DEVICES[1]}
    assert on(got.state) <= {DEVICES[2]}


@cases
@vectors
def test_as_torch_without_gradients(case: Case):
    results = []
    for torchs in (False, True):
        module = made(case, DEVICES[1])
        with running(torchs), torch.no_grad():
            call = wrapped(torchs, module, (1, 3, 0), dim=case.dim)
            results.append([call(*case.inputs(), **case.kwargs()) for _ in range(2)])
            results[-1].append(dict(module.state_dict()))
    assert_same(*results)


class Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.maps, self.by_device, self.found, self.rows = [], {}, set(), {"all": 0}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.maps.append(out)
        self.by_device[x.device.index] = [out.detach()]
        self.found.add(x.device.index)
        self.rows["all"] += len(x)
        return out


@pytest.mark.parametrize("hooked", [False, True])
def test_lists_and_dicts_that_forward_fills(hooked: bool):
    found = []
    for torchs in (False, True):
        module = made(Case(Filling), DEVICES[0])
        if hooked:
            module.layer.register_full_backward_hook(lambda *_: None)
        with running(torchs):
            call = wrapped(torchs, module, (0, 2, 1))
            for _ in range(2):
                call(ROWS)
        module.maps.sort(key=lambda out: out.device.index)  # torch's are in the order in which threads come
        found.append((module.maps, [module.by_device[i] for i in range(3)], module.found, module.rows))
    assert_same(*found)


class Pairs:
    """What torch's gather joins as it would a tuple: by iterating, and by calling the class with what it has joined."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = [tuple(pair) for pair in pairs]
        self.device = self.pairs[0][0].device

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))

    def forward(self, x: Tensor) -> Any:
        return {"out": x * self.weight, "cache": Pairs([(x * self.weight, x.sin()), (x, x * x)])}


@pytest.mark.parametrize("target", [0, 3])
def test_objects_that_torch_gathers_by_iterating(target: int):
    found = []
    for torchs in (False, True):
        module = WithCache().to(DEVICES[2])
        with running(torchs):
            out = wrapped(torchs, module, (2, 0, 1), output_device=target)(ROWS)
            loss_of((out["out"], out["cache"].pairs)).backward()
        assert type(out["cache"]) is Pairs
        assert out["cache"].device == DEVICES[target]
        found.append((out["out"], out["cache"].pairs, module.weight.grad))
    assert_same(*found)


# ---- scatter, gather, replicate, parallel_apply


VALUES: dict[str, Any] = {
    "tensor": numbers(7, 2),
    "tensor-few-rows": numbers(2, 2),
    "tensor-no-rows": numbers(0, 2),
    "complex": numbers(7, 2, dtype=torch.complex128),
    "ints": torch.arange(7),
    "tuple": (numbers(7), numbers(7, 2)),
    "list": [numbers(7), [numbers(7, 2), "a"]],
    "dict": {"b": numbers(7), "a": (numbers(7, 2), None)},
    "ordered-dict": OrderedDict(b=numbers(7), a=3),
    "namedtuple": Point(numbers(7), Pixel(numbers(7, 2), 2.5)),
    "empty-containers": [numbers(7), (), [], {}],
    "empty-list": [],
    "none": None,
    "text": "text",
    "numbers": (1, 2.5),
}
values = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def beside(name: str) -> Callable[..., tuple[Any, Any]]:
    """What a function of fdp.nn does, and what its namesake in torch does."""

    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        got = getattr(fdp.nn, name)(*args, **kwargs)
        torchs = getattr(scatter_gather, name, None) or getattr(parallel, name)
        with torch_copies():
            return got, torchs(*args, **kwargs)

    return both


@values
@pytest.mark.parametrize("source", [CPU, DEVICES[1]], ids=str)
@pytest.mark.parametrize("devices", [(0, 1), (2, 1, 3), (1,)], ids=str)
def test_scatter_as_torch(value: Any, source: torch.device, devices: tuple[int, ...]):
    assert_same(*beside("scatter")(to(value, source), devices))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_scatter_along_a_dim_as_torch(dim: int):
    assert_same(*beside("scatter")(numbers(3, 4, 5), (0, 1), dim))
    got, want = beside("scatter_kwargs")((numbers(3, 4, 5),), {"y": [numbers(3, 4, 5)]}, (0, 1), dim)
    assert_same(got, want)
    parts = [args[0] for args in got[0]]
    assert_same(*beside("gather")(parts, 1, dim))


CALLS: dict[str, Any] = {
    "positional": ((numbers(7), "a"), {}),
    "keywords": ((), {"x": numbers(7), "y": None}),
    "both": ((numbers(7),), {"x": numbers(7, 2), "y": "b"}),
    "none": ((), None),
    "only-none": ((None,), None),
}


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS)
def test_scatter_kwargs_as_torch(args: Any, kwargs: Any):
    assert_same(*beside("scatter_kwargs")(args, kwargs, (1, 0, 3)))


def test_a_chunk_that_is_there_already_is_a_view():
    for chunks in beside("scatter")(x := torch.ones(4, device=DEVICES[1]), (0, 1)):
        for chunk in chunks:
            chunk.zero_()
    assert x.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("source", [CPU, DEVICES[1]], ids=str)
def test_gradients_of_scatter_as_torch(source: torch.device):
    grads = []
    for scatter in (fdp.nn.scatter, parallel.scatter):
        x = numbers(5, 2).to(source).requires_grad_()
        with torch_copies():
            first: Any = scatter(x, (0, 1))[0]
            (grad,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
            grads.append((grad, *torch.autograd.grad(grad.sum(), x)))
    assert_same(*grads)
    assert grads[0][0].tolist()[3:] == [[0, 0], [0, 0]]


OUTPUTS: dict[str, Any] = {
    "tensor": numbers(2, 3),
    "no-rows": numbers(0, 3),
    "ints": torch.arange(2),
    "none": None,
    "tuple": (numbers(2), None, numbers(2, 3)),
    "list": [numbers(2), [numbers(1, 2)]],
    "dict": {"b": numbers(2), "a": (numbers(2, 2), None)},
    "ordered-dict": OrderedDict(b=numbers(2), a=numbers(2)),
    "namedtuple": Point(numbers(2), Pixel(numbers(2, 2), None)),
    "empty-containers": [numbers(2), (), [], {}],
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("target", [0, DEVICES[2], "virtual:3", "cpu"], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_gather_as_torch(output: Any, target: Any, dim: int):
    assert_same(*beside("gather")([to(output, device) for device in DEVICES[1:]], target, dim))


def test_gather_complex_numbers():
    outputs = [numbers(2, 3, dtype=torch.complex128).to(device) for device in DEVICES[:2]]
    assert_same(*beside("gather")(outputs, 0, 1))


@pytest.mark.parametrize("target", [0, -1])
@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU tensor:FutureWarning")
def test_gather_scalars_as_torch(target: int):
    results, grads = [], []
    for gather in (fdp.nn.gather, parallel.gather):
        outputs = [(1 + numbers(1)[0]).to(device).requires_grad_() for device in DEVICES[:3]]
        with torch_copies():
            with pytest.warns(UserWarning, match="along dimension 0, but all input tensors were scalars"):
                results.append(gather(outputs, target))
            results[-1].pow(3).sum().backward()
        grads.append([output.grad for output in outputs])
        assert [grad.device for grad in grads[-1] if grad is not None] == DEVICES[:3]
    assert_same(*results)
    assert_same(*grads)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("devices", [(1, 0), DEVICES[1:], ["virtual:1", "virtual:1"]], ids=["ints", "devices", "names"])
def test_replicate_as_torch(devices: Any, detach: bool):
    module = made(CASES["mlp"], DEVICES[1])
    for replicas in beside("replicate")(module, devices, detach):
        for replica, device in zip(replicas, devices, strict=True):
            want = torch.device("virtual", device) if isinstance(device, int) else torch.device(device)
            weight, mean = replica[0].weight, replica[1].running_mean
            assert weight.device == mean.device == want
            assert type(replica) is type(module)
            assert weight.requires_grad is not detach or weight is module[0].weight
            assert_same(weight.cpu(), module[0].weight.cpu())
            x = numbers(3, 3).to(want)
            assert_same(replica.eval()(x).cpu(), made(CASES["mlp-eval"], CPU)(numbers(3, 3)))
        assert replicas[0][1].running_mean is not replicas[1][1].running_mean
        assert replicas[0][1].running_mean.host.data_ptr() == module[1].running_mean.host.data_ptr()


def test_what_is_shared_is_shared_in_replicas():
    for replicas in beside("replicate")(made(CASES["tied"], DEVICES[0]), (0, 1)):
        for replica in replicas:
            assert replica.first is replica.third
            assert replica.first.weight is replica.second.weight


def test_no_devices_no_replicas():
    assert beside("replicate")(nn.Linear(1, 1), []) == ([], [])


def test_parallel_apply_as_torch():
    layers = [nn.Linear(3, 2, device=device, dtype=torch.float64) for device in DEVICES[:2]]
    rows = [numbers(i + 1, 3).to(device) for i, device in enumerate(DEVICES[:2])]
    for inputs, kwargs in (
        (rows, None),
        ([(x,) for x in rows], [{}, {}]),
        ([[x] for x in rows], None),
        ([(), ()], [{"input": x} for x in rows]),
    ):
        assert_same(*beside("parallel_apply")(layers, inputs, kwargs, (0, 1)))
    assert_same(*beside("parallel_apply")(layers[1:], rows[1:], None, (1,)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((2, 1, None, None), "The number of modules 2 is not equal to the number of inputs 1"),
        ((1, 1, 2, None), "The number of modules 1 is not equal to the number of kwargs_tup 2"),
        ((2, 2, 2, 3), "The number of modules 2 is not equal to the number of devices 3"),
    ],
)
def test_parallel_apply_counts_as_torch(lengths: Any, message: str):
    modules, inputs, kwargs, devices = (cast(Any, [{}] * n if n else None) for n in lengths)
    for apply in (fdp.nn.parallel_apply, parallel.parallel_apply):
        with pytest.raises(AssertionError, match=message), torch_copies():
            apply(modules, inputs, kwargs, devices)


class Where(nn.Module):
    """Tells the devices that it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(1))
        self.register_buffer("mean", numbers(1))

    def forward(self, x: Tensor) -> Tensor:
        devices = [x.device.index, self.weight.device.index, self.mean.device.index]
        return torch.tensor([[*devices, torch.accelerator.current_device_index()]], device=x.device)


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 3), (3,)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_replica_is_on_its_device(order: tuple[int, ...], grad: bool):
    for torchs in (False, True):
        with running(torchs), torch.set_grad_enabled(grad), torch.accelerator.device_index(order[0]):
            found = wrapped(torchs, Where().to(DEVICES[order[0]]), order)(numbers(3))
        assert found.tolist() == [[index] * 4 for index in order]


def test_with_one_device_the_current_one_stays():
    for torchs in (False, True):
        with running(torchs):
            assert wrapped(torchs, Where().to(DEVICES[2]), [2])(numbers(3)).tolist() == [[2, 2, 2, 0]]


# ---- where they differ


class Does(nn.Module):
    """A function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(numbers(3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(self, *inputs, **kwargs)


def doing(function: Callable[..., Any]) -> Any:
    return Does(function).to(DEVICES[0])


def by_torch(module: nn.Module, *inputs: Any, order: Any = (0, 1), dim: int = 0, **kwargs: Any) -> Any:
    with torch_copies():
        return nn.DataParallel(module, order, dim=dim)(*inputs, **kwargs)


def by_fdp(module: nn.Module, *inputs: Any, order: Any = (0, 1), dim: int = 0, **kwargs: Any) -> Any:
    return fdp.DataParallel(module, order, dim=dim)(*inputs, **kwargs)


ROWS = numbers(8, 3)
there = ROWS.to(DEVICES[0])


def test_rows_that_differ():
    """Torch drops the surplus chunks silently."""
    module = doing(lambda self, x, y: x * self.weight)
    assert by_torch(module, ROWS, ROWS[:1]).shape == (4, 3)
    with pytest.raises(ValueError, match=r"rows differ: inputs\[0\] has 8 along dim 0, inputs\[1\] has 1 along dim 0"):
        by_fdp(module, ROWS, ROWS[:1])


@pytest.mark.parametrize(("order", "rows", "others"), [((0, 1), 8, 2), ((2, 0, 1), 7, 9), ((0, 1, 2, 3), 2, 2)])
def test_one_copy_for_each_device(order: Any, rows: int, others: int):
    """Arguments with other rows, which torch.chunk cuts into as many parts."""
    results = []
    for torchs in (False, True):
        module = PerDevice().to(DEVICES[order[0]])
        leaves = [t.requires_grad_() for t in (numbers(rows, 3), numbers(others, 3, 3), numbers(rows, 2))]
        with running(torchs):
            out = wrapped(torchs, module, order)(leaves[0], leaves[1], shift=leaves[2])
            loss_of(out).backward()
        results.append((out, module.weight.grad, [leaf.grad for leaf in leaves]))
    assert_same(*results)


def test_rows_of_keyword_arguments_that_differ():
    """Torch fails when it pairs the chunks."""
    module = doing(lambda self, x, y: x * self.weight)
    with pytest.raises(AssertionError, match="number of modules 2 is not equal to the number of kwargs_tup 1"):
        by_torch(module, ROWS, y=ROWS[:1])
    with pytest.raises(ValueError, match=r"rows differ: inputs\[0\] has 8 along dim 0, kwargs\['y'\] has 1"):
        by_fdp(module, ROWS, y=ROWS[:1])


def test_an_embedding_with_max_norm():
    """Torch's cannot write to the weight of the first replica, which is a view for autograd."""
    ids = torch.arange(8) % 6
    modules = [nn.Embedding(6, 2, max_norm=0.5, device=DEVICES[0]) for _ in range(3)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        by_torch(modules[0], ids)
    out, want = by_fdp(modules[1], ids), modules[2](ids.to(DEVICES[0]))
    assert_same(out, want)
    for module, result in ((modules[1], out), (modules[2], want)):
        loss_of(result).backward()
        assert module.weight.grad is not None
    assert_same(modules[1].weight.grad, modules[2].weight.grad)
    assert_same(modules[1].weight[:4], modules[2].weight[:4])


def test_few_rows_and_an_option():
    """Torch calls the devices that have no rows without positional arguments."""
    module = doing(lambda self, x, flag: x * self.weight * flag)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        by_torch(module, ROWS[:1], flag=2.0)
    assert_same(by_fdp(module, ROWS[:1], flag=2.0), module(there[:1], 2.0))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.float())


def test_the_gradient_of_an_unused_parameter():
    """Torch makes it zero, which weight decay and momentum then act on."""
    for by, is_none in ((by_torch, False), (by_fdp, True)):
        module = Unused().to(DEVICES[0])
        with running(by is by_torch):
            by(module, ROWS).sum().backward()
        used, unused = module.used.weight.grad, module.unused.weight.grad
        assert used is not None
        assert (unused is None) is is_none
        assert unused is None or not unused.any()


def test_parameters_of_a_replica():
    """Torch has none, and without gradients on the first device only."""
    module = doing(lambda self, x: x.new_full((1,), len(list(self.parameters()))))
    assert by_torch(module, ROWS).tolist() == [0, 0]
    assert by_fdp(module, ROWS).tolist() == [1, 1]
    with torch.no_grad():
        assert by_torch(module, ROWS).tolist() == [1, 0]
        assert by_fdp(module, ROWS).tolist() == [1, 1]


def test_scalars():
    """Torch joins them along dim 0 only."""
    module = doing(lambda self, x: x.sum() * self.weight.sum())
    for by in (by_torch, by_fdp):
        assert by(module, ROWS, order=(0,)).shape == ()
        for rows, count in ((ROWS, 2), (ROWS[:1], 1)):
            with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were"):
                assert by(module, rows).shape == (count,)
    with pytest.raises(IndexError, match="Dimension specified as 1 but tensor has no dimensions"):
        by_torch(module, ROWS, dim=1)
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 1, but all input tensors were scalars"):
        assert by_fdp(module, ROWS, dim=1).shape == (2,)


class Refused(Exception):
    def __init__(self, code: int, reason: str):
        super().__init__(code, reason)
        self.code = code


def refuse(self: nn.Module, x: Tensor) -> Any:
    raise Refused(len(x), "no")


def test_an_exception():
    """Torch raises another one, of another class if it cannot make one of that."""
    with pytest.raises(RuntimeError, match=r"Caught Refused in replica 0 on device 0\.\nOriginal Traceback") as lost:
        by_torch(doing(refuse), ROWS)
    assert type(lost.value) is RuntimeError
    with pytest.raises(Refused, match="no") as kept:
        by_fdp(doing(refuse), ROWS)
    assert kept.value.code == 4
    assert kept.value.__notes__[:2] == [
        "Caught Refused in replica 0 on device 0.",
        "in shard 0 of 2, rows 0:4, on virtual:0",
    ]
    with pytest.raises(Refused, match="no") as bare:
        by_fdp(doing(refuse), ROWS, order=(0,))
    assert not hasattr(bare.value, "__notes__")


@pytest.mark.parametrize("value", [2.0, None, "text", [1, {"a": 2}]], ids=str)
def test_nothing_to_split(value: Any):
    """Torch runs the module on every device and joins as many outputs."""
    module = doing(lambda self, x: self.weight + 1)
    assert by_torch(module, value).shape == (6,)
    assert by_torch(module, value, order=(0,)).shape == by_fdp(module, value).shape == (3,)


def test_a_number_in_a_tensor():
    """Torch cannot cut it."""
    module = doing(lambda self, x, y: x * y)
    with pytest.raises(RuntimeError, match="chunk expects at least a 1-dimensional tensor"):
        by_torch(module, ROWS, torch.tensor(2.0))
    assert_same(by_fdp(module, ROWS, torch.tensor(2.0)), there * 2)


def do_nothing(*_: Any) -> None: ...


def register(self: Any, x: Tensor) -> Tensor:
    self.register_forward_hook(do_nothing)
    return x * self.weight


def test_hooks_are_a_replicas_own():
    """Torch shares the dict of hooks between the module and its replicas, in threads that change it."""
    for by, count in ((by_torch, 4), (by_fdp, 0)):
        module = doing(register)
        for _ in range(2):
            by(module, ROWS)
        assert len(module._forward_hooks) == count


class Closing(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.function = self.scale if how == "bound" else lambda x: x * self.weight
        if how == "override":
            self.forward = self.scale

    def scale(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("how", ["closure", "bound", "override"])
def test_functions_that_know_the_module(how: str):
    """Torch runs them with the parameters of the first device on all of them."""
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        by_torch(Closing(how).to(DEVICES[0]), ROWS)
    grads = []
    for call in (by_fdp, lambda module, x: module(x.to(DEVICES[0]))):
        module = Closing(how).to(DEVICES[0])
        call(module, ROWS).square().sum().backward()
        grads.append(module.weight.grad)
    assert_same(*grads)


def test_outputs_that_are_no_tensors():
    """Torch makes a str of an iterator, and fails for numbers."""
    assert by_torch(doing(lambda self, x: ("text", x)), ROWS)[0].startswith("<map object at")
    assert by_fdp(doing(lambda self, x: ("text", x)), ROWS)[0] == "text"
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        by_torch(doing(lambda self, x: (3, x)), ROWS)
    assert by_fdp(doing(lambda self, x: (3, x)), ROWS)[0] == 3
    with pytest.raises(ValueError, match=r"output\[0\] differs between shards: .*4 in shard 0, 3 in shard 1"):
        by_fdp(doing(lambda self, x: (len(x), x)), ROWS[:7])


def test_dataclasses():
    """Torch does not look inside: inputs stay on their device, outputs fail."""
    module = doing(lambda self, batch: batch.x * self.weight)
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        by_torch(module, Batch(ROWS))
    assert_same(by_fdp(module, Batch(ROWS)), module(Batch(there)))
    module = doing(lambda self, x: Batch(x * self.weight, [x]))
    with pytest.raises(TypeError, match="'Batch' object is not iterable"):
        by_torch(module, ROWS)
    assert_same(by_fdp(module, ROWS), module(there))


def test_the_output_device_of_one_device():
    """Torch leaves the output where it is."""
    module = nn.Linear(3, 2, dtype=torch.float64)
    for form in (wrapped, function):
        module.to(DEVICES[1])
        with torch_copies():
            assert form(True, module, [1], output_device=2)(ROWS).device == DEVICES[1]
        for target in (2, "cpu", CPU, DEVICES[3]):
            out = form(False, module, [1], output_device=target)(ROWS)
            assert out.device == (DEVICES[2] if target == 2 else torch.device(target))


def test_the_cpu_as_a_target():
    """Torch takes the name, but no torch.device, and neither at construction."""
    outputs = [ROWS.to(device) for device in DEVICES[:2]]
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"), torch_copies():
        parallel.gather(outputs, CPU)
    assert fdp.nn.gather(outputs, CPU).device == CPU
    targets: tuple[Any, ...] = ("cpu", CPU)
    for target in targets:
        with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
            nn.DataParallel(nn.Linear(3, 2), output_device=target)
        shim = fdp.DataParallel(nn.Linear(3, 2).double().to(DEVICES[0]), output_device=target)
        assert shim.output_device == CPU
        assert shim(ROWS).device == CPU


@pytest.mark.parametrize("form", [wrapped, function])
@pytest.mark.parametrize("torchs", [False, True])
def test_minus_one_is_the_cpu(form: Any, torchs: bool):
    """Torch warns once more, in backward."""
    module, x = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), ROWS.clone().requires_grad_()
    with running(torchs):
        with pytest.warns(FutureWarning, match=r"Using -1 to represent CPU tensor is deprecated"):
            out = form(torchs, module, output_device=-1)(x)
        out.sum().backward()
    assert x.grad is not None
    assert out.device == x.grad.device == CPU


def test_the_device_of_a_module_in_parallel_apply():
    """Torch takes devices of CUDA only, and numbers."""
    x = ROWS.to(DEVICES[1])
    with pytest.raises(ValueError, match="Expected a cuda device, but got: virtual:1"), torch_copies():
        parallel.parallel_apply([nn.Identity()], [x], None, [DEVICES[1]])
    assert fdp.nn.parallel_apply([nn.Identity()], [x], None, [DEVICES[1]])[0] is x


def test_complex_numbers_along_a_negative_dim():
    """Torch joins the real parts beside the imaginary ones."""
    module = doing(lambda self, x: torch.complex(x, x + 1))
    with pytest.raises(RuntimeError, match="Tensor must have a last dimension of size 2"):
        by_torch(module, ROWS[:, :2], dim=-1)
    assert_same(by_fdp(module, ROWS, dim=-1), torch.complex(there, there + 1))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.real, self.complex = nn.Parameter(numbers(3)), nn.Parameter(numbers(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.complex * self.real.sum()


def test_complex_parameters_beside_real_ones():
    """Torch copies them in one buffer, in which a complex number may not start just anywhere."""
    with pytest.raises(RuntimeError, match="Tensor must have a storage_offset divisible by 2"):
        by_torch(Mixed().to(DEVICES[0]), ROWS)
    grads = []
    for call in (by_fdp, lambda module, x: module(x.to(DEVICES[0]))):
        module = Mixed().to(DEVICES[0])
        torch.view_as_real(call(module, ROWS)).square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert_same(*grads)


def rebind(self: Any, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return x


def write_and_fail(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    raise KeyError("lost")


def test_buffers_that_forward_replaces():
    """Torch loses them."""
    for by, count in ((by_torch, 0), (by_fdp, 2)):
        module = doing(rebind)
        for _ in range(2):
            by(module, ROWS)
        assert module.calls.tolist() == [count]
        assert module.calls.device == DEVICES[0]


def test_buffers_after_a_failure():
    """Those of the first replica are the module's own: what it wrote stays, as on one device."""
    for by in (by_torch, by_fdp):
        module = doing(write_and_fail)
        with pytest.raises(KeyError, match="lost"):
            by(module, ROWS)
        assert module.calls.tolist() == [1]


def test_inference_mode():
    """Torch does not carry it into its threads."""
    module = doing(lambda self, x: x.new_tensor([torch.is_inference_mode_enabled()]))
    with torch.inference_mode():
        assert by_torch(module, ROWS).tolist() == [0, 0]
        assert by_fdp(module, ROWS).tolist() == [1, 1]


def test_autocast():
    """Torch asks whether CUDA has it, and does not carry its dtype."""
    module = nn.Linear(3, 2, device=DEVICES[0])
    for training in (True, False):
        with torch.autocast("virtual", dtype=torch.bfloat16), torch.set_grad_enabled(training):
            assert by_torch(module, ROWS.float()).dtype is torch.float32
            assert by_fdp(module, ROWS.float()).dtype is torch.bfloat16


def test_functional_call():
    """Torch refuses."""
    module = doing(lambda self, x: x * self.weight)
    other = {"module.weight": (2 * module.weight).detach()}
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with nn.DataParallel module"):
        torch.func.functional_call(nn.DataParallel(module, [0, 1]), other, (ROWS,))
    assert_same(torch.func.functional_call(fdp.DataParallel(module, [0, 1]), other, (ROWS,)), 2 * module(there))


def test_dicts_with_other_keys():
    """Torch does not say which output it is."""
    outputs: list[Any] = [{"a": there}, {"b": there}]
    with pytest.raises(KeyError, match="a"), torch_copies():
        parallel.gather(outputs, 0)
    with pytest.raises(ValueError, match=r"a dict with keys \['a'\] in shard 0, a dict with keys \['b'\] in shard 1"):
        fdp.nn.gather(outputs, 0)


IDS: dict[str, tuple[Any, Any, Any]] = {
    "no-devices": ([], IndexError, ValueError),
    "set": ({0, 1}, TypeError, TypeError),
    "no-such-device": ([0, 7], None, ValueError),
    "negative": ([0, -1], None, ValueError),
}


@pytest.mark.parametrize(("ids", "torchs", "ours"), IDS.values(), ids=IDS)
def test_device_ids_that_cannot_be(ids: Any, torchs: Any, ours: Any):
    """Torch does not look whether they exist."""
    with pytest.raises(torchs, match=r"index out of range|not subscriptable") if torchs else contextlib.nullcontext():
        nn.DataParallel(nn.Linear(1, 1), ids)
    with pytest.raises(ours, match=r"device_ids is empty|must be None, a device or a seq|no accelerator with index"):
        fdp.DataParallel(nn.Linear(1, 1), ids)


# ---- hooks


@pytest.mark.parametrize("backward", [False, True])
def test_hooks_of_modules_as_torch(backward: bool):
    """Those of a part fire once a device, those of the wrapper once."""
    fired = []
    for torchs in (False, True):
        module, log = made(CASES["layer-norm"], DEVICES[1]), []
        with running(torchs):
            shim: Any = wrapped(torchs, module, (1, 0, 3))
            for part, name in ((module[1], "part"), (shim, "wrapper")):

                def note(_: Any, before: Any, after: Any, name: str = name, log: Any = log) -> None:
                    log.append((name, str(before[0] is not None and before[0].device), len(after[0])))

                (part.register_full_backward_hook if backward else part.register_forward_hook)(note)
            shim(ROWS.clone().requires_grad_()).sum().backward()
        fired.append(sorted(log))
    assert fired[0] == fired[1]
    assert Counter(name for name, *_ in fired[0]) == {"part": 3, "wrapper": 1}


def test_hooks_of_parameters_as_torch():
    """They see the gradient of all replicas, once."""
    seen: list[list[Any]] = [[], []]
    for torchs in (False, True):
        layer = nn.Linear(3, 2, device=DEVICES[1], dtype=torch.float64)
        layer.load_state_dict({"weight": there[:2], "bias": there[0, :2]})
        layer.weight.register_hook(seen[torchs].append)
        layer.weight.register_post_accumulate_grad_hook(lambda p, log=seen[torchs]: log.append(p.grad))
        with running(torchs):
            out = wrapped(torchs, layer, (1, 0, 3))(ROWS)
            out.square().sum().backward(retain_graph=True)
            out.square().sum().backward()
    assert len(seen[0]) == 4
    assert_same(*seen)


def test_inputs_that_forward_writes_to():
    """As in torch: a chunk that is on its device is a part of the caller's tensor."""
    module = doing(lambda self, x: x.mul_(2) * self.weight)
    results = []
    for by in (by_torch, by_fdp):
        x = ROWS.clone().to(DEVICES[1])
        with torch.no_grad():
            results.append([x, by(module, x)])
    assert_same(*results)


# ---- gradients of gradients, calls side by side


def penalty(call: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    (grad,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_a_gradient_penalty(order: Any, form: Any):
    """As in torch."""
    results = []
    for torchs in (False, True, None):
        module, x = made(CASES["tied"], first_of(order)), ROWS.to(DEVICES[1]).requires_grad_()
        if torchs is None:
            results.append(penalty(lambda x, module=module: module(x.to(first_of(order))), module, x))
        else:
            with running(torchs):
                results.append(penalty(form(torchs, module, order), module, x))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_gradients_of_functional_call():
    module = made(CASES["layer-norm"], DEVICES[1])
    shim = fdp.DataParallel(module, [1, 0, 3])

    def loss(params: Any, call: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(call, params, (x,)).square().sum()

    params = {name: p.detach() for name, p in module.named_parameters()}
    want = torch.func.grad(loss)(params, module, ROWS.to(DEVICES[1]))
    got = torch.func.grad(loss)({f"module.{name}": p for name, p in params.items()}, shim, ROWS)
    assert_same({name.removeprefix("module."): grad for name, grad in got.items()}, want)


def test_calls_from_several_threads():
    module = made(CASES["layer-norm"], DEVICES[1])
    shim = fdp.DataParallel(module, [1, 0, 3])
    want = module(ROWS.to(DEVICES[1])).detach()

    def work(i: int) -> None:
        with torch.set_grad_enabled(i % 2 == 0), torch.accelerator.device_index(i % 4):
            assert_same(shim(ROWS * 1).detach(), want)
            assert torch.accelerator.current_device_index() == i % 4

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))


# ---- where modules, inputs and outputs are


WRONG = (
    r"module must have its parameters and buffers on device {} \(device_ids\[0\]\) but found one of them on device: {}$"
)


@pytest.mark.parametrize("order", [None, (0, 1), (1, 0), (1,)], ids=str)
@pytest.mark.parametrize("second", [CPU, *DEVICES[:2]], ids=str)
@pytest.mark.parametrize("first", [CPU, *DEVICES[:2]], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_a_module_on_the_wrong_device(form: Any, order: Any, first: torch.device, second: torch.device):
    """As in torch: not before the call, so that the module may move after wrapping."""
    want = first_of(order)
    for torchs in (False, True):
        torch.manual_seed(0)
        layers = nn.Linear(3, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        right = nn.Sequential(*layers).eval()(ROWS)
        module = nn.Sequential(layers[0].to(first), layers[1].to(second))
        with running(torchs):
            call = form(torchs, module, order)
            moved = form is wrapped and order == (1,)
            if not moved and {first, second} != {want}:
                found = next(tensor.device for tensor in module.state_dict().values() if tensor.device != want)
                with pytest.raises(RuntimeError, match=WRONG.format(want, found)):
                    call(ROWS)
                (call if form is wrapped else module).to(want)
            out = call(ROWS)
        assert out.device == want
        assert_same(out.cpu(), right)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("source", [CPU, *DEVICES], ids=str)
def test_gradients_land_where_the_inputs_are(order: Any, source: torch.device):
    x, y = ROWS.clone().to(source).requires_grad_(), ROWS.clone().requires_grad_()
    module = doing(lambda self, x, y: x * y * self.weight).to(first_of(order))
    out = fdp.DataParallel(module, order)(x, y=y)
    out.sum().backward()
    assert out.device == first_of(order)
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.device, y.grad.device, module.weight.grad.device) == (source, CPU, first_of(order))
    assert_same([x.grad.cpu(), y.grad], [ROWS * numbers(3)] * 2)


TARGETS: dict[str, Any] = {"int": 3, "name": "virtual:2", "device": DEVICES[1], "cpu": "cpu", "cpu-device": CPU}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("ids", [[0, 1], DEVICES[:2], ["virtual:0", DEVICES[1]], range(2), [0]], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_devices_in_all_their_forms(form: Any, ids: Any, target: Any):
    module, x = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), ROWS.clone().requires_grad_()
    call = form(False, module, ids, output_device=target)
    want = DEVICES[3] if target == 3 else torch.device(target)
    if form is wrapped:
        assert call.device_ids == [0, 1][: len(ids)]
        assert call.output_device == (CPU if want == CPU else want.index)
        assert call.src_device_obj == DEVICES[0]
    out = call(x)
    assert out.device == want
    assert_same(out.cpu(), module(there).cpu())
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.device == CPU


@pytest.mark.parametrize("ids", [["cpu", "virtual:1"], ["virtual:1", "cpu"], ["virtual:0", "cpu", 1, CPU]], ids=str)
@pytest.mark.parametrize("case", ["linear", "mlp", "buffers", "nest", "lstm", "several"])
def test_the_cpu_among_the_devices(case: str, ids: Any):
    """Torch takes devices of one kind only."""
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        nn.DataParallel(nn.Linear(1, 1), ids)
    first, virtual = torch.device(ids[0]), (0, 1, 2, 3)[: len(ids)]
    module = made(CASES[case], first)
    got = ran(fdp.DataParallel(module, ids), CASES[case], module)
    want = ran_by(True, wrapped, CASES[case], virtual, CPU)
    assert on(got.output) == {first}
    assert on(got.state) <= {first}
    assert_same(to(list(got), CPU), to(list(want), CPU))


def test_components_on_several_devices():
    outputs: list[Any] = [Point(there, ROWS.to(DEVICES[1])), Point(ROWS.to(DEVICES[2]), there)]
    for target in (0, 3, "cpu"):
        got, want = beside("gather")(outputs, target)
        assert_same(got, want)
        assert on(got) == {CPU if target == "cpu" else DEVICES[target]}


@pytest.mark.parametrize("ids", [[0], [2], ["cpu"]], ids=str)
def test_the_constructor_moves_the_module_to_the_one_device(ids: Any):
    module = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), ids).module
    assert {tensor.device for tensor in module.state_dict().values()} == {CPU if ids == ["cpu"] else DEVICES[ids[0]]}
    several = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), [0, 2])
    assert {tensor.device for tensor in several.state_dict().values()} == {DEVICES[1]}


def devices_seen(rows: int, order: Any, **options: Any) -> list[int]:
    module = Where().to(first_of(order))
    return fdp.DataParallel(module, order, **options)(numbers(rows))[:, 0].int().tolist()


def test_devices_without_rows_do_nothing():
    assert devices_seen(2, None) == [0, 1]
    assert devices_seen(5, None) == [0, 1, 2]  # 2, 2, 1
    assert devices_seen(1, (3, 0)) == [3]
    shim = fdp.DataParallel(doing(lambda self, x: x * self.weight))
    with record_copies() as log:
        shim(ROWS[:2])
    assert {copied.target for copied in log} == {DEVICES[0], DEVICES[1]}


WEIGHTS: dict[str, tuple[tuple[float, ...], list[int]]] = {
    "balanced": ((1, 1, 1), [2, 0, 3]),
    "not-the-first": ((0, 1, 1), [0, 3]),
    "only-the-last": ((0, 0, 1), [3]),
    "only-the-first": ((1, 0, 0), [2]),
    "uneven": ((3, 0, 1), [2, 3]),
}


@pytest.mark.parametrize(("weights", "seen"), WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("case", ["linear", "buffers", "layer-norm", "nest", "lstm"])
def test_weights(weights: Any, seen: list[int], case: str):
    order = (2, 0, 3)
    assert devices_seen(7, order, weights=weights) == seen
    got = ran_by(False, wrapped, CASES[case], order, CPU, weights=weights)
    want = ran_by(False, wrapped, CASES[case], order[:1], CPU)
    assert_same(got, want)
    assert on(got.state) <= {DEVICES[2]}


def test_buffers_of_the_first_replica_with_rows():
    module, alone = made(CASES["mlp"], DEVICES[2]), made(CASES["mlp"], CPU)
    fdp.DataParallel(module, (2, 0, 3), weights=(0, 1, 1))(ROWS)
    alone(ROWS[:4])
    assert on(dict(module.state_dict())) == {DEVICES[2]}
    assert_same({key: value.cpu() for key, value in module.state_dict().items()}, dict(alone.state_dict()))


@pytest.mark.parametrize("weights", [None, (0, 1, 3)], ids=str)
def test_the_mean_of_buffers(weights: Any):
    module, buffers = made(CASES["mlp"], DEVICES[2]), []
    counts = (3, 3, 2) if weights is None else (2, 6)
    for rows in ROWS.split(counts):
        alone = made(CASES["mlp"], CPU)
        alone(rows)
        buffers.append(dict(alone.named_buffers()))
    fdp.DataParallel(module, (2, 0, 3), weights=weights, buffers="mean")(ROWS)
    assert {buffer.device for buffer in module.buffers()} == {DEVICES[2]}
    for name in ("1.running_mean", "1.running_var"):
        mean = sum(n / 8 * each[name] for n, each in zip(counts, buffers, strict=True))
        assert_same(module.get_buffer(name).cpu(), mean)
    assert module[1].num_batches_tracked.item() == 1


def test_copies_of_the_wrapper():
    shim: Any = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), [1, 0], output_device="cpu", weights=(1, 3))
    want = shim(ROWS)
    for other in (copy.deepcopy(shim), pickle.loads(pickle.dumps(shim))):
        assert (other.device_ids, other.output_device, other.src_device_obj) == ([1, 0], CPU, DEVICES[1])
        assert on(dict(other.state_dict())) == {DEVICES[1]}
        assert other.module[0].weight is not shim.module[0].weight
        assert_same(other(ROWS), want)
        with torch.no_grad():
            other.module[0].weight.zero_()
        assert not torch.equal(other(ROWS), want)


# ---- copies that are used again


def moved(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """The parameters that a call copies, and what it returns."""
    with fdp.transfers() as log:
        out = call()
    assert log
    return [transfer.path for transfer in log if transfer.path.startswith("module.")], out


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data": lambda layer: layer.weight.data.mul_(2),
    "data-item": lambda layer: layer.weight.data[0, 0].add_(1e-9),
    "other-data": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "in-place": lambda layer: layer.weight.add_(1),
    "init": lambda layer: nn.init.ones_(layer.weight),
    "swapped-values": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "swapped-signs": lambda layer: layer.weight.data[0].mul_(-1) + layer.weight.data[1].mul_(-1),
    "other-parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.data.clone() + 1)),
    "load": lambda layer: layer.load_state_dict({"weight": there[:2] + 1, "bias": there[0, :2]}),
    "assign": lambda layer: layer.load_state_dict({"weight": there[:2] + 1, "bias": there[0, :2]}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_are_made_again_after_a_change(change: Any, frozen: bool):
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    layer.load_state_dict({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.arange(2.0)})
    shim = fdp.DataParallel(layer.requires_grad_(not frozen), [0, 1, 2])
    with torch.set_grad_enabled(frozen):
        assert moved(lambda: shim(ROWS))[0] == ["module.weight", "module.bias"] * 2
        assert moved(lambda: shim(ROWS))[0] == []
        with torch.no_grad():
            change(layer)
            layer.requires_grad_(not frozen)
        paths, out = moved(lambda: shim(ROWS))
        assert_same(out.detach(), layer(there).detach())
        assert "module.weight" in paths
        assert not moved(lambda: shim(ROWS))[0]


def test_copies_for_other_devices():
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    with torch.no_grad():
        for order in ([0, 1], [0, 2, 1], [0, 0], ["virtual:0", "cpu"]) * 2:
            for shim in (fdp.DataParallel(layer, order), function(False, layer, order)):
                assert_same(shim(ROWS), layer(there))
            layer.weight.mul_(1.5)
    inference, training = (fdp.DataParallel(layer, [0, 1]) for _ in range(2))
    with torch.inference_mode():
        assert_same(inference(ROWS), layer(there))
    training(ROWS).sum().backward()
    assert layer.weight.grad is not None
    inference(ROWS).sum().backward()  # its copies were made in inference mode


def test_copies_that_forward_writes_to():
    """As in torch: what a replica does to its parameters is lost, but for the first."""

    def halve_elsewhere(self: Any, x: Tensor) -> Tensor:
        if x.device != DEVICES[0]:
            self.weight.data.mul_(0.5)
        return x * self.weight

    for by in (by_torch, by_fdp):
        module = doing(halve_elsewhere)
        shim = fdp.DataParallel(module, [0, 1])
        with torch.no_grad():
            for _ in range(2):
                out = shim(ROWS) if by is by_fdp else by_torch(module, ROWS)
                factors = torch.tensor([[1.0]] * 4 + [[0.5]] * 4, dtype=torch.float64)
                assert_same(out.cpu(), ROWS * numbers(3) * factors)


def test_copies_after_a_step_of_an_optimizer():
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    shim = fdp.DataParallel(layer, [0, 1])
    optimizer = torch.optim.SGD(shim.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        paths, out = moved(lambda: shim(ROWS))
        assert paths == ["module.weight", "module.bias"]  # they have a part in the gradient
        assert_same(out, layer(there))
        out.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert moved(lambda: shim(ROWS))[0] == ["module.weight", "module.bias"]
            assert_same(shim(ROWS), layer(there))
            assert moved(lambda: shim(ROWS))[0] == []


def test_frozen_parameters_are_copied_once_in_training():
    module = made(CASES["mlp"], DEVICES[1])
    module[0].requires_grad_(False)
    shim = fdp.DataParallel(module, [1, 0])
    frozen, trained = ["module.0.weight", "module.0.bias"], ["module.1.weight", "module.1.bias", "module.3.weight"]
    buffers = [f"module.{name}" for name in dict(module.named_buffers())]
    for i in range(3):
        paths, out = moved(lambda: shim(ROWS))
        assert sorted(paths) == sorted([*(frozen if i == 0 else []), *trained, "module.3.bias", *buffers])
        out.sum().backward()


def test_inputs_and_outputs_move_all_the_same():
    shim = fdp.DataParallel(nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), [0, 1], output_device="cpu")
    with torch.no_grad():
        shim(ROWS)
        with fdp.transfers() as log, record_copies() as real:
            shim(ROWS)
    assert [(t.path, t.nbytes, t.target) for t in log] == [
        *(("inputs[0]", 4 * 3 * 8, device) for device in DEVICES[:2]),
        *[("output", 4 * 2 * 8, CPU)] * 2,
    ]
    answer = Copied(2, DEVICES[0], CPU)  # whether the two parameters are as they were
    assert Counter(tuple(t[1:]) for t in log) == Counter(tuple(copied) for copied in real if copied != answer)


@cases
@pytest.mark.parametrize("options", [{"output_device": 3}, {"buffers": "mean"}, {"weights": (0, 1, 1)}], ids=str)
@vectors
def test_every_copy_of_a_call_is_in_the_log(case: Case, options: Any):
    module, args, kwargs = made(case, DEVICES[2]), *to((case.inputs(), case.kwargs()), DEVICES[1])
    shim = fdp.DataParallel(module, (2, 0, 1), dim=case.dim, **options)
    with fdp.transfers() as log, record_copies() as real:
        shim(*args, **kwargs)
    assert Counter(tuple(t[1:]) for t in log) == Counter(map(tuple, real))
    assert all(t.path.startswith(("module.", "inputs[", "kwargs[", "output")) for t in log)


# ---- bytes


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("source", [CPU, DEVICES[0]], ids=str)
def test_the_bytes_of_a_step_of_training(count: int, source: torch.device):
    """As many as torch moves, or fewer."""
    moved: dict[bool, int] = {}
    for torchs in (False, True):
        log: list[Copied] = []
        module, x = made(CASES["mlp"], DEVICES[0]), ROWS.clone().to(source).requires_grad_()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with running(torchs):
            call = wrapped(torchs, module, range(count))
            for _ in range(2):
                with record_copies() as log:
                    call(x).square().mean().backward()
                    optimizer.step()
            moved[torchs] = sum(copied.nbytes for copied in log)
    params, buffers = (sum(t.nbytes for t in ts) for ts in (module.parameters(), module.buffers()))
    inputs = ROWS.nbytes if source == CPU else ROWS.nbytes * (count - 1) // count
    outputs = 8 * 2 * 8 * (count - 1) // count
    assert moved[True] == (count - 1) * (2 * params + buffers) + 2 * inputs + 2 * outputs
    assert moved[False] <= moved[True]


@pytest.mark.parametrize("name", ["linear", "tied", "parameter-list", "buffers", "lstm", "several", "nest", "complex"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 2, 3)], ids=str)
def test_the_bytes_of_other_modules(name: str, order: Any):
    """As many as torch moves, or fewer."""
    moved = []
    for torchs in (False, True):
        with record_copies() as log:
            ran_by(torchs, wrapped, CASES[name], order, CPU)
        moved.append(sum(copied.nbytes for copied in log))
    assert moved[0] <= moved[1]
