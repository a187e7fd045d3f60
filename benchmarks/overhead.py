"""What dp_apply costs a call, a leaf and a slot, for a function that does nothing.

Target: linear in leaves and slots, under 5 us for each leaf and slot.
"""

from collections.abc import Callable

import torch
from _measure import medians

import fdp

LEAVES, SLOTS = (1, 10, 100), (1, 2, 4, 8)


def identity(_: object, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch


def call(leaves: int, slots: int) -> Callable[[], object]:
    batch, devices = {f"x{i}": torch.ones(64, 4) for i in range(leaves)}, fdp.virtual_devices(slots)
    return lambda: fdp.dp_apply(identity, None, batch, devices)


def main() -> None:
    torch.set_num_threads(1)
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
