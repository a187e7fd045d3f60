"""Handwritten digits, learned on one device and on several: the same numbers.

A small network is trained twice from the same start on the same batches: on one device, then with every batch split
over several virtual CPU devices. A progress bar shows each run, a table compares them, and a picture lays one loss
curve on the other. In float64 the trained parameters differ by rounding alone, although the last batch of an epoch
has 37 images and four devices cannot share 37 evenly; if they differ by more, the exit status is 1.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

try:
    import torch
    import torch.nn.functional as F
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    import fdp
except ImportError as error:
    sys.exit(f'digits.py: {error}. To install what the demo needs: pip install ".[demo]"')
except KeyboardInterrupt:  # these imports take a second or more
    print("digits.py: stopped", file=sys.stderr)
    sys.exit(130)

TRAIN, TEST = 1437, 360  # images
TOLERANCE = 1e-9  # in float64; rounding alone stays a million times below

Tensors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]  # images and labels


class Run(NamedTuple):
    devices: Sequence[torch.device]
    params: Tensors
    history: list[tuple[float, float]]  # loss and accuracy of every step
    test_accuracy: float
    seconds: float


def train(apply: Callable, state: tuple[Tensors, Tensors], batches: Iterable[Batch], devices: Sequence[torch.device]):
    """Return the parameters after the last batch, and the loss and accuracy of every step."""
    params, buffers = state

    def loss(params: Tensors, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = apply((params, buffers), images)
        return F.cross_entropy(logits, labels), accuracy(logits, labels)

    loss_and_grads = fdp.value_and_grad(loss, has_aux=True, devices=devices)
    momentum = {name: torch.zeros_like(param) for name, param in params.items()}
    history = []
    for images, labels in batches:
        (value, correct), grads = loss_and_grads(params, images, labels)
        params, momentum = sgd(params, momentum, grads)
        history.append((value.item(), correct.item()))
    return params, history


def sgd(params: Tensors, momentum: Tensors, grads: Tensors, *, lr: float = 0.05) -> tuple[Tensors, Tensors]:
    momentum = {name: 0.9 * momentum[name] + grads[name] for name in params}
    return {name: params[name] - lr * momentum[name] for name in params}, momentum


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels).to(logits.dtype).mean()  # (rows, classes), (rows,) -> ()


def network() -> nn.Module:
    # Smooth throughout: ReLU and max pooling can turn a difference in the last bit into another choice, which grows.
    # GroupNorm and not BatchNorm, which would see the statistics of a shard.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),  # (rows, 1, 8, 8) -> (rows, 32, 8, 8)
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),  # -> (rows, 64, 4, 4)
        nn.GroupNorm(4, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def digits(dtype: torch.dtype, seed: int) -> tuple[Batch, Batch]:
    """Return training and test images with their labels: real ones, which come with scikit-learn."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.to(dtype).reshape(-1, 1, 8, 8) / 16
    train, test = torch.randperm(TRAIN + TEST, generator=torch.Generator().manual_seed(seed)).split([TRAIN, TEST])
    return (images[train], labels[train]), (images[test], labels[test])


