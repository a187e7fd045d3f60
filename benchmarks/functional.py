"""What a functional call costs over calling the module: fdp.functional beside torch.func.functional_call.

A 12-layer transformer with 144 parameter tensors, without gradients, one thread. Target: at most a fifth of what
torch.func.functional_call adds.
"""

import torch
from _measure import medians
from torch import nn

import fdp


def main() -> None:
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    apply, state = fdp.functional(model)
    params, x = state[0], torch.randn(2, 4, 32)
    contenders = {
        "the module itself": lambda: model(x),
        "fdp.functional": lambda: apply(state, x),
        "fdp.functional_call": lambda: fdp.functional_call(model, params, (x,)),
        "torch.func.functional_call": lambda: torch.func.functional_call(model, params, (x,)),
    }
    with torch.no_grad():
        times = medians(contenders, rounds=400)
    plain = times["the module itself"]
    theirs = times["torch.func.functional_call"] - plain
    print(f"{len(params)} parameter tensors")
    for name, seconds in times.items():
        added = seconds - plain
        print(f"{name:28} {seconds * 1e6:8.1f} us  adds {added * 1e6:7.1f} us, {added / theirs:6.1%} of torch.func's")


if __name__ == "__main__":
    main()
