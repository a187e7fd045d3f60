"""What moves in a training step of 25 million parameters on 2, 4 and 8 virtual devices, in three ways.

nn.DataParallel is torch's own, with stand-ins for its functions that only a build for GPUs has; value_and_grad has its
parameters on the first device; the loop keeps parameters and momentum on all devices and averages gradients. The batch
comes from the host. Every figure is compared with the formula that it should have, and a difference is an error.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from fdp.testing._virtual_tensor import Copied, record_copies
from tests.accelerator.torch_copies import torch_copies

fdp.testing.install_virtual_accelerator(8)

WIDTH, LAYERS, ROWS = 2048, 6, 64
LOSS = 4  # bytes
FIRST = torch.device("virtual", 0)


class Moved(NamedTuple):
    """Bytes copied to another device. The batch comes from the host; outputs are those of the network, or losses."""

    parameters: int
    batch: int
    outputs: int
    gradients: int


Batch = tuple[Tensor, Tensor]
Kinds = tuple[int, Sequence[tuple[str, Copied | fdp.Transfer]]]
"""How many copies a step makes, and each tensor with the field of `Moved` that it counts for."""


def network() -> nn.Sequential:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(FIRST)


def data_parallel(batch: Batch, devices: list[torch.device]) -> Kinds:
    """Forward and backward have few enough directions that these tell what moves."""
    model, (x, y) = network(), batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch_copies():
        with record_copies() as forward:
            loss = F.cross_entropy(nn.DataParallel(model, devices)(x), y.to(FIRST))
        with record_copies() as backward:
            loss.backward()
            optimizer.step()
    there = [("parameters" if copied.source == FIRST else "outputs", copied) for copied in forward]
    back = [("outputs" if copied.source == FIRST else "gradients", copied) for copied in backward]
    moved = [("batch", copied) if copied.source.type == "cpu" else (kind, copied) for kind, copied in there + back]
    return len(moved), moved


def value_and_grad(batch: Batch, devices: list[torch.device]) -> Kinds:
    loss, params = problem()
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)

    def step() -> None:
        _, grads = fdp.value_and_grad(loss, devices=devices)(params, batch)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()

    return kinds(step)


def loop(batch: Batch, devices: list[torch.device]) -> Kinds:
    """As in docs/migrate/jax.md; the update is in place only because eight devices share the memory of one."""
    loss, params = problem()
    state = fdp.replicate((params, {name: torch.zeros_like(param) for name, param in params.items()}), devices)

    def step(state: Any, batch: Batch) -> Tensor:
        params, momentum = state
        averaged, value = fdp.pmean(torch.func.grad_and_value(loss)(params, batch))
        for name, grad in averaged.items():
            params[name].sub_(momentum[name].mul_(0.9).add_(grad), alpha=0.1)
        return value

    return kinds(lambda: fdp.parallel_apply(step, state, fdp.scatter(batch, devices)))


def problem() -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    apply, (params, _) = fdp.functional(network())

    def loss(params: Any, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(apply((params, {}), x)[0], y)

    return loss, {name: param.detach() for name, param in params.items()}


def kinds(step: Callable[[], Any]) -> Kinds:
    with record_copies() as real, fdp.transfers() as log:
        step()
    if between(log) != between(real):
        raise AssertionError("fdp.transfers() has not seen what was copied")
    return len(real), [
        ("batch" if transfer.source.type == "cpu" else kind(transfer.path), transfer) for transfer in log
    ]


def between(copies: Sequence[Copied | fdp.Transfer]) -> Counter[Any]:
    """Bytes by source and target. Small tensors travel together: one copy, and a line in the log for each."""
    found: Counter[Any] = Counter()
    for copied in copies:
        found[copied.source, copied.target] += copied.nbytes
    return found


def kind(path: str) -> str:
    """What the log of `transfers` calls it tells what it is."""
    names = {"args[0]": "parameters", "loss": "outputs", "grad of args[0]": "gradients", "pmean": "gradients"}
    return next(kind for start, kind in names.items() if path.startswith(start))


def formulas(params: int, batch: int, outputs: int, n: int) -> dict[Callable[..., Kinds], Moved]:
    others = n - 1
    return {
        data_parallel: Moved(others * params, batch, 2 * outputs * others // n, others * params),
        value_and_grad: Moved(others * params, batch, others * LOSS, others * params),
        loop: Moved(0, batch, 0, 2 * others * (params + LOSS)),
    }


NAMES = {data_parallel: "nn.DataParallel", value_and_grad: "value_and_grad", loop: "state on its devices"}


def checked(found: Kinds, formula: Moved) -> None:
    moved = dict.fromkeys(Moved._fields, 0)
    for name, copied in found[1]:
        moved[name] += copied.nbytes
        if name != "batch" and FIRST not in (copied.source, copied.target):
            raise AssertionError(f"{copied} is neither to nor from the first device")
    if Moved(**moved) != formula:
        raise AssertionError(f"{Moved(**moved)} were moved, and not {formula}")


def main() -> None:
    batch = torch.randn(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))
    outputs, tensors = batch[0].nbytes, list(network().parameters())
    params = sum(p.nbytes for p in tensors)
    print(f"{sum(p.numel() for p in tensors):,} parameters in {len(tensors)} tensors, {params / 1e6:.1f} MB; MB moved")
    print(f"{'devices':>8} {'':22}" + "".join(f"{name:>12}" for name in (*Moved._fields, "total", "copies")))
    for n in (2, 4, 8):
        devices = [torch.device("virtual", i) for i in range(n)]
        for way, formula in formulas(params, sum(t.nbytes for t in batch), outputs, n).items():
            found = way(batch, devices)
            checked(found, formula)
            figures = "".join(f"{nbytes / 1e6:12.1f}" for nbytes in (*formula, sum(formula)))
            print(f"{n:8}  {NAMES[way]:21}{figures}{found[0]:12}")


if __name__ == "__main__":
    main()
