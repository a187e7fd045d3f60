"""The digits, killed again and again, and gone on with on other devices: one loss curve.

A network with dropout, on noisy images in a random order, is trained twice. Once undisturbed on one device. And once
begun on one device and killed by SIGKILL in the middle of a step, gone on with on four slots, killed, on two processes
of two slots, killed, on three slots, killed, and ended on two processes of three slots. A picture lays one loss curve
on the other. In float64 no loss may differ by more than 1e-12; if one does, the exit status is 1.

`train` is all that a program of your own needs. What is below it starts, kills and draws.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import torch
    import torch.nn.functional as F
    from digits import Tensors, digits, network, picture, sgd, whole
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

    import fdp
except ImportError as error:
    sys.exit(f'digits_elastic.py: {error}. To install what the example needs: pip install ".[demo]"')

TOLERANCE = 1e-12  # of each loss, in float64
BATCH, EVERY = 100, 5  # images a step, of all processes together; steps from one checkpoint to the next
LEAST = 10  # steps of each layout
FLOOR = 1e-18  # where the picture has differences of 0, which a log scale does not
# Okabe and Ito's colours: told apart also by people who are colour-blind.
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
GREY, INK = "#cccccc", "#222222"


def train(slots: int, folder: Path, steps: int, seed: int) -> None:
    """Go on from the last checkpoint, if there is one, on whatever slots and processes there are now."""
    (images, labels), _ = digits(torch.float64, seed)
    torch.manual_seed(seed)
    *layers, last = network().children()
    apply, (params, buffers) = fdp.functional(nn.Sequential(*layers, nn.Dropout(0.3), last).double())

    def loss(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        noisy = x + 0.1 * torch.randn_like(x)
        return F.cross_entropy(apply((params, buffers), noisy)[0], y)

    with fdp.distributed.init(devices=fdp.virtual_devices(slots), timeout=60) as mesh:
        checkpoints = fdp.distributed.Checkpoints(folder / "checkpoints", mesh=mesh)
        momentum = {name: torch.zeros_like(param) for name, param in params.items()}
        state: Any = {"params": params, "momentum": momentum, "seed": seed}
        first, state = checkpoints.restore(like=state) or (0, state)
        batches = fdp.Batches(len(images), BATCH, seed=state["seed"])
        loader = batches.loader(TensorDataset(images, labels), mesh, start=first, steps=steps - first)
        for step, (x, y) in enumerate(loader, first):
            seeds = {"seed": fdp.fold_in(state["seed"], step), "randomness": "rows"}
            value, grads = fdp.value_and_grad(loss, devices=mesh, **seeds)(state["params"], x, y)
            params, momentum = sgd(state["params"], state["momentum"], grads)
            state = state | {"params": params, "momentum": momentum}
            write(folder / f"rank-{mesh.rank}", Note(os.getpid(), step, value.item()))
            if (step + 1) % EVERY == 0:
                checkpoints.save(step + 1, state, wait=False)
        checkpoints.wait()


# ---- what was computed, and by whom


class Note(NamedTuple):
    pid: int
    step: int
    loss: float


def write(path: Path, note: Note) -> None:
    with path.open("a") as file:  # at once: who is killed cannot write it later
        file.write(" ".join(map(repr, note)) + "\n")


def notes(path: Path) -> list[Note]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Note(int(pid), int(step), float(loss)) for pid, step, loss in map(str.split, lines)]


# ---- killed, and begun again


class Layout(NamedTuple):
    processes: int
    slots: int

    def __str__(self) -> str:
        alone = f"{self.slots} device{'s' * (self.slots > 1)}"
        return alone if self.processes == 1 else f"{self.processes} × {self.slots}"


class Kill(NamedTuple):
    rank: int
    step: int  # the last one that is to be completed
    after: float  # seconds, into the step after that


def kills(layouts: Sequence[Layout], steps: int, seed: int) -> list[Kill | None]:
    """When each layout but the last is killed: at random, from a seed, and some steps apart."""
    chance, part = random.Random(seed), steps // len(layouts)
    found: list[Kill | None] = []
    for number, on in enumerate(layouts[:-1], 1):
        step = number * part - 1 - chance.randrange(part // 3)
        found.append(Kill(chance.randrange(on.processes), step, chance.uniform(0, 0.02)))
    return [*found, None]


def carry_out(kill: Kill, folder: Path) -> None:
    """Be the process that watches another, and kills it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parent, path, seen = os.getppid(), folder / f"rank-{kill.rank}", []
    before = len(notes(path))
    while not seen or seen[-1].step < kill.step:
        if os.getppid() != parent:
            return
        time.sleep(0.002)
        seen = notes(path)[before:]
    time.sleep(kill.after)
    os.kill(seen[-1].pid, signal.SIGKILL)


