"""What the sum of gradients over two processes costs, by size and number of leaves, beside one all_reduce of that size.

Two processes over gloo on this machine, one slot each. The loss is a sum of squares of the parameters, so that hardly
anything else is measured; `alone` is the same call on one slot of one process.
"""

from typing import Any

import torch
from _measure import medians
from torch import distributed as dist

import fdp

ROUNDS = 30
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
LEAVES = (1, 10, 100, 1_000)


def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(p * p).sum() for p in params]).sum() * x.mean()


def measure(size: int, leaves: int) -> dict[str, float]:
    """Median seconds in this process, which all processes measure together."""
    torch.set_num_threads(1)
    with fdp.distributed.init() as mesh:
        params = [torch.ones(size // leaves) for _ in range(leaves)]
        x, flat = torch.ones(4), torch.ones(size)
        over = fdp.value_and_grad(loss, devices=mesh)
        alone = fdp.value_and_grad(loss, devices=mesh.devices)
        calls: dict[str, Any] = {
            "fdp": lambda: over(params, x),
            "alone": lambda: alone(params, x),
            "all_reduce": lambda: dist.all_reduce(flat),
        }
        return medians(calls, rounds=ROUNDS)


def main() -> None:
    print(f"{'numbers':>12}{'leaves':>8}{'fdp, ms':>12}{'alone, ms':>12}{'all_reduce, ms':>16}")
    for size, leaves in [(size, 1) for size in SIZES] + [(1_000_000, leaves) for leaves in LEAVES[1:]]:
        found = fdp.distributed.launch(measure, 2, size, leaves, start_method="fork", timeout=300)[0]
        times = [found[name] * 1e3 for name in ("fdp", "alone", "all_reduce")]
        print(f"{size:12,}{leaves:8}{times[0]:12.2f}{times[1]:12.2f}{times[2]:16.2f}")


if __name__ == "__main__":
    main()
