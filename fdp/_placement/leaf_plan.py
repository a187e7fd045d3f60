"""What every kind of leaf has in common: what becomes of it, and what is said of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fdp._placement.moves import Memo, is_inexact
from fdp._placement.partition import Partition
from fdp._placement.planned_leaf import PlannedLeaf, planned
from fdp._trees.tree import Flat, flatten, tensors_in
from fdp._trees.types import Tree

Home = Callable[[Tensor, Tensor, Flat, int], Tensor]
"""Moves a gradient to where the tensor is that it belongs to: the leaf of a flat tree, which messages name."""
Make = Callable[[Tensor, int | None], Tensor]
"""Another tensor in the place of one, which has rows along a dim, or none."""


class LeafPlan:
    """What becomes of one leaf.

    Attributes:
        path: Where it stands: `inputs[0]['x']`.
        dim: Along which its rows are, `"items"`, or None for what is whole.
        partition: Which shards there are.
        is_cut: Whether it has rows, of which each shard gets its own.
        moves: Whether it is copied to another device.
        how: What `explain` says of it.
    """

    how: str
    is_cut = False
    moves = False

    def __init__(self, flat: Flat, index: int, value: Any, partition: Partition) -> None:
        self.flat, self.index, self.partition = flat, index, partition
        self.dim: Any = flat.specs[index]

    @property
    def path(self) -> str:
        return self.flat.path(self.index)

    def inside(self, value: Any) -> Tree:
        """The tree of the tensors in it."""
        return value

    def tensors(self, value: Any) -> Sequence[Tensor]:
        """All tensors in it."""
        return tensors_in(self.inside(value))

    def paths_of(self, value: Any, tensor: Tensor) -> list[str]:
        """Where in it a tensor stands."""
        inner = flatten(self.inside(value), self.path)
        return [inner.path(i) for i, other in enumerate(inner.leaves) if other is tensor]

    def parts(self, value: Any, partition: Partition) -> Sequence[Any]:
        """What each shard has of it, where it is now."""
        return [value] * len(partition.slots)

    def cut(self, value: Any, memo: Memo) -> Sequence[Any]:
        """What each shard gets of it. What tensors became is in the memo, so that each is moved once."""
        return self.parts(value, self.partition)

    def wrong(self, value: Any, where: str) -> list[str]:
        """What in it cannot be differentiated."""
        return not_differentiable(value, self.path)

    def summed(self, value: Any) -> Sequence[tuple[Tensor, Flat, int]] | None:
        """The tensors whose gradients are summed over all shards, with their places in flat trees.

        None if each shard has the gradient of a part of its own.
        """
        return None

    def gradient(self, value: Any, sums: Sequence[Tensor], parts: Sequence[Any], home: Home) -> Tree:
        """Its gradient, from the sums of those tensors, or from the gradients that the shards have of their parts."""
        raise NotImplementedError

    def planned(self, value: Any, partition: Partition) -> Iterator[PlannedLeaf]:
        """What `explain` shows of it."""
        rows, whole = partition.sizes if self.is_cut else None, value.shape if isinstance(value, Tensor) else None
        yield planned(self.path, self.parts(value, partition), partition.devices, self.how, rows, whole)

    def remade(self, value: Any, rows: int, make: Make, item: Callable[[Tree, int], Tree]) -> Any:
        """The same with so many rows; an `item` is made of one of a list, for a row."""
        return value


def not_differentiable(tree: Tree, path: str) -> list[str]:
    """What in a tree is no tensor that can carry a gradient."""
    flat = flatten(tree, path)
    kinds = [f"{x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}" for x in flat.leaves]
    are_fine = [isinstance(x, Tensor) and is_inexact(x) for x in flat.leaves]
    return [f"{flat.path(i)} ({kinds[i]})" for i, is_fine in enumerate(are_fine) if not is_fine]
