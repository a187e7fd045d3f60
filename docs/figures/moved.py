"""What is copied between devices if the model is copied in each forward, and if state stays where it is: counted.

`python docs/figures/moved.py` draws `moved.svg`; with `--json` it prints what it has counted. It needs a process of its
own: a virtual accelerator, once installed, stays.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from fdp.testing._virtual_tensor import record_copies
from tests.accelerator.torch_copies import torch_copies

fdp.testing.install_virtual_accelerator(8)

WIDTH, ROWS, CLASSES = 256, 32, 10
DEVICES = (2, 4, 8)
WAYS = ("nn.DataParallel", "fdp, parameters passed", "fdp, state on its devices")
FIRST = torch.device("virtual", 0)
Copies = list[Any]


class Moved(NamedTuple):
    """Between accelerators, in bytes over those of the parameters, and how many copies that were."""

    parameters: float
    gradients: float
    other: float
    copies: int


def network() -> nn.Module:
    """Three layers, on the first device."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    ).to(FIRST)


def nn_data_parallel(devices: list[torch.device], batch: tuple[Tensor, Tensor], train: bool) -> Counter[str]:
    """Torch's own, with stand-ins for what its build for GPUs has in C++; `fdp.transfers` does not see it."""
    model, (x, y) = network(), batch
    with torch_copies(), torch.set_grad_enabled(train):
        with record_copies() as there:
            out = nn.DataParallel(model, devices)(x)
            loss = F.cross_entropy(out, y.to(FIRST))
        with record_copies() as back:
            if train:
                loss.backward()
    # Parameters leave the first device in the forward, gradients come to it in the backward.
    kinds = [("parameters" if copied.source == FIRST else "other", copied) for copied in there]
    kinds += [("gradients" if copied.target == FIRST else "other", copied) for copied in back]
    return counted(kinds)


def parameters_passed(devices: list[torch.device], batch: tuple[Tensor, Tensor], train: bool) -> Counter[str]:
    """Parameters on the first device go to the others in every call."""
    apply, loss, params = problem()
    if train:
        return seen(lambda: fdp.value_and_grad(loss, devices=devices)(params, batch))
    return seen(lambda: fdp.dp_apply(apply, (params, {}), batch[0], devices))


def state_on_devices(devices: list[torch.device], batch: tuple[Tensor, Tensor], train: bool) -> Counter[str]:
    """Every device has all parameters, and updates its own."""
    apply, loss, params = problem()
    copies, shards = fdp.replicate(params, devices), fdp.scatter(batch, devices)

    def step(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        grads = fdp.pmean(torch.func.grad(loss)(params, batch))
        return {name: p - 0.1 * grads[name] for name, p in params.items()}

    if train:
        return seen(lambda: fdp.parallel_apply(step, copies, shards))
    return seen(lambda: fdp.dp_apply(lambda params, x: apply((params, {}), x)[0], copies, batch[0], devices))


def problem() -> tuple[Any, Callable[..., Tensor], dict[str, Tensor]]:
    """The network as a function, and its loss."""
    apply, (params, _) = fdp.functional(network())

    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(apply((params, {}), batch[0])[0], batch[1])

    return apply, loss, params


def seen(step: Callable[[], Any]) -> Counter[str]:
    """What `fdp.transfers` has seen of a step, by its paths: and that it has seen all."""
    with record_copies() as real, fdp.transfers() as log:
        step()
    assert between(log) == between(real)
    kinds = {"args[0]": "parameters", "params": "parameters", "grad of": "gradients", "pmean": "gradients"}
    named = [(next((kind for start, kind in kinds.items() if t.path.startswith(start)), "other"), t) for t in log]
    # Small tensors travel together: one copy, and a line in the log for each.
    found = counted(named)
    found["copies"] = counted([("other", copied) for copied in real])["copies"]
    return found


def between(copies: Sequence[Any]) -> Counter[Any]:
    """Bytes by source and target."""
    found: Counter[Any] = Counter()
    for copied in copies:
        found[copied.source, copied.target] += copied.nbytes
    return found


def counted(copies: Copies) -> Counter[str]:
    """Bytes by their kind, and the number of copies; without what comes from the host."""
    found: Counter[str] = Counter()
    for kind, copied in copies:
        if copied.source.type != "cpu":
            found[kind] += copied.nbytes
            found["copies"] += 1
    return found


def moved() -> dict[str, dict[str, list[Moved]]]:
    """For a training step and for a forward alone, in each way, on 2, 4 and 8 devices."""
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    size = sum(p.nbytes for p in network().parameters())
    found: dict[str, dict[str, list[Moved]]] = {}
    for what, train in (("a training step", True), ("a forward alone", False)):
        found[what] = {}
        for name, way in zip(WAYS, (nn_data_parallel, parameters_passed, state_on_devices), strict=True):
            counts = [way([torch.device("virtual", i) for i in range(n)], batch, train) for n in DEVICES]
            found[what][name] = [
                Moved(*(count[kind] / size for kind in Moved._fields[:3]), count["copies"]) for count in counts
            ]
    return found


def draw() -> None:
    """A panel for a step and one for a forward, a group of bars for each number of devices."""
    from _style import BLUE, INK, MUTED, ORANGE, SKY, figure, light, plain

    found = moved()
    colours = {"nn.DataParallel": ORANGE, "fdp, parameters passed": SKY, "fdp, state on its devices": BLUE}
    with figure("moved", 4.4, columns=2) as (whole, axes):
        for axis, (what, ways) in zip(axes, found.items(), strict=True):
            for place, (name, each) in enumerate(ways.items()):
                for group, count in enumerate(each):
                    x = group + (place - 1) * 0.27
                    label = name if group == 0 and axis is axes[0] else None
                    axis.bar(x, count.parameters, 0.25, color=colours[name], label=label)
                    bottom = count.parameters
                    axis.bar(x, count.gradients, 0.25, bottom=bottom, color=light(colours[name]))
                    top = count.parameters + count.gradients
                    axis.annotate(
                        str(count.copies),
                        (x, top),
                        (0, 3),
                        textcoords="offset points",
                        ha="center",
                        color=INK,
                        fontsize=9,
                    )
            axis.set_xticks(range(len(DEVICES)), DEVICES)
            axis.set_xlabel("devices", color=INK)
            axis.set_title(what, loc="left", color=INK, fontsize=11, fontweight="bold")
            axis.set_ylim(0, 15.5)
            plain(axis, grid="y")
        axes[0].set_ylabel("bytes copied, in sizes of the model", color=INK)
        whole.supxlabel(
            "Full colour: parameters. Light: gradients. Number above: how many copies.\n"
            "The batch and the outputs are left out of the bars.",
            fontsize=9,
            color=MUTED,
        )
        whole.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK)


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(json.dumps(moved()))
    else:
        draw()
