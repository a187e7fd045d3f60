"""How often the host waits for a device in a step. Nothing runs ahead of the devices while it waits."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.accelerator.double import host_waits
from tests.common.numbers import numbers

DEVICES = fdp.available_devices()
X, Y = numbers(16, 8).to(DEVICES[0]), numbers(16).to(DEVICES[0])
pytestmark = pytest.mark.filterwarnings("ignore:.*batch norm.*")


def mlp(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), norm(8), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(8, 1)).double().to(DEVICES[0])


def waits_of(step: Callable[[], Any]) -> Counter[str]:
    """Of a step that is not the first."""
    step()
    with host_waits.counted() as waits:
        step()
    return Counter({text.split(":")[0]: sum(n for t, n in waits.items() if t.startswith(text)) for text in waits})


def functional_loss(module: nn.Module) -> tuple[Any, Any, Any]:
    apply, (params, buffers) = fdp.functional(module)

    def loss(p: Any, b: Any, x: Tensor, y: Tensor) -> Any:
        out, new = apply((p, b), x)
        return F.mse_loss(out[:, 0], y), new

    return loss, params, buffers


def value_and_grad(norm: Any = nn.LayerNorm, x: Tensor = X, **options: Any) -> Callable[[], Any]:
    loss, params, buffers = functional_loss(mlp(norm))
    dims = {"in_dims": (None, None, 0, 0), "has_aux": True, "aux_dims": "mean"}
    step = fdp.value_and_grad(loss, devices=DEVICES, **dims, **options)
    return lambda: step(params, buffers, x, Y)


def backward(norm: Any = nn.LayerNorm) -> Callable[[], Any]:
    module = mlp(norm)
    step = fdp.backward(module, lambda model, x, y: F.mse_loss(model(x)[:, 0], y), devices=DEVICES)
    return lambda: step(X, Y)


def on_devices(fn: Callable[..., Any]) -> Callable[[], Any]:
    params = fdp.replicate({"w": numbers(8, 8).to(DEVICES[0]), "b": numbers(8).to(DEVICES[0])}, DEVICES)
    batch = fdp.scatter((X, Y), DEVICES)

    def step(p: Any, batch: Any) -> Any:
        x, y = batch
        return fn(torch.func.grad(lambda p: (x @ p["w"] + p["b"]).square().mean())(p), y)

    return lambda: fdp.parallel_apply(step, params, batch)


def columns() -> Callable[[], Any]:
    """A batch in pinned memory whose rows are in dim 1."""
    w, x = numbers(8).to(DEVICES[0]), numbers(8, 16).pin_memory()
    step = fdp.grad(lambda w, x: (w @ x).square().mean(), in_dims=(None, 1), devices=DEVICES)
    return lambda: step(w, x)


def data_parallel() -> Callable[[], Any]:
    module = fdp.DataParallel(mlp(nn.BatchNorm1d), device_ids=list(DEVICES))
    return lambda: module(X).sum().backward()


EQUAL = "item in _placement/check_outputs.py"
STEPS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "value-and-grad": (value_and_grad(), {}),
    "microbatches": (value_and_grad(microbatches=2), {}),
    "seed": (value_and_grad(seed=1), {}),
    "rows": (value_and_grad(seed=1, randomness="rows"), {}),
    "threads": (value_and_grad(executor="threads"), {}),
    "backward": (backward(), {}),
    "parallel-apply": (on_devices(lambda grads, y: grads), {}),
    "pmean": (on_devices(lambda grads, y: fdp.pmean(grads)), {}),
    "data-parallel": (data_parallel(), {}),
    # Each slot looks at its weight once, however many leaves there are.
    "pmean-weight": (
        on_devices(lambda grads, y: fdp.pmean(grads, weight=(y > 0).sum())),
        {"copy to the host in _collectives/mean.py": 4},
    ),
    # A batch of the host is copied to each slot; from pinned memory nobody waits for that.
    "pinned-batch": (value_and_grad(x=X.cpu().pin_memory()), {}),
    "pinned-columns": (columns(), {}),
    "host-batch": (value_and_grad(x=X.cpu()), {"copy from the host in _placement/moves.py": 4}),
    "count": (
        value_and_grad(count=lambda p, b, x, y: (y > 0).sum()),
        {"copy to the host in _transforms/counts.py": 1},  # of all shards at once
    ),
    # Integers under "mean" must be the same in all shards.
    "batch-norm": (value_and_grad(nn.BatchNorm1d), {EQUAL: 1}),
    "backward-batch-norm": (backward(nn.BatchNorm1d), {EQUAL: 1}),
}


@pytest.mark.parametrize("name", STEPS)
def test_how_often_a_step_waits(name: str):
    step, budget = STEPS[name]
    waits = waits_of(step)
    assert not [text for text in waits if waits[text] > budget.get(text, 0)], dict(waits)
