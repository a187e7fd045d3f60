"""Where the leaves of a tree live, to look at."""

from torch import Tensor

from fdp._placement.leaf_table import Picture
from fdp._placement.planned_leaf import PlannedLeaf, planned
from fdp._placement.sharded import Slots
from fdp._trees.printed import count_text
from fdp._trees.tree import flatten
from fdp._trees.types import Tree


def visualize(tree: Tree) -> Picture:
    """Show where each leaf of a tree lives: on which device, and which rows of it on which slot.

    With `print`, and in a notebook as the last line of a cell.

    >>> import fdp, torch
    >>> batch = fdp.scatter({"x": torch.ones(5, 2), "scale": torch.tensor(1.0)}, fdp.virtual_devices(2))
    >>> print(fdp.visualize(batch))
    Sharded: 2 slots, rows 3 + 2 (cpu: 0, 1)
    leaf        tensor          how                 rows    on        bytes per slot
    ────────────────────────────────────────────────────────────────────────────────
    ['scale']   float32[]       whole                       2 x cpu          2 x 4 B
    ['x']       float32[5, 2]   split along dim 0   3 + 2   2 x cpu      24 B + 16 B

    Args:
        tree: Any tree, a `Sharded`, a `Replicated`, or a tree that has such as leaves.

    Returns:
        A picture of one line per leaf: its dtype, the shape of the whole, how it is split, the rows and bytes on each
        slot, and where they are. The idea is that of `jax.debug.visualize_array_sharding`.

    Raises:
        TypeError: An object that holds tensors but is no tree.
    """
    if isinstance(tree, Slots):
        return tree.picture()
    flat = flatten(tree, "tree", where="visualize")
    leaves: list[PlannedLeaf] = []
    for i, leaf in enumerate(flat.leaves):
        if isinstance(leaf, Slots):
            leaves += leaf.picture(flat.path(i)).leaves
        else:
            leaves.append(planned(flat.path(i), [leaf], (leaf.device,) if isinstance(leaf, Tensor) else (), ""))
    return Picture(f"{type(tree).__name__} of {count_text(len(leaves), 'leaf', 'leaves')}", tuple(leaves))
