"""`Replicated`: the same tree on every slot, and its update there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fdp._placement.moves import layers
from fdp._placement.sharded import Slots, kind_of, summary
from fdp._trees import torch_private
from fdp._trees.registry import register_leaf
from fdp._trees.tree import flatten_any, tensors_in
from fdp._trees.types import Auto, Dims, Tree


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Replicated(Slots):
    """The same tree on every slot, each with storage of its own unless it was made with `copy=False`.

    >>> import fdp, torch
    >>> params = fdp.replicate({"w": torch.ones(2)}, fdp.virtual_devices(3))
    >>> params
    Replicated(3 slots on cpu x 3: {'w': float32[2]})
    >>> params[2]
    {'w': tensor([1., 1.])}

    Attributes:
        shards: One tree per slot.
        devices: The device of each slot.
        sizes: None: there are no rows.
        dims: None: the whole tree is on every slot.
        peers: As in `Sharded`.
    """

    dims: Dims | Auto = None

    def map(self, fn: Callable[..., Tree], *others: "Replicated") -> "Replicated":
        """Apply a function to the trees of every slot: the update of a state that stays on its slots.

        `params.map(update, grads)[i] == update(params[i], grads[i])`. Nothing is copied between devices.

        >>> import fdp, torch
        >>> slots = fdp.virtual_devices(2)
        >>> params = fdp.replicate(torch.ones(2), slots)
        >>> grads = fdp.grad(lambda w, x: (x @ w).sum(), devices=slots)(params, torch.ones(4, 2))
        >>> params = params.map(lambda w, g: w - 0.1 * g, grads)
        >>> params
        Replicated(2 slots on cpu x 2: float32[2])
        >>> params[1]
        tensor([0.9000, 0.9000])

        Args:
            fn: Called on one slot after the other; on accelerators the work overlaps. It may write to its arguments in
                place. What it returns must be the same on every slot. So it must not count its calls, which are one a
                slot, nor draw random numbers: draw before, and pass `fdp.replicate(drawn, devices)`.
            others: `Replicated` on the same slots. `fdp.replicate(tree, devices)` makes one of a tree; numbers such as
                a learning rate go into `fn`.

        Raises:
            TypeError: `fn` is no function, or another argument is not `Replicated`.
            ValueError: They are on different slots; what `fn` returned differs between slots in structure, dtype, shape
                or a number that is no tensor, or is not on the slot's device.
            RuntimeError: `fn` wrote in place to a tensor that several slots share, as they do with `copy=False`.
        """
        if not callable(fn):
            raise TypeError(f"Replicated.map: expected a function first, got {kind_of(fn)}. Write x.map(update, grads)")
        for i, other in enumerate(others):
            if not isinstance(other, Replicated):
                what = "write fdp.replicate(it, x.devices), or put it into fn: x.map(lambda tree: fn(tree, it))"
                raise TypeError(f"Replicated.map: others[{i}] is {kind_of(other)}, expected a Replicated; {what}")
            if other.devices != self.devices or other.peers is not self.peers:
                raise ValueError(f"Replicated.map: others[{i}] is on other slots: {other!r}, the first is {self!r}")
        columns = list(zip(self.shards, *(other.shards for other in others), strict=True))
        may_share = len(set(self.devices)) < len(self) and not torch.compiler.is_dynamo_compiling()
        before = list(map(_versions, columns)) if may_share else []
        shards: list[Tree] = []
        for slot, trees in enumerate(columns):
            if before and _versions(trees) != before[slot]:
                raise RuntimeError(
                    f"Replicated.map: on an earlier slot fn wrote in place to what slot {slot} shares, so it would be "
                    "updated more than once. Return new tensors, or replicate without copy=False. The tensors hold the "
                    "change already"
                )
            shards.append(fn(*trees))
        result = Replicated(tuple(shards), self.devices, peers=self.peers)
        _check_alike(result)
        return result


def _check_alike(result: Replicated) -> None:
    """Whether what a function has returned can be the same on all slots, without a look at the values of tensors."""
    flats = [flatten_any(shard, "result") for shard in result.shards]
    kinds = [[_alike(leaf) for leaf in flat.leaves] for flat in flats]
    for slot, (flat, kind) in enumerate(zip(flats, kinds, strict=True)):
        if flat.structure != flats[0].structure or kind != kinds[0]:
            each = f"{summary(result[0])} on slot 0, {summary(result[slot])} on slot {slot}"
            raise ValueError(f"Replicated.map: what fn returned differs between slots: {each}")
        on = result.devices[slot]
        for i, leaf in enumerate(flat.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.device != on and (leaf.ndim or leaf.device.type != "cpu"):
                raise ValueError(f"Replicated.map: {flat.path(i)} of slot {slot} is on {leaf.device}, the slot on {on}")


def _alike(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape
    return repr(leaf) if isinstance(leaf, int | float | complex | str) else None


def _versions(trees: Tree) -> list[int]:
    """How often each tensor has been written to; inference tensors do not count it."""
    return [torch_private.version(layer) for x in tensors_in(trees) for layer in layers(x) if not layer.is_inference()]


register_leaf(Replicated)
Replicated.__module__ = "fdp"  # where pickles find it, whatever file it is in
