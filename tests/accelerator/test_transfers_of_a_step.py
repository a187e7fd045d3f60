"""What a training step moves between devices, as formulas. `benchmarks/transfers.py` has those of a large network."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.common.numbers import numbers
from tests.common.virtual import record_copies, traffic

DEVICES = [torch.device("virtual", i) for i in range(4)]
CPU = torch.device("cpu")
ROWS, LOSS = 7, 8  # bytes of a number
BATCH = numbers(ROWS, 3), torch.arange(ROWS) % 2

counts = pytest.mark.parametrize("n", [2, 4])
executors = pytest.mark.parametrize("executor", ["sequential", "threads"])


def problem(width: int = 8) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    apply, (params, _) = fdp.functional(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double())

    def loss(params: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(apply((params, {}), x)[0], y)

    return loss, {name: param.detach().to(DEVICES[0]) for name, param in params.items()}


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def moved(step: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """Bytes for each name in the log, without the indices and keys behind it, and what the step returns."""
    with record_copies() as real, fdp.transfers() as log:
        out = step()
    assert traffic(log) == traffic(real)
    found: Counter[str] = Counter()
    for transfer in log:
        host = transfer.source == CPU
        assert host or DEVICES[0] in (transfer.source, transfer.target)
        found["batch" if host else transfer.path.partition("[")[0]] += transfer.nbytes
    return dict(found), out


@counts
@executors
@pytest.mark.parametrize("width", [8, 10_000])  # small tensors travel together, large ones alone
def test_with_state_on_its_devices_only_gradients_and_the_batch_move(n: int, executor: Any, width: int):
    loss, params = problem(width)

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        grads, value = fdp.pmean(torch.func.grad_and_value(loss)(params, batch), weight="rows")
        momentum = {name: 0.9 * m + grads[name] for name, m in momentum.items()}
        return ({name: p - 0.1 * momentum[name] for name, p in params.items()}, momentum), value

    state = fdp.replicate((params, {name: torch.zeros_like(p) for name, p in params.items()}), DEVICES[:n])
    for _ in range(2):
        found, (state, _) = moved(
            lambda: fdp.parallel_apply(step, state, fdp.scatter(BATCH, DEVICES[:n]), executor=executor)  # noqa: B023
        )
        assert found == {"batch": nbytes(BATCH), "pmean": 2 * (n - 1) * (nbytes(params.values()) + LOSS)}


@counts
@executors
def test_with_parameters_on_one_device_they_and_their_gradients_move(n: int, executor: Any):
    loss, params = problem()
    found, _ = moved(lambda: fdp.value_and_grad(loss, devices=DEVICES[:n], executor=executor)(params, BATCH))
    assert found == {
        "args": (n - 1) * nbytes(params.values()),
        "batch": nbytes(BATCH),
        "grad of args": (n - 1) * nbytes(params.values()),
        "loss": (n - 1) * LOSS,
    }


@counts
@executors
def test_the_gradient_of_a_replicated_moves_as_that_of_the_loop(n: int, executor: Any):
    loss, params = problem()
    copies = fdp.replicate(params, DEVICES[:n])
    found, _ = moved(lambda: fdp.value_and_grad(loss, executor=executor)(copies, BATCH))
    assert found == {
        "batch": nbytes(BATCH),
        "grad of args": 2 * (n - 1) * nbytes(params.values()),
        "loss": (n - 1) * LOSS,
    }
