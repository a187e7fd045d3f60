"""What a psum over two slots of the CPU costs, beside a loop over the tensors and one addition of the same size.

Targets: one tensor of 28 MB within 1.9 times one torch.add of that size, of which the sum and the copy for the other
slot are 1.7, also in parts that stay in a cache, or on two cores; 1,000 tiny tensors within 3 ms, where a loop
needs 2. OMP_WAIT_POLICY=passive keeps the threads of torch's pools from disturbing each other between the runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import medians

import fdp

ROUNDS = 40
LIMIT = {"28 MB": "1.9 of torch.add", "1,000 tensors": "3 ms", "1,000 matrices": "none"}


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
    shapes: dict[str, Sequence[tuple[int, ...]]] = {"28 MB": [(7_000_000,)], "1,000 tensors": [(10,)] * 1000}
    shapes["1,000 matrices"] = [(2 + i % 3, 2 + i % 5) for i in range(1000)]
    for name, each_shape in shapes.items():
        trees = tuple([torch.randn(shape) for shape in each_shape] for _ in range(2))
        a, b = (torch.cat([x.view(-1) for x in tree]) for tree in trees)
        contenders: dict[str, Callable[[], Any]] = {
            "torch.add": lambda a=a, b=b: torch.add(a, b),
            "a sum and a copy for each": lambda trees=trees: each(*trees),
        }
        for executor in ("sequential", "threads"):
            contenders[f"psum, {executor}"] = psum(trees, executor)
            contenders[f"nothing, {executor}"] = nothing(trees, executor)
        found = medians(contenders, rounds=ROUNDS)
        for contender, seconds in found.items():
            ratio = f"{seconds / found['torch.add']:8.2f} of torch.add"
            target = f", target {LIMIT[name]}" if contender.startswith("psum") else ""
            print(f"{name:15} {contender:26} {seconds * 1e3:8.2f} ms {ratio}{target}")


if __name__ == "__main__":
    main()
