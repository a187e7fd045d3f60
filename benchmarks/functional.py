"""What a functional call costs over calling the module: fdp.functional beside torch.func.functional_call.

A 12-layer transformer with 144 parameter tensors, without gradients, one thread. Target: at most a fifth of what
torch.func.functional_call adds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import medians
from torch import nn

import fdp

TARGET, BLOCK = 0.2, 10


def main() -> None:
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    # Torch computes faster with tensors that require gradients. All are to compute with the same kind.
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).requires_grad_(False)
    apply, state = fdp.functional(model)
    params, x = state[0], torch.randn(2, 4, 32)
    contenders: dict[str, Callable[[], Any]] = {
        "the module itself": lambda: model(x),
        "fdp.functional": lambda: apply(state, x),
        "fdp.functional_call": lambda: fdp.functional_call(model, params, (x,)),
        "torch.func.functional_call": lambda: torch.func.functional_call(model, params, (x,)),
    }
    with torch.no_grad():
        times = medians({name: partial(_block, run) for name, run in contenders.items()}, rounds=60)
    plain = times["the module itself"]
    theirs = times["torch.func.functional_call"] - plain
    print(f"{len(params)} parameter tensors, medians of blocks of {BLOCK} calls")
    for name, seconds in times.items():
        added, each = seconds - plain, seconds / BLOCK * 1e6
        print(f"{name:28} {each:8.1f} us  adds {added / BLOCK * 1e6:7.1f} us, {added / theirs:6.1%} of torch.func's")
    ratio = (times["fdp.functional"] - plain) / theirs
    print(f"fdp.functional adds {ratio:.2f} of what torch.func.functional_call adds; target: at most {TARGET}")


def _block(run: Callable[[], Any]) -> None:
    for _ in range(BLOCK):
        run()


if __name__ == "__main__":
    main()
