"""Collectives: what the slots of a call do together, by name, from inside the function that is mapped."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fdp._collectives.axes import AxisName, axis_of, names_of
from fdp._collectives.dispatch import on_tree, reduced
from fdp._collectives.mean import mean
from fdp._collectives.operations import Exchange, Extreme, Gather, Permute, Scatter, Sum, from_end
from fdp._placement.slot import AXES
from fdp._trees.types import Tree


def axis_index(axis_name: str = "data") -> int:
    """Which slot of an axis this is.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x + fdp.axis_index(), None, torch.zeros(4), fdp.virtual_devices(2))
    tensor([0., 0., 1., 1.])

    Args:
        axis_name: The innermost call with this name.

    Raises:
        NameError: This code runs in no call with this name.
    """
    return axis_of("axis_index", axis_name).slot.index


def axis_size(axis_name: str = "data") -> int:
    """How many slots of an axis there are; those without rows do not count.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x + fdp.axis_size(), None, torch.zeros(3), fdp.virtual_devices(8))
    tensor([3., 3., 3.])

    Args:
        axis_name: The innermost call with this name.

    Raises:
        NameError: This code runs in no call with this name.
    """
    return axis_of("axis_size", axis_name).slot.count


def axis_rows(axis_name: str = "data") -> int:
    """How many rows this slot has.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x + fdp.axis_rows(), None, torch.zeros(3), fdp.virtual_devices(2))
    tensor([2., 2., 1.])

    Args:
        axis_name: The innermost call with this name.

    Raises:
        NameError: This code runs in no call with this name.
        ValueError: Nothing was split, so that there are no rows.
    """
    rows = axis_of("axis_rows", axis_name).slot.rows
    if rows is None:
        raise ValueError(f"axis_rows: nothing was split along {axis_name!r}, so that slots have no rows")
    return len(rows)


def psum(tree: Tree, axis_name: AxisName = "data") -> Tree:
    """The sum over all slots, on every slot.

    Its transpose is `psum` again: differentiate the loss of a slot, then sum. To differentiate a summed loss on every
    slot gives the gradient of all of these losses, which is n times as much.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x / fdp.psum(x.sum()), None, torch.ones(4), fdp.virtual_devices(2))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])

    Args:
        tree: Tensors of the same shapes and dtypes on all slots, and numbers. Bools are counted; small integers wrap
            as in torch's addition: in uint8, 200 + 200 is 144.
        axis_name: The innermost call with this name.

    Returns:
        A tree like it.

    Raises:
        NameError: This code runs in no call with this name.
        ValueError: Structures, shapes or dtypes differ.
        RuntimeError: Some slot calls another collective, or ends without calling one.
    """
    return reduced("psum", tree, axis_name, Sum)


def pmean(tree: Tree, axis_name: AxisName = "data", *, weight: Any = None) -> Tree:
    """The mean over all slots, on every slot.

    >>> import fdp, torch
    >>> def center(w, x):
    ...     return x - fdp.pmean(x.mean(), weight="rows")
    >>> fdp.dp_apply(center, None, torch.arange(3.), fdp.virtual_devices(2))
    tensor([-1.,  0.,  1.])

    Args:
        tree: Floating-point tensors of the same shapes and dtypes on all slots, and numbers.
        axis_name: The innermost call with this name.
        weight: What this slot counts: a number, a 0-dim tensor or `"rows"`; it is finite and not negative. By default
            all count the same. A slot of weight 0 contributes nothing, not even a NaN, and has no gradient: torch.func
            gives zeros, `torch.autograd.grad` needs `allow_unused=True`. Only if its weight is itself differentiated
            or mapped by `vmap`, its gradient is 0 times what torch finds further back, which may be NaN.

    Returns:
        A tree like it. Half precision is added up and divided in float32.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does; ValueError also if all weights are 0 or one is negative.
        TypeError: An integer tensor, or a weight of another kind.
    """
    axes = [axis_of("pmean", name) for name in names_of("pmean", axis_name)]
    if not axes:
        return tree
    if isinstance(weight, str) and weight == "rows":
        weight = axis_rows(max(axes, key=AXES.get().index).slot.axis_name)  # of the innermost: its rows are the fewest
    return mean(tree, axis_name, axes[0].slot.count, 1 if weight is None and len(axes) > 1 else weight)


def pmax(tree: Tree, axis_name: AxisName = "data") -> Tree:
    """The largest value over all slots, elementwise; it cannot be differentiated.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x / fdp.pmax(x.max()), None, torch.tensor([1., 2., 4.]), fdp.virtual_devices(3))
    tensor([0.2500, 0.5000, 1.0000])

    Args:
        tree: Tensors of the same shapes and dtypes on all slots, and numbers.
        axis_name: The innermost call with this name.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does; RuntimeError also if it is differentiated.
    """
    return reduced("pmax", tree, axis_name, lambda: Extreme("pmax"))


def pmin(tree: Tree, axis_name: AxisName = "data") -> Tree:
    """The smallest value over all slots, elementwise; it cannot be differentiated.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x - fdp.pmin(x.min()), None, torch.tensor([1., 2., 4.]), fdp.virtual_devices(3))
    tensor([0., 1., 3.])

    Args:
        tree: Tensors of the same shapes and dtypes on all slots, and numbers.
        axis_name: The innermost call with this name.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does; RuntimeError also if it is differentiated.
    """
    return reduced("pmin", tree, axis_name, lambda: Extreme("pmin"))


def all_gather(tree: Tree, axis_name: str = "data", *, dim: int = 0, stack: bool = False) -> Tree:
    """The tensors of all slots, joined in slot order, on every slot. Its transpose is `psum_scatter`.

    >>> import fdp, torch
    >>> fdp.dp_apply(lambda w, x: x @ fdp.all_gather(x).T, None, torch.eye(3), fdp.virtual_devices(2))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])

    Args:
        tree: Tensors of the same dtypes and, but for `dim`, the same shapes on all slots.
        axis_name: The innermost call with this name.
        dim: The dimension along which they are joined; they may differ in it.
        stack: Make `dim` a new dimension, with one entry per slot.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does.
    """

    def gather(tensors: Sequence[Tensor]) -> Gather:
        if not stack and any(x.ndim == 0 for x in tensors):
            raise ValueError(
                f"all_gather: dim {dim} is out of range for a tensor of 0 dimensions; pass stack=True to get a new one"
            )
        return Gather(from_end(dim, tensors, "all_gather", new=stack), stack)

    return on_tree("all_gather", tree, axis_name, gather, numbers=False)


def psum_scatter(tree: Tree, axis_name: str = "data", *, dim: int = 0) -> Tree:
    """The sum over all slots, of which every slot gets a part. Its transpose is `all_gather`.

    >>> import fdp, torch
    >>> def parts(w, x):
    ...     return fdp.psum_scatter(w * x[0])
    >>> fdp.dp_apply(parts, torch.arange(3.0), torch.ones(2, 1), fdp.virtual_devices(2))
    tensor([0., 2., 4.])

    Args:
        tree: Tensors of the same shapes and dtypes on all slots.
        axis_name: The innermost call with this name.
        dim: The dimension that is split: in parts that differ by at most one, larger first.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does.
    """
    return on_tree(
        "psum_scatter", tree, axis_name, lambda tensors: Scatter(from_end(dim, tensors, "psum_scatter")), numbers=False
    )


def all_to_all(tree: Tree, axis_name: str = "data", *, split_dim: int, concat_dim: int) -> Tree:
    """Every slot sends a part to every other: what was split along one dimension becomes split along another.

    Its transpose is `all_to_all` with the dimensions exchanged.

    >>> import fdp, torch
    >>> def columns(w, x):
    ...     return fdp.all_to_all(x, split_dim=1, concat_dim=0)
    >>> fdp.dp_apply(columns, None, torch.arange(4).reshape(2, 2), fdp.virtual_devices(2), out_dims=1)
    tensor([[0, 1],
            [2, 3]])

    Args:
        tree: Tensors of the same dtypes and, but for `concat_dim`, the same shapes on all slots.
        axis_name: The innermost call with this name.
        split_dim: The dimension that is split: in parts that differ by at most one, larger first.
        concat_dim: The dimension along which the parts that arrive are joined, in slot order.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does.
    """

    def exchange(tensors: Sequence[Tensor]) -> Exchange:
        return Exchange(from_end(split_dim, tensors, "all_to_all"), from_end(concat_dim, tensors, "all_to_all"))

    return on_tree("all_to_all", tree, axis_name, exchange, numbers=False)


def ppermute(tree: Tree, perm: Sequence[tuple[int, int]], axis_name: str = "data") -> Tree:
    """Send the tensors of a slot to another. Its transpose sends them back.

    >>> import fdp, torch
    >>> def rotate(w, x):
    ...     n = fdp.axis_size()
    ...     return fdp.ppermute(x, [(i, (i + 1) % n) for i in range(n)])
    >>> fdp.dp_apply(rotate, None, torch.arange(3.), fdp.virtual_devices(3))
    tensor([2., 0., 1.])

    Args:
        tree: Tensors of the same shapes and dtypes on all slots.
        perm: Pairs `(from, to)` of slots, in which each is at most once on either side. A slot that nothing is sent to
            gets zeros.
        axis_name: The innermost call with this name.

    Raises:
        NameError, ValueError, RuntimeError: As `psum` does; ValueError also for pairs that are no permutation.
        TypeError: Something else than pairs of ints.
    """
    count = axis_of("ppermute", axis_name).slot.count
    try:
        pairs = sorted((operator.index(source), operator.index(target)) for source, target in perm)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"ppermute: perm must be pairs (from, to) of slots, such as [(0, 1), (1, 0)], got {perm!r}"
        ) from error
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        raise ValueError(f"ppermute: {pairs} has a slot twice on one side; each sends and receives at most once")
    if not all(0 <= i < count for i in sources + targets):
        raise ValueError(f"ppermute: {pairs} names slots that there are not; there are {count}")
    return on_tree("ppermute", tree, axis_name, lambda tensors: Permute(pairs), numbers=False)
