"""Random programs for several devices: layers that are drawn from what GPUs treat otherwise than the CPU does."""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.numbers import numbers

Layer = Callable[[Any, Tensor, Tensor], Tensor]
"""Of parameters, one of their weights and rows: new rows. Rows see each other by their mean alone."""


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Net(nn.Module):
    """If its slots meet, they do between two uses of its parameters."""

    def __init__(self, meets: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.meets = nn.Linear(4, 4), nn.LayerNorm(4), meets

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return self.norm(out - mean(out) if self.meets else out).tanh()


NET, MEETS = Net(False).double(), Net(True).double()


def called(p: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(NET, p["net"], (x,))


def mean(x: Tensor) -> Tensor:
    """That over all rows."""
    try:
        return fdp.pmean(x.mean(0), weight="rows")
    except NameError:  # on one device
        return x.mean(0)


def without_mean(p: Any, w: Tensor, x: Tensor) -> Tensor:
    return x - mean(x @ w)


def hooked(p: Any, w: Tensor, x: Tensor) -> Tensor:
    out = x @ w
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 1.5)
    return out


def failing(p: Any, w: Tensor, x: Tensor) -> Tensor:
    out = x @ w
    if out.requires_grad:
        out.register_hook(fail)
    return out


def fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("planned")


def again(layer: Layer, **options: Any) -> Layer:
    """Computed again in the backward."""

    def checkpointed(p: Any, w: Tensor, x: Tensor) -> Tensor:
        found: Any = checkpoint(lambda x: layer(p, w, x), x, use_reentrant=False, **options)
        return found

    return checkpointed


def plain(p: Any, w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sin()


LAYERS: Mapping[str, Layer] = {
    "linear": plain,
    "sine": lambda p, w, x: x.sin(),
    "function": lambda p, w, x: Square.apply(x) + x @ w,
    "norm": lambda p, w, x: F.layer_norm(x, (4,)),
    "view": lambda p, w, x: x.t().reshape(4, -1).t() * w[0],
    "in place": lambda p, w, x: (x * 1).add_(w[0]),
    "inner grad": lambda p, w, x: x * torch.func.grad(lambda w: (w * w).sum())(w)[0],
    "module": lambda p, w, x: called(p, x),
    "module with a mean": lambda p, w, x: torch.func.functional_call(MEETS, p["net"], (x,)),
    "hook": hooked,
    "checkpoint": again(plain),
    "checkpointed module": again(lambda p, w, x: called(p, x), preserve_rng_state=False),
    "mean": without_mean,
    "checkpointed mean": again(without_mean, preserve_rng_state=False, context_fn=fdp.checkpoint_context),
    "failing": failing,
}
WAYS = ("grads", "grads", "backward", "outputs", "grads outside")


class Program(NamedTuple):
    """Layers and weights of a loss, and how it is called."""

    layers: list[tuple[str, int]]
    rows: int
    devices: list[int]
    way: str
    options: dict[str, Any]

    @classmethod
    def drawn(cls, number: int) -> "Program":
        draw = random.Random(number)
        weights = [0.3 if name == "failing" else 1 for name in LAYERS]
        names = draw.choices(list(LAYERS), weights, k=draw.randint(1, 5))
        count = draw.choice([1, 2, 2, 3, 4])
        devices = draw.choices(range(4), k=count) if draw.random() < 0.3 else list(range(count))
        way = draw.choice(WAYS)
        options: dict[str, Any] = {"executor": draw.choice(["sequential", "sequential", "threads"])}
        if draw.random() < 0.3:
            options["seed"] = number
        if draw.random() < 0.3 and way in WAYS[:3] and not any("mean" in name for name in names):
            options["microbatches"] = draw.randint(1, 3)
        return cls([(name, draw.randint(0, 2)) for name in names], draw.choice([4, 5, 7, 8, 13]), devices, way, options)

    def loss(self, p: Any, x: Tensor) -> Tensor:
        for name, i in self.layers:
            x = LAYERS[name](p, p["w"][i], x)
        return x.square().sum(1).mean() + p["w"][0].sum() * 0

    def error(self) -> Exception | None:
        """What it raises on these devices."""
        names = [name for name, _ in self.layers]
        is_beside = self.options["executor"] == "threads" and len(self.devices) > 1 and "seed" not in self.options
        if is_beside and "checkpoint" in names:  # it looks at the generator that other shards draw from
            return RuntimeError("executor='threads': the function calls torch.get_rng_state")
        return ArithmeticError("planned") if "failing" in names and self.way != "outputs" else None

    def params(self, device: torch.device) -> Any:
        net = {name: numbers(*x.shape).to(device) for name, x in NET.named_parameters()}
        return {"w": [(numbers(4, 4) + i).sin().to(device) / 2 for i in range(3)], "net": net}

    def on(self, devices: list[torch.device]) -> list[Tensor]:
        """The loss, then gradients, but for "outputs"."""
        p, x = self.params(devices[0]), numbers(self.rows, 4).to(devices[0])
        leaves, structure = pytree.tree_flatten(p)
        if self.way == "grads":
            return pytree.tree_leaves(fdp.value_and_grad(self.loss, devices=devices, **self.options)(p, x))
        if self.way == "backward":
            model = nn.ParameterList(leaves)
            loss = lambda model, x: self.loss(pytree.tree_unflatten(list(model), structure), x)  # noqa: E731
            value = fdp.backward(model, loss, devices=devices, **self.options)(x)
            return [value, *(torch.zeros_like(w) if w.grad is None else w.grad for w in model)]
        losses = lambda p, x: self.loss(p, x)[None] * len(x)  # noqa: E731
        if self.way == "outputs":
            return [fdp.dp_apply(losses, p, x, devices, **self.options).sum() / self.rows]
        for leaf in leaves:
            leaf.requires_grad_()
        value = fdp.dp_apply(losses, p, x, devices, **self.options).sum() / self.rows
        grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return [value.detach(), *grads]

    def on_one(self, device: torch.device) -> list[Tensor]:
        """The same without fdp."""
        p, x = self.params(device), numbers(self.rows, 4).to(device)
        leaves = pytree.tree_leaves(p)
        for leaf in leaves if self.way != "outputs" else ():
            leaf.requires_grad_()
        value = self.loss(p, x)
        if self.way == "outputs":
            return [value]
        return [value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)]
