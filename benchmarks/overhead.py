"""What a call costs: dp_apply of a function that does nothing, and a gradient step of half a millisecond.

Targets: 60 us a call with one leaf and one slot, 16 in a loop of its own, 7 us for each further slot, 1.6 us a leaf and
slot; a step of a small MLP on two slots in order at most 1.3 of the step in plain torch. Calls of Python, with those of
the function and of torch: 100 in that step, 40 in doing nothing.
"""

import sys
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


def python_calls(run: Callable[[], object]) -> int:
    """How many functions of Python one call of it enters."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(3):
        run()
    sys.setprofile(note)
    run()
    sys.setprofile(None)
    return count


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
    print(f"calls of Python: a step {python_calls(lambda: step(params, x, y))}, nothing {python_calls(call(1, 1))}")
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
    print(
        f"{each * 1e6:.1f} us for each more slot with one leaf; {times['1/1'] * 1e6:.1f} us a call with one slot, ",
        end="",
    )
    print(f"{medians({'alone': call(1, 1)}, rounds=5000)['alone'] * 1e6:.1f} us in a loop")


if __name__ == "__main__":
    main()
