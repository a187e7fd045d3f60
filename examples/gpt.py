"""A small GPT that learns to add, with all that stands around a training loop.

    python examples/gpt.py
    python examples/gpt.py --devices 4 --checkpoints runs/gpt
    torchrun --nproc-per-node 2 examples/gpt.py --checkpoints runs/gpt

Its text is sums, a character a token: `47+38=580`. The digits of the answer come last to first, as one adds by hand.
It is trained on 9,000 of all 10,000 sums, and evaluated on the others. With --checkpoints a run that was ended, or
killed, goes on from the last checkpoint, also on other devices or processes: the step decides the batch, and the step
and the row decide dropout, so it has the losses of a run that nothing has disturbed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from digits import picture, whole, writable
    from matplotlib.figure import Figure
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from torch import Tensor, nn
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from torch.utils.data import Subset, TensorDataset

    import fdp
except ImportError as error:
    sys.exit(f'gpt.py: {error}. To install what the example needs: pip install ".[demo]"')

CHARACTERS = "0123456789+="
PROMPT, LENGTH = 6, 9  # characters of `47+38=`, and of `47+38=580`
PRECISIONS = ("float32", "bfloat16", "float16", "float64")

# ---- the text and the model


def sums() -> TensorDataset:
    """All sums of two numbers below 100, a row of tokens each."""
    lines = [f"{a:02}+{b:02}={a + b:03}" for a in range(100) for b in range(100)]
    tokens = [[CHARACTERS.index(c) for c in line[:PROMPT] + line[: PROMPT - 1 : -1]] for line in lines]
    return TensorDataset(torch.tensor(tokens))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (rows, length, width)
        query, key, value = self.mix(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (rows, heads, length, width / heads)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARACTERS), width), nn.Embedding(LENGTH, width)
        self.dropout = nn.Dropout(0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, length) -> (rows, length, characters)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.dropout(self.token(tokens) + self.place(places))))


def answers(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and whether its whole answer is right."""
    logits, expected = (
        logits[:, PROMPT - 1 : -1].to(torch.promote_types(logits.dtype, torch.float32)),
        tokens[:, PROMPT:],
    )
    losses = F.cross_entropy(logits.mT, expected, reduction="none").mean(1)
    return losses, (logits.argmax(2) == expected).all(1).to(logits.dtype)


# ---- the training