def run(on: Layout, folder: Path, steps: int, seed: int, kill: Kill | None) -> list[Note]:
    """Train in new processes until the last step, or until one is killed. Return what process 0 has noted."""
    before = len(notes(folder / "rank-0"))
    with contextlib.ExitStack() as stack:
        if kill is not None:
            killer = multiprocessing.get_context("fork").Process(target=carry_out, args=(kill, folder), daemon=True)
            killer.start()
            stack.callback(killer.join)
            stack.callback(killer.kill)
        try:
            fdp.distributed.launch(train, on.processes, on.slots, folder, steps, seed, timeout=600)
        except RuntimeError as error:  # `launch` has ended the others
            if kill is None or "has ended by SIGKILL" not in str(error):
                raise
        else:
            if kill is not None:
                raise RuntimeError(f"on {on} the last step came before the kill")
    return notes(folder / "rank-0")[before:]


# ---- what is shown


def draw(one: Sequence[Note], parts: Sequence[tuple[Layout, list[Note]]], path: Path) -> None:
    with rc_context({"font.size": 14, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        expected = [note.loss for note in one]
        above.semilogy(range(1, len(one) + 1), expected, color=GREY, linewidth=8, label="1 device, undisturbed")
        last = 0  # step of the part before
        for number, (on, found) in enumerate(parts):
            colour, steps = COLOURS[number % len(COLOURS)], [note.step + 1 for note in found]
            above.semilogy(steps, [note.loss for note in found], color=colour, linewidth=1.8)
            off = [max(abs(note.loss - expected[note.step]), FLOOR) for note in found]
            below.semilogy(steps, off, color=colour, linestyle="none", marker="o", markersize=3.5)
            place = {"transform": above.get_xaxis_transform(), "clip_on": False}
            above.text((last + steps[-1]) / 2, 1.03, str(on), color=colour, ha="center", size=12, **place)
            last = steps[-1]
            if number + 1 < len(parts):
                label = "killed (SIGKILL)" if number == 0 else None
                above.plot(steps[-1], 0, "X", color=INK, markersize=11, zorder=3, label=label, **place)
                for panel in (above, below):
                    panel.axvline(steps[-1], color=INK, linewidth=1, linestyle=":")
        above.set_ylabel("loss")
        above.legend(loc="upper right", framealpha=1, edgecolor="none", borderaxespad=0)
        below.axhline(TOLERANCE, color=INK, linewidth=1)
        below.set(xlabel="step", ylabel="difference")
        below.set_ylim(bottom=FLOOR / 10)
        below.set_yticks((FLOOR, 1e-15, TOLERANCE), ("0", "$10^{-15}$", "$10^{-12}$"))
        below.minorticks_off()
        below.margins(x=0.02)
        figure.align_ylabels()
        figure.savefig(path)


def layouts(text: str) -> list[Layout]:
    found = re.findall(r"(?:^|,)([1-9]\d?)x([1-9]\d?)(?=,|$)", text)
    if len(found) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"expected processes x slots, such as 1x4,2x3, got {text!r}")
    return [Layout(int(processes), int(slots)) for processes, slots in found]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="digits_elastic.py",
        usage="%(prog)s [options]",
        description="Train on handwritten digits, be killed, go on with other devices, and compare the loss curves.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    default = "1x1,1x4,2x2,1x3,2x3"
    add("--layouts", type=layouts, default=default, metavar="PxS,...", help="processes x slots, one after another")
    add("--steps", type=whole(1, 10**6), default=120, metavar="N", help="of the whole training")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="of the training, and of the kills")
    add("--output", type=picture, default="elastic.png", metavar="PATH", help="where the picture goes")
    options = parser.parse_args(argv)
    if options.steps < (least := LEAST * len(options.layouts)):
        parser.error(f"--steps: expected at least {least}, which is {LEAST} a layout, got {options.steps}")
    return options


def compare(options: argparse.Namespace) -> int:
    steps, seed, parts = options.steps, options.seed, []
    torch.set_num_threads(1)  # threads gain nothing on images this small
    with tempfile.TemporaryDirectory(prefix="digits-elastic-") as name:
        for folder in ("undisturbed", "killed"):
            Path(name, folder).mkdir()
        train(1, Path(name, "undisturbed"), steps, seed)
        one = notes(Path(name, "undisturbed", "rank-0"))
        for on, kill in zip(options.layouts, kills(options.layouts, steps, seed), strict=True):
            found = run(on, Path(name, "killed"), steps, seed, kill)
            end = "the end" if kill is None else f"process {kill.rank} was killed"
            print(f"{on!s:>10}: steps {found[0].step + 1} to {found[-1].step + 1}, then {end}", flush=True)
            parts.append((on, found))
    draw(one, parts, options.output)
    computed = [note for _, found in parts for note in found]  # some steps twice: before a kill, and after it
    difference = torch.tensor([abs(note.loss - one[note.step].loss) for note in computed]).max().item()
    print(f"Largest difference between the two loss curves: {difference:.1e}")
    print(f"Loss curves: {options.output}")
    if {note.step for note in computed} != set(range(steps)) or not difference <= TOLERANCE:
        print(f"digits_elastic.py: they disagree: more than {TOLERANCE:.0e}, or a step is missing", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        return compare(options)
    except KeyboardInterrupt:
        print("digits_elastic.py: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
