"""How wrong the gradient of a mean over tokens is, if shards are not weighted by their tokens.

`python docs/figures/token_mean.py` draws `token_mean.svg`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fdp

ROWS, LENGTH, WIDTH, CLASSES = 37, 24, 8, 5
WAYS = ("plainly", "by rows", "by tokens")


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean over the tokens that are not padding."""
    logits = torch.tanh(x @ params["w"]) @ params["v"]  # (rows, length, classes)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


def tokens(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """How many tokens count in a batch."""
    return (y != -1).sum()


def problem() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Parameters, and a batch of sequences that have 1 to 24 tokens before their padding."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    params = {"w": normal(WIDTH, 16), "v": normal(16, CLASSES)}
    x, y = normal(ROWS, LENGTH, WIDTH), torch.randint(CLASSES, (ROWS, LENGTH), generator=random)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=random)
    return params, x, y.masked_fill(torch.arange(LENGTH) >= lengths, -1)


def plainly(params: dict[str, Tensor], x: Tensor, y: Tensor, split: dict[str, Any]) -> dict[str, Tensor]:
    """Every slot's own gradient, and all of them averaged."""

    def step(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return fdp.pmean(torch.func.grad(loss)(params, x, y))

    return fdp.shard_map(step, in_dims=(None, 0, 0), out_dims=None, **split)(params, x, y)


def by_rows(params: dict[str, Tensor], x: Tensor, y: Tensor, split: dict[str, Any]) -> dict[str, Tensor]:
    """As for a mean over rows, which this loss is not."""
    return fdp.grad(loss, **split)(params, x, y)


def by_tokens(params: dict[str, Tensor], x: Tensor, y: Tensor, split: dict[str, Any]) -> dict[str, Tensor]:
    """Every shard counts as many as it has tokens."""
    return fdp.grad(loss, count=tokens, **split)(params, x, y)


def errors() -> dict[str, dict[str, float]]:
    """For each split and way, the norm of the error over that of the gradient on one device."""
    batch = problem()
    exact = torch.func.grad(loss)(*batch)
    whole = _norm(exact)
    ways: tuple[Callable[..., dict[str, Tensor]], ...] = (plainly, by_rows, by_tokens)
    found: dict[str, dict[str, float]] = {}
    for name, split in _splits().items():
        grads = [way(*batch, split) for way in ways]
        off = [_norm({key: grad[key] - exact[key] for key in exact}) / whole for grad in grads]
        found[name] = dict(zip(WAYS, off, strict=True))
    return found


def _splits() -> dict[str, dict[str, Any]]:
    even = {f"{n} slots": {"devices": fdp.virtual_devices(n)} for n in (2, 3, 4, 8)}
    return even | {"4 slots, weights 4:2:1:1": {"devices": fdp.virtual_devices(4), "weights": [4, 2, 1, 1]}}


def _norm(tree: dict[str, Tensor]) -> float:
    return torch.cat([x.flatten() for x in tree.values()]).norm().item()


def draw() -> None:
    """A line for each split, a dot for each way, on a logarithmic scale."""
    from _style import BLUE, INK, LINE, MUTED, ORANGE, RED, figure, plain

    found = errors()
    marks = {"plainly": (RED, "s", -0.17), "by rows": (ORANGE, "^", 0.17), "by tokens": (BLUE, "o", 0)}
    names = {"plainly": "plain average", "by rows": "by rows", "by tokens": "by tokens (count=)"}
    with figure("token_mean", 3.7) as (whole, axis):
        for line, off in enumerate(found.values()):
            axis.plot([1e-17, 1], [line, line], color=LINE, linewidth=0.8, zorder=1)
            for way, (colour, mark, lift) in marks.items():
                label, x = names[way] if line == 0 else None, max(off[way], 1e-17)
                axis.scatter(x, line + lift, s=50, color=colour, marker=mark, zorder=3, label=label, linewidths=0)
        epsilon = torch.finfo(torch.float64).eps
        axis.axvline(epsilon, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
        axis.annotate(
            "float64 epsilon",
            (epsilon, -0.75),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=MUTED,
            fontsize=9,
        )
        axis.set_xscale("log")
        axis.set_xlim(1e-17, 1)
        axis.set_xticks([10.0**k for k in range(-16, 1, 4)])
        axis.set_yticks(range(len(found)), [split.replace(", ", ",\n") for split in found])
        axis.set_ylim(len(found) - 0.4, -1.1)
        axis.set_xlabel("error of the gradient against one device,\nrelative to its norm", color=INK)
        plain(axis)
        whole.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=INK)


if __name__ == "__main__":
    draw()
