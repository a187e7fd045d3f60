"""What a psum over two slots of the CPU costs, beside additions of the same size.

Targets: a tree of 28 MB within 1.5 times one torch.add of that size with all cores; 1,000 tiny tensors within 3 times
one flat add. OMP_WAIT_POLICY=passive keeps the threads of torch's pools from disturbing each other between the runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from _measure import medians

import fdp

ROUNDS = 30


def psum(trees: Any, executor: Any) -> Callable[[], Any]:
    both = fdp.Replicated(trees, fdp.virtual_devices(2))
    return lambda: fdp.parallel_apply(fdp.psum, both, executor=executor)


def nothing(trees: Any, executor: Any) -> Callable[[], Any]:
    both = fdp.Replicated(trees, fdp.virtual_devices(2))
    return lambda: fdp.parallel_apply(lambda tree: None, both, executor=executor)


def each(one: list[torch.Tensor], other: list[torch.Tensor]) -> Any:
    """What has to be done in any case: a sum of two trees that both slots can write to."""
    total = [a + b for a, b in zip(one, other, strict=True)]
    return total, [x.clone() for x in total]


def main() -> None:
    for name, sizes in (("28 MB", [4_000_000, 2_000_000, 1_000_000]), ("1,000 tensors", [10] * 1000)):
        trees = tuple([torch.randn(n) for n in sizes] for _ in range(2))
        a, b = (torch.cat(tree) for tree in trees)
        contenders: dict[str, Callable[[], Any]] = {
            "torch.add": lambda a=a, b=b: torch.add(a, b),
            "a sum for each": lambda trees=trees: each(*trees),
        }
        for executor in ("sequential", "threads"):
            contenders[f"psum, {executor}"] = psum(trees, executor)
            contenders[f"nothing, {executor}"] = nothing(trees, executor)
        found = medians(contenders, rounds=ROUNDS)
        for contender, seconds in found.items():
            print(f"{name:15} {contender:22} {seconds * 1e3:8.2f} ms {seconds / found['torch.add']:8.2f} of torch.add")


if __name__ == "__main__":
    main()
