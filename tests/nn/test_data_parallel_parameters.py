"""Parameters of replicas, and modules of all kinds, under DataParallel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fdp import DataParallel
from tests.common.numbers import numbers
from tests.nn.modules_of_data_parallel import Recurrent, assert_like_one_device, mlp

TWO = ["cpu", "cpu"]


def test_parameters_are_there_inside():
    """Torch's replicas have no parameters."""
    seen: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(([name for name, _ in self.named_parameters()], list(self.state_dict()), self.weight))
            penalty = sum(parameter.square().sum() for parameter in self.parameters())
            return super().forward(input) + penalty

    module = nn.Sequential(Looks(3, 2)).double()
    DataParallel(module, TWO)(numbers(4, 3))
    names = ["weight", "bias"]
    assert [each[:2] for each in seen] == [(names, names)] * 2
    assert len({id(each[2]) for each in seen}) == 2
    assert_like_one_device(module, numbers(4, 3))


def test_frozen_parameters_stay_frozen():
    module, seen = mlp(), []
    module[0].requires_grad_(False)
    module[0].register_forward_hook(lambda module, *_: seen.append(module.weight.requires_grad))
    assert_like_one_device(module, numbers(5, 3))
    assert not any(seen)
    assert module[0].weight.grad is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.b.weight = self.a.weight
        self.shared = nn.ModuleList([self.a, self.a])

    def forward(self, x: Tensor) -> Tensor:
        assert self.a.weight is self.b.weight
        assert self.shared[0] is self.shared[1] is self.a
        return self.b(torch.tanh(self.shared[1](self.shared[0](x))))


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([numbers(3), numbers(3) * 2, numbers(0, 3)])
        self.dict = nn.ParameterDict({"a": numbers(3), "b": numbers(1)})
        self.nothing = nn.Parameter(numbers(0))
        self.register_parameter("none", None)
        self.missing: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert (self.none, self.missing, self.list[2].shape, self.nothing.shape) == (None, None, (0, 3), (0,))
        assert len(list(self.parameters())) == 6
        return torch.tanh(x * self.list[0] + self.list[1]) * self.dict["a"] + self.dict["b"] + self.nothing.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 2, dtype=torch.complex128))
        self.phase: Any = nn.Buffer(numbers(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.is_complex()
        assert self.phase.is_complex()
        return (x.to(torch.complex128) @ self.weight * self.phase).abs()


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        lengths = (10 * x[:, 0].detach().abs()).long() % 3 + 1
        x = x.unsqueeze(1).expand(-1, 5, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)[0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
        self.into = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.into(x).unsqueeze(1).expand(-1, 3, -1))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, padding_idx=0).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 10).long() % 5)


def parametrized() -> nn.Module:
    layer = nn.Linear(3, 3).double()
    parametrizations.weight_norm(layer)
    parametrizations.orthogonal(other := nn.Linear(3, 3).double())
    return nn.Sequential(layer, other)


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(3, 2).double(), "weight", 2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "containers": Containers,
    "complex": Complex,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "packs": Packs,
    "transformer": Attends,
    "embedding": Embeds,
    "parametrized": parametrized,
    "pruned": pruned,
    "graph-module": lambda: torch.fx.symbolic_trace(mlp()),
    "empty": lambda: nn.Sequential(nn.Identity(), nn.ModuleList(), nn.Tanh())[::2],
    "bilinear": lambda: nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.PReLU(3)).double(),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_of_all_kinds(make: Any):
    torch.manual_seed(0)
    module = make()
    for slots in (1, 2, 4):
        assert_like_one_device(module, numbers(7, 3), slots=slots)


def test_parametrizations_may_be_cached_inside_of_forward_only():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = parametrized()

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.part(x) + self.part(2 * x)

    torch.manual_seed(0)
    module = Twice()
    assert_like_one_device(module, numbers(5, 3))
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"inside torch\.nn\.utils\.parametrize\.cached\(\)"):
        DataParallel(module, TWO)(numbers(5, 3))
