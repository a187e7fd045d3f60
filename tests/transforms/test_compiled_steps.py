"""A whole training step in one graph: five models, on two slots, with the update of SGD and new buffers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.settings import fresh_compiler

SLOTS = fdp.virtual_devices(2)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    before = torch._dynamo.config.allow_rnn
    with fresh_compiler():
        yield
    torch._dynamo.config.allow_rnn = before


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[1][0][-1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(x + self.norm(self.conv(x))).mean((2, 3)))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3)), (8, 4)),
    "CNN": (cnn, (8, 2, 6, 6)),
    "transformer": (Encoder, (8, 3, 4)),
    "LSTM": (Recurrent, (8, 3, 4)),
    "residual": (Residual, (8, 2, 4, 4)),
}


class Training:
    """A model's step, as it is and compiled, and how many graphs were made of it."""

    def __init__(self, name: str, **options: Any) -> None:
        make, self.shape = MODELS[name]
        torch.manual_seed(0)
        apply, self.state = fdp.functional(make().double())
        torch._dynamo.config.allow_rnn = name == "LSTM"
        self.graphs = 0

        def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
            out, new = apply((params, buffers), x)
            return F.cross_entropy(out, y), (new, out)

        dims: Any = {"in_dims": (None, None, 0, 0), "aux_dims": ("mean", 0)}
        step_of = fdp.value_and_grad(loss, has_aux=True, devices=SLOTS, **dims)

        def step(state: Any, x: Tensor, y: Tensor) -> Any:
            params, buffers = state
            (value, (buffers, out)), grads = step_of(params, buffers, x, y)
            return ({key: p - 0.1 * grads[key] for key, p in params.items()}, buffers), value, out

        self.step = step
        settings: Any = {"backend": self.count} | options
        self.compiled = torch.compile(step, fullgraph=True, **settings)

    def count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def batch(self, i: int, rows: int) -> tuple[Tensor, Tensor]:
        return (numbers(*self.shape) * (i + 1)).sin()[:rows], (torch.arange(rows) + i) % 3

    def check(self, rows: list[int]) -> None:
        """The compiled step gives what the step gives, from one state to the next."""
        one, other = self.state, self.state
        for i, count in enumerate(rows):
            batch = self.batch(i, count)
            torch.manual_seed(i)
            one, *want = self.step(one, *batch)
            torch.manual_seed(i)
            other, *got = self.compiled(other, *batch)
            assert_close_tree([other, got], [one, want], rtol=1e-12)


@pytest.mark.deep  # docs/how_to/compile.md shows it, and the next one, with a step of its own
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_batches_of_a_size(name: str):
    training = Training(name)
    training.check([8, 8, 8])
    assert training.graphs == 1


@pytest.mark.deep
@pytest.mark.parametrize(("name", "dynamic"), [("MLP", False), ("CNN", None), ("CNN", True)])
def test_a_shorter_last_batch_is_one_more_graph(name: str, dynamic: Any):
    """Dropout under torch.func has no sizes that are symbols, so `dynamic` has to be False there."""
    training = Training(name, dynamic=dynamic)
    training.check([8, 5, 8, 5])
    assert training.graphs == 2


def test_the_module_is_left_as_it_was():
    """A recurrent module keeps its weights in a list too, which the call binds to others."""
    torch._dynamo.config.allow_rnn = True
    model = nn.LSTM(4, 5, batch_first=True).double()
    before = [id(x) for x in model._flat_weights]
    apply, state = fdp.functional(model)
    x = numbers(2, 3, 4)

    def double(state: Any, x: Tensor) -> Tensor:
        params, buffers = state
        return apply(({key: 2 * p for key, p in params.items()}, buffers), x)[0][0]

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(state, x), double(state, x))
    assert [id(x) for x in model._flat_weights] == before


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["CNN", "residual"])
def test_backends_that_make_code(name: str, backend: str):
    training = Training(name, backend=backend, dynamic=False)
    training.check([8, 8, 5])


def test_containers_without_tensors():
    """The compiler takes a dict without tensors for a constant."""

    def fn(w: Tensor, batch: Any) -> Any:
        return {"x": w * batch["x"] * batch["options"]["scale"], "none": batch["none"]}

    batch = {"x": numbers(4, 2), "options": {"scale": 2.0, "tag": "a"}, "none": {}}
    call = lambda w, batch: fdp.dp_apply(fn, w, batch, SLOTS)  # noqa: E731
    w = numbers(2)
    assert_close_tree(torch.compile(call, fullgraph=True, backend="eager")(w, batch), call(w, batch))
