"""The models of the first hour: one of convolutions with the shape of ResNet-50, and a small GPT."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Task(NamedTuple):
    """A model, its loss, and a batch of so many rows."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    rows: int

    @staticmethod
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        """The mean over rows, or over rows and positions."""
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        sizes = [(width, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        layers = [
            layer
            for a, b, kernel, step in sizes
            for layer in (nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        ]
        self.inside = nn.Sequential(*layers[:-1])
        self.beside = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        if stride == 1 and width == out:
            self.beside = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.beside(x))


def convolutions(width: int, blocks: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-50 for a width of 64 and blocks (3, 4, 6, 3): 161 parameters, 53 batch norms."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for i in range(count):
            layers.append(Bottleneck(before, inner, 2 if i == 0 and stage > 0 else 1))
            before = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Gpt(nn.Module):
    """A decoder of tokens."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        places = torch.arange(length, device=x.device)
        return self.out(self.blocks(self.tokens(x) + self.places(places), mask=mask))


def images(size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (torch.randn(rows, 3, size, size), torch.randint(classes, (rows,)))


def texts(length: int, tokens: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (torch.randint(tokens, (rows, length)), torch.randint(tokens, (rows, length)))


FULL = {
    "ResNet-50": Task(lambda: convolutions(64, (3, 4, 6, 3), 1000), images(224, 1000), 64),
    "GPT": Task(lambda: Gpt(8192, 512, 8, 8, 256), texts(256, 8192), 32),
}
TINY = {
    "ResNet-50": Task(lambda: convolutions(4, (1, 1), 10), images(16, 10), 8),
    "GPT": Task(lambda: Gpt(32, 16, 1, 2, 8), texts(8, 32), 8),
}


def tasks(tiny: bool) -> dict[str, Task]:
    """By name."""
    return TINY if tiny else FULL
