"""The calls of the soak test: ways through the public API, each with its oracle, and a fault on demand."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import fdp

VARIANTS, ROWS, WIDTH, CLASSES = 6, 23, 16, 5
RAN = {"by callers": 0, "by workers": 0}  # shards
_COUNTING = threading.Lock()
Marks = torch.Tensor  # one flag a row: the shard that has a set one fails


class Fault(Exception):
    """Raised on purpose."""


class Kind(NamedTuple):
    """A way through the API: `run(variant, devices, marks)`, and what each variant must give."""

    name: str
    run: Callable[[int, Sequence[str | torch.device], Marks], Any]
    right: list[Any]


def kinds() -> list[Kind]:
    """All ways. They share their parameters, batches and one module, as threads of one program would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES)).double()
    apply, (example, buffers) = fdp.functional(model)
    every = [{k: torch.randn_like(v) for k, v in example.items()} for _ in range(VARIANTS)]
    batches = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(VARIANTS)]
    labels = [torch.randint(CLASSES, (ROWS,)) for _ in range(VARIANTS)]

    def logits(params: Any, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        _fail_if(marks)
        return torch.tanh(x @ params["0.weight"].T + params["0.bias"]) @ params["2.weight"].T + params["2.bias"]

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor, marks: Marks) -> torch.Tensor:
        return F.cross_entropy(logits(params, x, marks), y)

    def inner(params: Any, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        devices = fdp.virtual_devices(2)
        return fdp.dp_apply(logits, params, (x, marks), devices, executor="threads", axis_name="inner")

    def step(params: Any, batch: tuple[torch.Tensor, torch.Tensor, Marks]) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, *batch)
        return {k: params[k] - 0.1 * grads[k] for k in params}, value

    def modular(state: Any, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        _fail_if(marks)
        return apply(state, x)[0]

    def run_apply(i: int, devices: Any, marks: Marks) -> Any:
        return fdp.dp_apply(logits, every[i], (batches[i], marks), devices, executor="threads")

    def run_gradient(i: int, devices: Any, marks: Marks) -> Any:
        both = fdp.value_and_grad(loss, devices=devices, executor="threads")
        return both(every[i], batches[i], labels[i], marks)

    def run_parallel(i: int, devices: Any, marks: Marks) -> Any:
        params = fdp.replicate(every[i], devices)
        batch = fdp.scatter((batches[i], labels[i], marks), devices)
        stepped, values = fdp.parallel_apply(step, params, batch, executor="threads")
        weights = batch.sizes
        return fdp.gather(stepped, "mean", weights=weights), fdp.gather(values, "mean", weights=weights)

    def run_nested(i: int, devices: Any, marks: Marks) -> Any:
        return fdp.dp_apply(inner, every[i], (batches[i], marks), devices, executor="threads")

    def run_module(i: int, devices: Any, marks: Marks) -> Any:
        state = (every[i], buffers)
        return fdp.dp_apply(modular, state, (batches[i], marks), devices, executor="threads")

    clear = torch.zeros(ROWS, dtype=torch.bool)
    whole = [logits(every[i], batches[i], clear) for i in range(VARIANTS)]
    first = [torch.func.grad_and_value(loss)(every[i], batches[i], labels[i], clear)[::-1] for i in range(VARIANTS)]
    second = [step(every[i], (batches[i], labels[i], clear)) for i in range(VARIANTS)]
    return [
        Kind("dp_apply", run_apply, whole),
        Kind("value_and_grad", run_gradient, first),
        Kind("parallel_apply", run_parallel, second),
        Kind("nested dp_apply", run_nested, whole),
        Kind("functional", run_module, whole),
    ]


def _fail_if(marks: Marks) -> None:
    """Fail where the mark is, and count who runs the shard."""
    with _COUNTING:
        RAN["by workers" if threading.current_thread().name.startswith("fdp") else "by callers"] += 1
    # Under a transform the mark is a plain tensor all the same: it is not differentiated.
    if marks.any():
        raise Fault("on purpose")


def is_close(found: Any, right: Any) -> bool:
    """Whether a tree of float64 tensors is the oracle's, up to sums in another order."""
    try:
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)
    except AssertionError:
        return False
    return True
