"""What DataParallel adds to the module's own forward, and what it moves between devices.

A 12-layer transformer with 144 parameter tensors on 4 virtual slots of the CPU, one after the other, one thread. The
bytes are those of a training step on the virtual accelerator, beside those of torch.nn.DataParallel's algorithm.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from _measure import medians
from torch import nn

import fdp
from fdp.testing._virtual_tensor import record_copies

SLOTS = 4


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


def times() -> None:
    torch.set_num_threads(1)
    model, x = transformer(), torch.randn(8, 4, 64)
    chunks, slots = x.chunk(SLOTS), ["cpu"] * SLOTS
    shim = fdp.DataParallel(model, slots, executor="sequential")

    def copies() -> list[Any]:
        return [module(chunk) for module, chunk in zip((copy.deepcopy(model) for _ in slots), chunks, strict=True)]

    contenders: dict[str, Callable[[], Any]] = {
        "the module on each chunk": lambda: [model(chunk) for chunk in chunks],
        "fdp.DataParallel": lambda: shim(x),
        "fdp.nn.replicate, then the replicas": lambda: [
            module(chunk) for module, chunk in zip(fdp.nn.replicate(model, slots), chunks, strict=True)
        ],
        "copy.deepcopy for each slot": copies,
    }
    count = len(list(model.parameters()))
    print(f"{count} parameter tensors, {len(list(model.modules()))} modules, {SLOTS} slots: ms a forward, and added ms")
    print(f"{'':36} {'training':>18} {'without gradients':>22}")
    columns = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            columns.append(medians(contenders, rounds=60))
    for name in contenders:
        figures = [(found[name] * 1e3, (found[name] - found["the module on each chunk"]) * 1e3) for found in columns]
        print(f"{name:36} " + "     ".join(f"{total:8.2f} {added:+8.2f}" for total, added in figures))


def moved() -> None:
    fdp.testing.install_virtual_accelerator(8)
    print("\nMB moved between devices in a training step; the batch is on the first device")
    print(f"{'devices':>8} {'fdp':>8} {'torch':>8} {'eval':>8}")
    for count in (2, 4, 8):
        model, x = transformer().to("virtual:0"), torch.randn(64, 4, 64, device="virtual:0")
        shim = fdp.DataParallel(model, list(range(count)))
        step = bytes_of(lambda: shim(x).square().mean().backward())  # noqa: B023
        with torch.no_grad():
            alone = bytes_of(lambda: shim(x))  # noqa: B023
        params = sum(p.nbytes for p in model.parameters())
        # Parameters out and gradients back, for all but the first device; inputs, outputs and the gradients of these.
        theirs = 2 * (count - 1) * params + 3 * x.nbytes * (count - 1) / count
        figures = [nbytes / 1e6 for nbytes in (step, theirs, alone)]
        print(f"{count:8} {figures[0]:8.2f} {figures[1]:8.2f} {figures[2]:8.2f}")


def bytes_of(run: Callable[[], Any]) -> int:
    with record_copies() as log:
        run()
    return sum(copied.nbytes for copied in log)


if __name__ == "__main__":
    times()
    moved()
