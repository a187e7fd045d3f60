"""The digits at three scales: one device, several, or several in each of many processes, with one loss curve.

    python examples/digits_mesh.py
    python examples/digits_mesh.py --devices 4
    torchrun --nproc-per-node 2 examples/digits_mesh.py --devices 2

The three differ in nothing but the mesh. All processes go through the same batches, and each works on its rows of
them; gradients and metrics are those of the whole batch, everywhere. With `--checkpoints DIR` a run that was ended, or
killed, goes on from the last checkpoint, also at another scale. The losses of all steps agree within 1e-9.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from digits import Tensors, accuracy, digits, network, sgd, shuffled, steps_an_epoch, whole
    from torch import Tensor

    import fdp
except ImportError as error:
    sys.exit(f'digits_mesh.py: {error}. To install what the example needs: pip install ".[demo]"')


def train(mesh: fdp.distributed.Mesh, options: argparse.Namespace) -> list[float]:
    """Return the loss of every step, from the first on."""
    (images, labels), test = digits(torch.float64, options.seed)
    torch.manual_seed(options.seed)  # the same start in all processes
    apply, (params, buffers) = fdp.functional(network().double())
    state: Any = {"params": params, "momentum": {name: torch.zeros_like(p) for name, p in params.items()}, "losses": []}
    checkpoints = fdp.distributed.Checkpoints(options.checkpoints, mesh=mesh) if options.checkpoints else None
    first, state = (checkpoints and checkpoints.restore()) or (0, state)
    if first:
        say(mesh, f"going on from step {first}")

    def loss(params: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        logits, _ = apply((params, buffers), images)
        return F.cross_entropy(logits, labels)

    value_and_grad = fdp.value_and_grad(loss, devices=mesh)
    batches = shuffled(images, labels, options.batch_size, options.epochs, options.seed)
    for step, batch in enumerate(islice(batches, first, None), first + 1):
        value, grads = value_and_grad(state["params"], *mesh.local(batch))
        params, momentum = sgd(state["params"], state["momentum"], grads)
        state = {"params": params, "momentum": momentum, "losses": [*state["losses"], value.item()]}
        if step % steps_an_epoch(options) == 0:
            say(mesh, f"step {step:4}: loss {value:.4f}")
        if checkpoints is not None and step % options.every == 0:
            checkpoints.save(step, state)

    def correct(params: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        return accuracy(apply((params, buffers), images)[0], labels)

    score = fdp.dp_apply(correct, state["params"], mesh.local(test), mesh, out_dims="mean")
    say(mesh, f"{score:.1%} of the test images")
    return state["losses"]


def say(mesh: fdp.distributed.Mesh, text: str) -> None:
    """Print, in one of the processes."""
    if mesh.rank == 0:
        print(text, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="digits_mesh.py",
        usage="%(prog)s [options]",
        description="Train a network on handwritten digits, on any number of devices in any number of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=whole(1, 1024), default=1, metavar="N", help="virtual CPU devices of each process")
    add("--epochs", type=whole(1, 10_000), default=5, metavar="N", help="times through the training images")
    add("--batch-size", type=whole(1, 1437), default=100, metavar="N", help="images a step, of all processes together")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="start, split and order of the images")
    add("--checkpoints", type=Path, metavar="DIR", help="where checkpoints are written, and looked for at the start")
    add("--every", type=whole(1, 10**6), default=10, metavar="N", help="steps from one checkpoint to the next")
    add("--losses", type=Path, metavar="PATH", help="a file for the losses of all steps, one a line")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds that a process waits for the others")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # threads gain nothing on images this small
    with fdp.distributed.init(devices=fdp.virtual_devices(options.devices), timeout=options.timeout) as mesh:
        say(mesh, str(mesh))
        losses = train(mesh, options)
        if options.losses is not None and mesh.rank == 0:
            options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
