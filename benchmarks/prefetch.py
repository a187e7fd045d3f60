"""What `prefetch` hides: an epoch whose loader waits as long as a step computes, with and without it.

The loader sleeps, as one that reads from a disk or a network does, and the step is a forward and backward on two slots
of the CPU. `both` is the sum of loading and computing, which a plain loop takes; `longer` what no loop can beat.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from _measure import medians
from torch.nn import functional as F

import fdp

BATCHES, DEVICES = 20, fdp.virtual_devices(2)


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.tanh(x @ params["w"]) @ params["v"], y)


def main() -> None:
    torch.manual_seed(0)
    params = {"w": torch.randn(512, 512) / 20, "v": torch.randn(512, 10)}
    x, y = torch.randn(512, 512), torch.randint(10, (512,))
    step = fdp.value_and_grad(loss, devices=DEVICES)
    took = medians({"step": lambda: step(params, x, y)}, rounds=20)["step"]

    def loader() -> Iterator[Any]:
        for _ in range(BATCHES):
            time.sleep(took)
            yield x, y

    def plain() -> None:
        for batch in loader():
            step(params, *batch)

    def ahead() -> None:
        for batch in fdp.prefetch(loader(), DEVICES):
            step(params, *batch.unzip())

    found = medians({"plain": plain, "prefetch": ahead}, rounds=9, warmup=1)
    print(f"{BATCHES} batches, each {took * 1e3:.1f} ms to load and as long to compute")
    for name, seconds in {"both": 2 * took * BATCHES, **found, "longer": took * BATCHES}.items():
        print(f"{name:10} {seconds * 1e3:7.0f} ms")


if __name__ == "__main__":
    main()
