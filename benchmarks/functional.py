"""What a functional call costs over calling the module: fdp.functional beside torch.func.functional_call.

A 12-layer transformer with 144 parameter tensors, and 50 layers with batch norm: 350 tensors, of which 150 are buffers.
Without gradients, one thread. `functional` returns new buffers, so it copies buffers; torch makes no copies, and writes
to the given ones. Each call comes after a forward of another module, as in a program that has other work too. Torch
has a copy of the module: it puts tensors into it, and fdp would look at everything anew.

Target: of what torch.func.functional_call adds at most 0.4 for the first, 0.5 for the second.
"""

import copy
import random
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fdp

ROUNDS = 150


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), torch.randn(2, 4, 32)


def norms() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(50)]
    return nn.Sequential(*layers), torch.randn(4, 8)


def measure(name: str, model: nn.Module, x: torch.Tensor, target: float) -> None:
    model.requires_grad_(False)  # torch computes faster with tensors that do: all are to compute with the same kind
    theirs, other = copy.deepcopy(model), copy.deepcopy(model)
    apply, state = fdp.functional(model)
    tensors, of_theirs = [{**params, **buffers} for _, (params, buffers) in map(fdp.functional, (model, theirs))]
    contenders: dict[str, Callable[[], Any]] = {
        "the module itself": lambda: model(x),
        "fdp.functional": lambda: apply(state, x),
        "fdp.functional_call": lambda: fdp.functional_call(model, tensors, (x,)),
        "torch.func.functional_call": lambda: torch.func.functional_call(theirs, of_theirs, (x,)),
    }
    times: dict[str, list[float]] = {each: [] for each in contenders}
    for _ in range(ROUNDS):
        for each, run in random.sample(list(contenders.items()), len(contenders)):
            other(x)
            start = perf_counter()
            run()
            times[each].append(perf_counter() - start)
    usual = {each: sorted(seconds)[ROUNDS // 4] * 1e6 for each, seconds in times.items()}
    plain = usual["the module itself"]
    print(f"{name}: {len(tensors)} tensors, lower quartiles of {ROUNDS} calls")
    for each, found in usual.items():
        share = (found - plain) / (usual["torch.func.functional_call"] - plain)
        aim = f"; target: at most {target}" if each == "fdp.functional" else ""
        print(f"{each:28} {found:8.1f} us  adds {found - plain:7.1f} us, {share:5.2f} of torch.func's{aim}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        measure("transformer", *transformer(), 0.4)
        measure("batch norm", *norms(), 0.5)