def train(mesh: fdp.distributed.Mesh, options: argparse.Namespace) -> dict[str, Any]:
    """Train until the last step, or until there is nothing left to learn. Return what the loop has seen."""
    precision, device, seed = getattr(torch, options.precision), mesh.devices[0], options.seed
    training, validation = torch.utils.data.random_split(sums(), [9000, 1000], torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # the same start in all processes
    model = GPT().to(device, torch.float64 if precision == torch.float64 else torch.float32)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    parts: list[Any] = [model, average, optimizer, scheduler, scaler]
    seen: dict[str, Any] = {"losses": [], "evaluations": [], "best": 0.0, "late": 0}
    decisive = {name: getattr(options, name) for name in ("steps", "batch_size", "lr", "precision", "seed")}
    checkpoints = fdp.distributed.Checkpoints(options.checkpoints, mesh=mesh) if options.checkpoints else None
    first = 0
    if checkpoints and (found := checkpoints.restore()):
        first, (given, seen, *states) = found
        if given != decisive:
            sys.exit(f"gpt.py: the checkpoint in {options.checkpoints} is of a run with other options: {given}")
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        say(mesh, f"going on from step {first}")

    def loss(model: nn.Module, scale: Tensor, tokens: Tensor) -> Tensor:
        return answers(model(tokens), tokens)[0].mean() * scale

    batches = fdp.Batches(len(training), options.batch_size, seed=seed)
    loader = batches.loader(training, mesh, start=first, steps=options.steps - first)
    with progress(mesh) as bar:
        last = [float("nan"), *seen["losses"]][-1]
        task = bar.add_task("", total=options.steps, completed=first, loss=last, right=seen["best"])
        for step, (tokens,) in enumerate(loader, first + 1):
            if seen["best"] == 1 or seen["late"] > options.patience:  # early stopping
                break
            draws: Any = {"seed": fdp.fold_in(seed, step), "randomness": "rows"}
            backward = fdp.backward(model, loss, in_dims=(None, 0), devices=mesh, **draws)
            scale = scaler.scale(torch.ones((), device=device))
            optimizer.zero_grad()
            with torch.autocast(device.type, precision, enabled=options.precision in ("bfloat16", "float16")):
                value = backward(scale, tokens)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
            seen["losses"].append((value / scale).item())
            if step % options.every == 0 or step == options.steps:
                score = evaluate(average.module, validation, mesh)
                seen["evaluations"].append((step, score["loss"], score["right"]))
                seen["late"] = 0 if score["right"] > seen["best"] else seen["late"] + 1
                seen["best"] = max(seen["best"], score["right"])
                if checkpoints:
                    checkpoints.save(step, [decisive, seen, *(dict(part.state_dict()) for part in parts)], wait=False)
            bar.update(task, completed=step, loss=seen["losses"][-1], right=seen["best"])
    if checkpoints:
        checkpoints.wait()
    return seen | {"model": average.module}


def evaluate(model: nn.Module, dataset: Subset, mesh: fdp.distributed.Mesh) -> dict[str, float]:
    """The loss, and the share of right answers, over a whole dataset."""
    apply, state = fdp.functional(model.eval())

    def totals(state: Any, tokens: Tensor) -> dict[str, Tensor]:
        losses, right = answers(apply(state, tokens)[0], tokens)
        return {"loss": losses.sum(), "right": right.sum()}

    total = {"loss": 0.0, "right": 0.0}
    batches = fdp.Batches(len(dataset), 500, shuffle=False)
    with torch.inference_mode():
        for (tokens,) in batches.loader(dataset, mesh, steps=batches.per_epoch):
            found = fdp.dp_apply(totals, state, tokens, mesh, out_dims="sum")
            total = {name: total[name] + found[name].item() for name in total}
    return {name: number / len(dataset) for name, number in total.items()}


@torch.inference_mode()
def complete(model: nn.Module, prompt: str) -> str:
    """Write on, a character at a time, each the likeliest."""
    device = next(model.parameters()).device
    while len(prompt) < LENGTH:
        logits = model(torch.tensor([[CHARACTERS.index(c) for c in prompt]], device=device))
        prompt += CHARACTERS[int(logits[0, -1].argmax())]
    return prompt


# ---- what is shown


def say(mesh: fdp.distributed.Mesh, text: str) -> None:
    """Print, in one of the processes."""
    if mesh.rank == 0:
        print(text, flush=True)


def progress(mesh: fdp.distributed.Mesh) -> Progress:
    columns = "loss {task.fields[loss]:.3f}", "{task.fields[right]:.1%} of the answers right"
    shown = (BarColumn(), MofNCompleteColumn(), *map(TextColumn, columns), TimeRemainingColumn())
    return Progress(*shown, disable=mesh.rank > 0)


def draw(seen: dict[str, Any], path: Path) -> None:
    steps, losses, right = zip(*seen["evaluations"], strict=True)
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.set_title("A small GPT learns to add")
    above.semilogy(range(1, len(seen["losses"]) + 1), seen["losses"], color="#f4b183", label="training, each step")
    above.semilogy(steps, losses, color="#1f3864", marker="o", label="evaluation, of the moving average")
    above.set_ylabel("loss")
    above.legend()
    below.plot(steps, [100 * share for share in right], color="#1f3864", marker="o")
    below.set(xlabel="step", ylabel="right answers, %", ylim=(-3, 103))
    for panel in (above, below):
        panel.margins(x=0.02)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(path)


def rate(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpt.py",
        usage="%(prog)s [options]",
        description="Train a small GPT to add, on any number of devices in any number of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--devices",
        type=whole(1, 1024),
        default=2,
        metavar="N",
        help="virtual CPU devices of each process; GPUs, if any, are all used",
    )
    add("--steps", type=whole(2, 10**6), default=800, metavar="N", help="at most")
    add("--batch-size", type=whole(1, 9000), default=128, metavar="N", help="sums a step, of all processes together")
    add("--lr", type=rate, default=5e-3, metavar="RATE", help="the highest learning rate")
    add("--precision", choices=PRECISIONS, default="float32", help="bfloat16 and float16: under autocast")
    add("--every", type=whole(1, 10**6), default=50, metavar="N", help="steps from one evaluation and checkpoint on")
    add("--patience", type=whole(0, 10**6), default=5, metavar="N", help="evaluations without a better one")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="start, order and dropout")
    add("--checkpoints", type=Path, metavar="DIR", help="where checkpoints are written, and looked for at the start")
    add("--losses", type=writable, metavar="PATH", help="a file for the losses of all steps, one a line")
    add("--output", type=picture, default="gpt.png", metavar="PATH", help="where the picture goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # each slot has a core
    devices = None if torch.cuda.is_available() else fdp.virtual_devices(options.devices)  # None: all GPUs
    try:
        with fdp.distributed.init(devices=devices) as mesh:
            say(mesh, str(mesh))
            seen = train(mesh, options)
            if mesh.rank == 0:
                draw(seen, options.output)
                if options.losses:
                    options.losses.write_text("".join(f"{loss!r}\n" for loss in seen["losses"]))
                written = ", ".join(complete(seen["model"], prompt) for prompt in ("12+34=", "47+38=", "99+99="))
                say(mesh, f"It writes, last digit first: {written}")
                say(mesh, f"Loss curves: {options.output}")
    except KeyboardInterrupt:
        print("gpt.py: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