def shuffled(images: Tensor, labels: Tensor, size: int, epochs: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(size):
            yield images[rows], labels[rows]


def run(devices: Sequence[torch.device], options: argparse.Namespace, console: Console) -> Run:
    dtype = getattr(torch, options.dtype)
    (images, labels), (test_images, test_labels) = digits(dtype, options.seed)
    torch.manual_seed(options.seed)  # the same start
    apply, (params, buffers) = fdp.functional(network().to(dtype))
    batches = shuffled(images, labels, options.batch_size, options.epochs, options.seed)
    bar = track(batches, f"{count(devices):>12}", options.epochs * steps_an_epoch(options), console=console)
    start = time.perf_counter()
    params, history = train(apply, (params, buffers), bar, devices)
    seconds = time.perf_counter() - start
    logits, _ = fdp.dp_apply(apply, (params, buffers), test_images, devices)
    return Run(devices, params, history, accuracy(logits, test_labels).item(), seconds)


def steps_an_epoch(options: argparse.Namespace) -> int:
    return -(-TRAIN // options.batch_size)


def count(devices: Sequence[torch.device]) -> str:
    return f"{len(devices)} device{'s' * (len(devices) > 1)}"


def shares(rows: int, devices: Sequence[torch.device]) -> str:
    sizes = [len(shard) for shard in fdp.scatter(torch.empty(rows), devices).shards]
    return "+".join(map(str, sizes) if len(sizes) <= 6 else (f"{n}x{size}" for size, n in Counter(sizes).items()))


def table(runs: Sequence[Run], options: argparse.Namespace) -> Table:
    result = Table(caption="Loss and training accuracy: mean over the last epoch")
    for heading in ("", "Loss", "Training\naccuracy", "Test\naccuracy", "Seconds"):
        result.add_column(heading, justify="right")
    result.add_column("Rows a slot", overflow="fold")
    for run in runs:
        loss, correct = torch.tensor(run.history[-steps_an_epoch(options) :]).mean(dim=0).tolist()
        rows = shares(options.batch_size, run.devices)
        if last := TRAIN % options.batch_size:
            rows += f",\nlast batch {shares(last, run.devices)}"
        figures = f"{loss:.4f}", f"{correct:.1%}", f"{run.test_accuracy:.1%}", f"{run.seconds:.1f}"
        result.add_row(count(run.devices), *figures, rows)
    return result


def draw(one: Run, many: Run, path: Path) -> None:
    losses, others = ([loss for loss, _ in run.history] for run in (one, many))
    steps = range(1, len(losses) + 1)
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.set_title(f"Handwritten digits: the loss on {count(one.devices)} and on {count(many.devices)}")
    above.semilogy(steps, losses, color="#f4b183", linewidth=5, marker=".", label=count(one.devices))
    above.semilogy(steps, others, color="#1f3864", linewidth=1.2, linestyle="--", label=count(many.devices))
    above.set_ylabel("loss of the batch")
    above.legend()
    below.axhline(0, color="#f4b183", linewidth=2)
    below.plot(steps, [b - a for a, b in zip(losses, others, strict=True)], color="#1f3864", linewidth=0.8)
    below.set(xlabel="step", ylabel="difference")
    for panel in (above, below):
        panel.margins(x=0.02)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(path)


def whole(low: int, high: int, why: str = "") -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}{why}, got {text!r}")

    return parse


def picture(text: str) -> Path:
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, got {text!r}")
    return writable(text)


def writable(text: str) -> Path:
    """Check that the file can be written: better now than after the training."""
    path = Path(text)
    try:
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink(missing_ok=True)  # another process may have looked, too
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="digits.py",
        usage="%(prog)s [options]",
        description="Train a network on handwritten digits, on one device and on several, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=whole(1, 1024), default=4, metavar="N", help="virtual CPU devices of the second run")
    add("--epochs", type=whole(1, 10_000), default=20, metavar="N", help="times through the training images")
    batch_size = whole(1, TRAIN, " (all training images)")
    add("--batch-size", type=batch_size, default=100, metavar="N", help=f"images a step, of {TRAIN}")
    add("--dtype", choices=("float32", "float64"), default="float64", help="of images and parameters")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="start, split and order of the images")
    add("--output", type=picture, default="demo.png", metavar="PATH", help="where the picture goes")
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # threads gain nothing on images this small, and wait for each other on busy cores
    console = Console()
    one, many = (run(fdp.virtual_devices(n), options, console) for n in (1, options.devices))
    draw(one, many, options.output)
    console.print(table((one, many), options))
    difference = torch.stack([(one.params[name] - many.params[name]).abs().max() for name in one.params]).max().item()
    print(f"Largest difference between the parameters of the two runs: {difference:.1e}")
    print(f"Loss curves: {options.output}")
    if options.dtype == "float64" and not difference <= TOLERANCE:
        print(f"digits.py: they disagree: {difference:.1e} is more than {TOLERANCE:.0e} in float64", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        return compare(options)
    except KeyboardInterrupt:
        print("digits.py: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
