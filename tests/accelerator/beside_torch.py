"""The same call by torch.nn.DataParallel and by fdp, with all that can be compared of it."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parallel import scatter_gather
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map_only

import fdp
from tests.accelerator.torch_copies import torch_copies
from tests.common.comparing import assert_close_tree
from tests.common.containers import Pixel, Point, tensors_of
from tests.common.numbers import numbers

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
        self.cell = nn.RNN(3, 2, batch_first=True)

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
    "rnn": Case(Recurrent, lambda: (numbers(5, 2, 3),)),
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


class Where(nn.Module):
    """Tells the devices that it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(1))
        self.register_buffer("mean", numbers(1))

    def forward(self, x: Tensor) -> Tensor:
        devices = [x.device.index, self.weight.device.index, self.mean.device.index]
        return torch.tensor([[*devices, torch.accelerator.current_device_index()]], device=x.device)


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
