"""What a psum over two slots of the CPU costs, beside additions of the same size.

Targets: a tree of 28 MB within 1.5 times one torch.add of that size with all cores; 1,000 tiny tensors within 3 times
one flat add.
"""

from collections.abc import Callable
from typing import Any

import torch
from _measure import medians

import fdp

ROUNDS = 30


def psum(tree: Any, executor: Any) -> Callable[[], Any]:
    both = fdp.Replicated((tree, tree), fdp.virtual_devices(2))
    return lambda: fdp.parallel_apply(fdp.psum, both, executor=executor)


def nothing(tree: Any, executor: Any) -> Callable[[], Any]:
    both = fdp.Replicated((tree, tree), fdp.virtual_devices(2))
    return lambda: fdp.parallel_apply(lambda tree: None, both, executor=executor)


def main() -> None:
    large = {f"w{i}": torch.randn(n) for i, n in enumerate([4_000_000, 2_000_000, 1_000_000])}  # 28 MB
    tiny = [torch.randn(10) for _ in range(1000)]
    for name, tree, like in (("28 MB", large, torch.randn(7_000_000)), ("1,000 tensors", tiny, torch.randn(10_000))):
        contenders: dict[str, Callable[[], Any]] = {"torch.add": lambda like=like: torch.add(like, like)}
        for executor in ("sequential", "threads"):
            contenders[f"psum, {executor}"] = psum(tree, executor)
            contenders[f"nothing, {executor}"] = nothing(tree, executor)
        found = medians(contenders, rounds=ROUNDS)
        for contender, seconds in found.items():
            print(f"{name:15} {contender:22} {seconds * 1e3:8.2f} ms {seconds / found['torch.add']:8.2f} of torch.add")


if __name__ == "__main__":
    main()
