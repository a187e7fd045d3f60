"""What `randomness="rows"` costs: a step of a transformer with dropout, beside `"different"`, and the drawing alone.

A gradient function that is made anew in each step, for its seed, is beside one that is made once.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from _measure import medians
from torch import Tensor, nn
from torch.nn import functional as F

import fdp

SLOTS = (1, 2, 4)


def step(slots: int, randomness: Any) -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    apply, state = fdp.functional(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply((params, buffers), x)[0].square().mean()

    whole = (None, None, 0)
    run = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), in_dims=whole, seed=1, randomness=randomness)
    x = torch.randn(64, 32, 64)
    return lambda: run(*state, x)


def draws(slots: int, randomness: Any) -> Callable[[], object]:
    """Little else than drawing: 20 masks for a large tensor."""

    def function(params: None, x: Tensor) -> Tensor:
        for _ in range(20):
            x = F.dropout(x, 0.1)
        return x

    x, devices = torch.randn(64, 64, 256), fdp.virtual_devices(slots)
    return lambda: fdp.dp_apply(function, None, x, devices, seed=1, randomness=randomness)


def seeds() -> dict[str, Callable[[], object]]:
    """A step of little work, with a gradient function that is made once, or for each seed."""
    w, x, numbers = torch.randn(64, 64), torch.randn(256, 64), itertools.count()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(x @ w, 0.1).square().mean()

    def made(seed: int) -> Callable[..., object]:
        return fdp.value_and_grad(loss, devices=fdp.virtual_devices(2), seed=seed)

    once = made(0)
    return {"once": lambda: once(w, x), "for each seed": lambda: made(next(numbers))(w, x)}


def main() -> None:
    torch.set_num_threads(1)
    times = medians(seeds(), rounds=300)
    print("a gradient function made " + ", ".join(f"{name}: {t * 1e6:.0f} us a step" for name, t in times.items()))
    for name, make, rounds in (("a transformer", step, 15), ("drawing", draws, 10)):
        cases = {f"{k} {kind}": make(k, kind) for k in SLOTS for kind in ("different", "rows")}
        times = medians(cases, rounds=rounds)
        for k in SLOTS:
            plain, rows = times[f"{k} different"], times[f"{k} rows"]
            print(f"{name}, {k} slots: {plain * 1e3:.1f} ms, by rows {rows * 1e3:.1f} ms, {rows / plain:.2f} times")


if __name__ == "__main__":
    main()
