"""What a call costs: dp_apply of a function that does nothing, and a gradient step of half a millisecond.

Targets: 25 us a call with one leaf and one slot, 7 us for each further slot, 1.2 us a leaf and slot; a step of a small
MLP on two slots in order at most 1.25 of the step in plain torch.
"""

from collections.abc import Callable

import torch
from _measure import medians
from peers.models import build
from torch.nn import functional as F

import fdp

LEAVES, SLOTS = (1, 10, 100), (1, 2, 4, 8)


def identity(_: object, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch


def call(leaves: int, slots: int) -> Callable[[], object]:
    batch, devices = {f"x{i}": torch.ones(64, 4) for i in range(leaves)}, fdp.virtual_devices(slots)
    return lambda: fdp.dp_apply(identity, None, batch, devices)


def step_times() -> dict[str, float]:
    """Value and gradient of a small MLP: in plain torch, by a loop over two halves, and by fdp on two slots."""
    model, x, y = build("small MLP")
    params = [value.detach() for value in model.parameters()]

    def loss(params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
            x = F.relu(F.linear(x, weight, bias))
        return F.cross_entropy(F.linear(x, *params[-2:]), y)

    def plain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [value.detach().requires_grad_() for value in params]
        return torch.autograd.grad(loss(own, x, y), own)

    def by_hand() -> list[torch.Tensor]:
        first, second = (plain(*half) for half in zip(x.chunk(2), y.chunk(2), strict=True))
        return [a + b for a, b in zip(first, second, strict=True)]

    step = fdp.value_and_grad(loss, devices=fdp.virtual_devices(2), executor="sequential")
    return medians({"plain": lambda: plain(x, y), "by hand": by_hand, "fdp": lambda: step(params, x, y)}, rounds=400)


def main() -> None:
    torch.set_num_threads(1)
    step = step_times()
    print("a step: " + ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in step.items()), end="; ")
    print(f"fdp / plain {step['fdp'] / step['plain']:.2f}, by hand / plain {step['by hand'] / step['plain']:.2f}")
    times = medians({f"{n}/{k}": call(n, k) for n in LEAVES for k in SLOTS}, rounds=200)
    print("microseconds a call" + "".join(f"{k:>8} slots" for k in SLOTS))
    for n in LEAVES:
        print(f"{n:>12} leaves" + " " * 4 + "".join(f"{times[f'{n}/{k}'] * 1e6:14.1f}" for k in SLOTS))
    for k in SLOTS[1:]:
        each = (times[f"{LEAVES[-1]}/{k}"] - times[f"{LEAVES[0]}/{k}"]) / (LEAVES[-1] - LEAVES[0]) / k
        print(f"{k} slots: {each * 1e6:.2f} us a leaf and slot")
    few, many = SLOTS[1], SLOTS[-1]
    each = (times[f"1/{many}"] - times[f"1/{few}"]) / (many - few)
    print(f"{each * 1e6:.1f} us for each more slot with one leaf; {times['1/1'] * 1e6:.1f} us a call with one slot")


if __name__ == "__main__":
    main()
