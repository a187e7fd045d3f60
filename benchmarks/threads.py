"""Threads of fdp beside two threads of the user's on the same halves, and `"auto"` beside the better executor.

A step is the value and gradient of a model in its parameters, on two slots of the CPU. Targets: threads at most 1.08 of
bare threads on the four larger models and 1.25 on the small one; "auto" at most 1.1 of the better of the two.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _measure import medians
from peers.models import SPECS, build
from torch.nn import functional as F

import fdp

SLOTS = fdp.virtual_devices(2)
THREADS = torch.get_num_threads()


def steps(name: str, pool: ThreadPoolExecutor) -> dict[str, Callable[[], Any]]:
    model, x, y = build(name)
    apply, (params, buffers) = fdp.functional(model)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))

    @fdp.thread_safe
    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply((params, buffers), x)[0], y)

    def half(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)
        own = {name: value.detach().requires_grad_() for name, value in params.items()}
        return torch.autograd.grad(loss(own, *part), list(own.values()))

    def bare() -> list[torch.Tensor]:
        first, second = pool.map(half, halves)
        return [a + b for a, b in zip(first, second, strict=True)]

    def on_slots(executor: Any) -> Callable[[], Any]:
        step = fdp.value_and_grad(loss, devices=SLOTS, executor=executor)

        def run() -> Any:
            torch.set_num_threads(THREADS)
            return step(params, x, y)

        return run

    return {"bare": bare, **{executor: on_slots(executor) for executor in ("threads", "sequential", "auto")}}


def main() -> None:
    print(
        f"{'milliseconds a step':20}{'bare':>10}{'threads':>10}{'in order':>10}{'auto':>10}   threads/bare  auto/better"
    )
    with ThreadPoolExecutor(2) as pool:
        for name in SPECS:
            times = medians(steps(name, pool), rounds=100 if name == "small MLP" else 15, warmup=8)
            each = "".join(f"{1000 * seconds:10.2f}" for seconds in times.values())
            better = min(times["threads"], times["sequential"])
            print(f"{name:20}{each}{times['threads'] / times['bare']:15.2f}{times['auto'] / better:13.2f}")


if __name__ == "__main__":
    main()
