"""fdp beside DistributedDataParallel, with the same processes over gloo on this machine, in turns, as ratios.

The five models of `benchmarks.peers`, 1,000 leaves of 1,000 numbers, and 24 million parameters in six layers. `alone`
is the same call of fdp on one slot of one process, without a mesh: what is left after it is what the processes cost.

    python benchmarks/mesh.py [processes] [rounds] [model ...]
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fdp

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers.models import SPECS, build
from benchmarks.peers.report import cores

BURST = 0.02  # seconds that a measurement should last


class ManyLeaves(nn.Module):
    """A sum of squares of its parameters: hardly anything but leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(torch.ones(1000)) for _ in range(1000)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * p).sum() for p in self.leaves]).sum() * x.mean(1)


def six_layers() -> nn.Module:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())])


MORE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1,000 leaves": (ManyLeaves, (8, 3)),
    "24 M parameters": (six_layers, (16, 2048)),
}


def contenders(name: str, mesh: Any) -> dict[str, Callable[[], Any]]:
    """A step of each, with the rows of this process."""
    torch.manual_seed(0)
    if name in MORE:
        make, shape = MORE[name]
        model, other, batch = make(), make(), [torch.randn(shape)]
    else:
        (model, *batch), other = build(name), build(name)[0]
    own = [part.tensor_split(len(mesh.slots))[mesh.rank].clone() for part in batch]
    apply, state = fdp.functional(model)

    def loss(params: Any, buffers: Any, x: torch.Tensor, *y: torch.Tensor) -> torch.Tensor:
        return criterion(apply((params, buffers), x)[0], *y)

    def criterion(out: torch.Tensor, *y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y[0]) if y else out.mean()

    def step_on(devices: Any) -> Callable[[], Any]:
        step = fdp.value_and_grad(loss, in_dims=(None, None, *[0] * len(own)), devices=devices)
        return lambda: step(*state, *own)

    wrapped = nn.parallel.DistributedDataParallel(other, forward_sync_buffers=False, gradient_as_bucket_view=True)

    def ddp() -> torch.Tensor:
        wrapped.zero_grad()
        value = criterion(wrapped(own[0]), *own[1:])
        value.backward()
        return value.detach()

    return {"fdp": step_on(mesh), "ddp": ddp, "alone": step_on(mesh.devices)}


def measure(name: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds a step of each, round by round, in this process; all processes measure together."""
    torch.set_num_threads(max(1, cores() // count))
    with fdp.distributed.init() as mesh:
        runs = contenders(name, mesh)
        for run in runs.values():
            for _ in range(3):
                run()
        start = time.perf_counter()
        runs["ddp"]()
        own = torch.tensor(time.perf_counter() - start)
        slowest = fdp.dp_apply(lambda _, x: x.max(), None, own[None], mesh, out_dims="max").item()
        repeats = max(1, round(BURST / slowest))
        times: dict[str, list[float]] = {name: [] for name in runs}
        order, shuffle = list(runs), random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for contender in order:
                runs[contender]()
                start = time.perf_counter()
                for _ in range(repeats):
                    runs[contender]()
                times[contender].append((time.perf_counter() - start) / repeats)
        return times


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    print(f"{'':<18}{'fdp, ms':>10}{'DDP, ms':>10}{'alone, ms':>11}{'fdp / DDP':>11}")
    for name in sys.argv[3:] or [*SPECS, *MORE]:
        times = fdp.distributed.launch(measure, count, name, rounds, count, start_method="fork", timeout=900)[0]
        each = [statistics.median(times[key]) * 1e3 for key in ("fdp", "ddp", "alone")]
        ratio = statistics.median(a / b for a, b in zip(times["fdp"], times["ddp"], strict=True))
        print(f"{name:<18}{each[0]:10.2f}{each[1]:10.2f}{each[2]:11.2f}{ratio:11.2f}", flush=True)


if __name__ == "__main__":
    main()
