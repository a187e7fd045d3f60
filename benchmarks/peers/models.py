"""The five models of the comparison with peers, their batches, and what their gradients must be."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 10
Figures = tuple[float, dict[str, torch.Tensor]]  # the loss, and the gradient of each parameter by its name


class Encoder(nn.Module):
    """Two transformer layers, the mean over the sequence, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, length, 128) -> (rows, classes)
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, length, 64) -> (rows, classes)
        return self.head(self.lstm(x)[1][0][-1])


def mlp(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES))


@dataclasses.dataclass(frozen=True)
class Spec:
    """How to make a model, the shape of its batch, whether a row's output depends on the other rows, and how exact.

    Equal maxima in a pooling window share the gradient in JAX, while torch gives it to the first.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    normalises: bool = False
    tolerance: float = 2e-4


SPECS = {
    "small MLP": Spec(lambda: mlp(64, 128), (256, 64)),
    "wide MLP": Spec(lambda: mlp(1024, 2048), (256, 1024)),
    "CNN": Spec(cnn, (128, 3, 32, 32), normalises=True, tolerance=2e-2),
    "transformer": Spec(Encoder, (64, 32, 128)),
    "LSTM": Spec(Recurrent, (128, 32, 64)),
}


def build(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model and its batch: the same numbers in every process."""
    torch.manual_seed(0)
    spec = SPECS[name]
    return spec.make(), torch.randn(spec.shape), torch.randint(CLASSES, spec.shape[:1])


def loss_and_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One forward and backward in plain torch."""
    loss = F.cross_entropy(model(x), y)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def oracle(name: str, parts: int) -> Figures:
    """The mean over equal parts of the batch; the parts are normalised each by itself."""
    model, x, y = build(name)
    found = [
        loss_and_gradients(model, *part) for part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
    ]
    grads = [torch.stack(each).mean(0) for each in zip(*(grads for _, grads in found), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    return torch.stack([loss for loss, _ in found]).mean().item(), dict(zip(names, grads, strict=True))


def first_part(name: str, parts: int) -> Figures:
    """The same for the first part alone."""
    model, x, y = build(name)
    loss, grads = loss_and_gradients(model, x.tensor_split(parts)[0], y.tensor_split(parts)[0])
    return loss.item(), {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True)}
