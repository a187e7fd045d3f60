"""Finding the slot in which a NaN began."""

from typing import Any

import torch

from fdp._collectives.api import axis_index
from fdp._placement.moves import is_inexact
from fdp._transforms.apply import dp_apply
from fdp._trees.tree import flatten
from fdp._trees.types import Devices, Dims, Function, Tree


def find_nonfinite(
    fn: Function, params: Tree, inputs: Tree, devices: Devices = None, *, in_dims: Dims = 0, seed: int | None = None
) -> dict[int, list[str]]:
    """Which slots return a NaN or an infinity, and in which leaves.

    A NaN in one row spreads: to the mean over all slots, to the gradient, and after a step to all parameters. Each slot
    by itself still shows where it began.

    >>> import fdp, torch
    >>> rows = torch.tensor([1.0, 2.0, torch.nan, 4.0])
    >>> fdp.testing.find_nonfinite(lambda w, x: {"loss": (w * x).mean()}, 1.0, rows, fdp.virtual_devices(2))
    {1: ["out['loss']"]}

    Args:
        fn: As in `dp_apply`; return the gradients too to see theirs.
        params, inputs, devices, in_dims, seed: As in `dp_apply`.

    Returns:
        For the number of each slot that has some, the paths of the leaves. On a mesh, the slots of this process, with
        their numbers among all.

    Raises:
        ValueError, TypeError: As `dp_apply` does.
    """
    found: dict[int, list[str]] = {}

    def look(*args: Tree) -> None:
        flat = flatten(fn(*args), "out", where="find_nonfinite")
        found[axis_index()] = [flat.path(i) for i, leaf in enumerate(flat.leaves) if _is_nonfinite(leaf)]

    dp_apply(look, params, inputs, devices, in_dims=in_dims, seed=seed)
    return {number: paths for number, paths in sorted(found.items()) if paths}


def _is_nonfinite(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_inexact(leaf) and not bool(leaf.isfinite().all())
