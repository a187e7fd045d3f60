"""Modules to run under DataParallel, and what it means to be like one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters()]


def loss_of(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (out * numbers(*out.shape, dtype=out.dtype)).abs().square().sum()


def run(model: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
    """The value, and the gradients in inputs and parameters, None where there is none."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = model(*leaves)
    wanted = [tensor for tensor in [*leaves, *module.parameters()] if tensor.requires_grad]
    grads = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    return (out[0] if isinstance(out, tuple) else out).detach(), grads


IN_PLACE = "executor='threads': the function calls a module that can only be called in place"


def assert_like_one_device(module: nn.Module, *inputs: Tensor, slots: int = 3, **options: Any) -> None:
    """Values and gradients, in whatever way the replicas run, of two calls."""
    want = run(module, module, *inputs)
    executors: list[Any] = ["sequential", "auto", "threads"]
    for executor in executors:
        shim = DataParallel(module, ["cpu"] * slots, executor=executor, **options)
        with many_cores():
            for _ in range(2):
                assert_close_tree(run(shim, module, *inputs), want)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, 2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1).expand(-1, 5, -1) * torch.arange(1, 6).reshape(-1, 1))[0]


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 2)).double()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.options)


class Apply(nn.Module):
    """A module of a function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def value_and_grads(run: Callable[..., Tensor], module: nn.Module, *inputs: Tensor) -> Any:
    """The value, and the gradients in inputs and parameters of a loss that no two elements enter alike."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    wanted = [*leaves, *module.parameters()]
    grads = torch.autograd.grad((out * numbers(*out.shape)).sum(), wanted, materialize_grads=True)
    return out.detach(), grads


def outputs_of(fn: Callable[..., Any], *args: Any, slots: int = 2, **options: Any) -> Any:
    return DataParallel(Apply(fn), ["cpu"] * slots, **options)(*args)
