"""Gradients of shards, put together as gradients of the arguments: the adjoint of placing them."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, Literal

import torch

from fdp._placement.moves import LARGE, accumulate, accumulator, concat, copy, is_inexact, is_ours
from fdp._placement.partition import Partition
from fdp._placement.plan import PlannedArgument
from fdp._placement.replicate import replicate_on
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.split_dims import flatten_args
from fdp._trees import torch_private
from fdp._trees.listing import listed
from fdp._trees.profiling import staged
from fdp._trees.tree import Flat, flatten, leaves_up_to, tree_map, unflatten
from fdp._trees.types import AUTO, Tree

Grad = torch.Tensor | None
Unused = Literal["zeros", "none"]
"""What the gradient of a leaf is that nothing uses."""


def check_differentiable(flats: Sequence[Flat], args: Sequence[PlannedArgument], plan: Partition, where: str) -> None:
    """All leaves of the differentiated arguments are tensors that can carry a gradient."""
    wrong = []
    for flat, arg in zip(flats, args, strict=True):
        if arg.gradients is not None and False not in map(torch.Tensor.is_floating_point, flat.leaves):
            continue
        for i, leaf in enumerate(flat.leaves):
            if isinstance(leaf, torch.Tensor):
                wrong += [] if is_inexact(leaf) else [f"{flat.path(i)} ({leaf.dtype})"]
                continue
            path = f"{flat.path(i)}[0]" if isinstance(leaf, Slots) else flat.path(i)
            inner = flatten(leaf.shards[0] if isinstance(leaf, Slots) else leaf, path)
            for k, part in enumerate(inner.leaves):
                if not isinstance(part, torch.Tensor):
                    wrong.append(f"{inner.path(k)} (a {type(part).__name__})")
                elif not is_inexact(part):
                    wrong.append(f"{inner.path(k)} ({part.dtype})")
            if isinstance(leaf, Sharded):
                _check_sharded(leaf, flat.path(i), flat.specs[i], plan, where)
    if wrong:
        raise TypeError(
            f"{where}: only floating-point and complex tensors can be differentiated in, not {listed(wrong)}. Pass "
            "the others, such as a module's buffers, in an argument that argnums does not name"
        )


def _check_sharded(leaf: Sharded, path: str, spec: Any, plan: Partition, where: str) -> None:
    if spec is None:
        # Each slot would get the gradient of its own rows, and parameters would drift apart unnoticed.
        raise ValueError(
            f"{where}: {path} is a Sharded. If its shards are equal parameters, pass "
            "fdp.Replicated(x.shards, x.devices); if they are parts of the batch, give its dim in in_dims"
        )
    if len(set(plan.slots)) < len(plan.slots):
        raise ValueError(f"{where}: {path} is a Sharded, which cannot be differentiated in microbatches")
    inner = flatten_args([(path, leaf.shards[0], spec if leaf.dims is AUTO else leaf.dims, "in_dims")], where)[0]
    whole = [i for i, dim in enumerate(inner.specs) if dim is None]
    if whole:
        raise ValueError(
            f"{where}: {listed(whole, inner.path)} was not split, and each slot would hold a part of its gradient. "
            "Pass it in an argument of its own"
        )


class Gradients:
    """Takes the gradients of the shards in any order: what is to be summed is summed at once, and not kept."""

    def __init__(
        self,
        flats: Sequence[Flat],
        args: Sequence[PlannedArgument],
        plan: Partition,
        device: torch.device | None,
        sent_as: torch.dtype | None,
        unused: Unused = "zeros",
    ) -> None:
        # Under another name, for the log of transfers.
        self._flats = [Flat(f"grad of {flat.name}", *flat[1:]) for flat in flats]
        self._plan, self._device, self.sent_as = plan, device, sent_as
        # How often each leaf was used, where that is asked for; then all leaves are whole.
        self._used = [0.0] * sum(len(flat.leaves) for flat in flats) if unused == "none" else None
        # Where all leaves are whole: what the gradient of each usually is.
        self._whole = [arg.gradients for arg in args]
        if device is not None:
            self._whole = [homes and [home and (home[0], device, *home[2:]) for home in homes] for homes in self._whole]
        # Of what is split, the part of every shard; of what is whole, the sum so far. Where all leaves are whole, the
        # sums of all of them are one list.
        self._parts: list[list[Any]] = [
            [None] * len(flat.leaves)
            if homes is not None
            else [_empty(*pair, plan) for pair in zip(flat.leaves, flat.specs, strict=True)]
            for flat, homes in zip(flats, self._whole, strict=True)
        ]

    @staged("reduce")
    def add(self, shard: int, grads: Sequence[Sequence[Grad]], args: Sequence[Tree]) -> None:
        """Add the gradients of a shard, None where it has none; `args` is what it was differentiated in."""
        if self._used is not None:
            used = [grad is not None for grad in chain.from_iterable(grads)]
            self._used = list(map(operator.add, self._used, used))
        for flat, homes, all_parts, grad, arg in zip(self._flats, self._whole, self._parts, grads, args, strict=True):
            if homes is not None:
                self._add_whole(flat, homes, all_parts, grad)
                continue
            rest, values = iter(grad), leaves_up_to(flat.structure, arg)
            columns = zip(flat.leaves, flat.specs, all_parts, values, strict=True)
            for i, (leaf, spec, parts, value) in enumerate(columns):
                if isinstance(leaf, torch.Tensor):
                    if spec is None:
                        self._sum(parts, 0, next(rest), leaf, flat, i)
                    else:
                        parts[shard] = _filled(next(rest), value)
                    continue
                inner = flatten(value, flat.name)
                if isinstance(leaf, Replicated):
                    homes = flatten(leaf.shards[0], flat.path(i))
                    parts.extend([None] * (len(homes.leaves) - len(parts)))
                    for k, home in enumerate(homes.leaves):
                        self._sum(parts, k, next(rest), home, homes, k)
                else:
                    found = islice(rest, len(inner.leaves))
                    parts[shard] = unflatten(inner.structure, map(_filled, found, inner.leaves))

    def _add_whole(self, flat: Flat, homes: list[Any], sums: list[Grad], grads: Sequence[Grad]) -> None:
        """Add to the sum of each tensor: to small ones all in one call."""
        small: list[int] = []
        if _are(homes, grads):
            if {type(None)}.issuperset(map(type, sums)):  # by types: `==` would compare the values of tensors
                sums[:] = grads
                return
            if _are(homes, sums):
                small = [i for i, grad in enumerate(grads) if grad is not None and grad.nbytes < LARGE]
        if small:
            added = torch_private.foreach_add([sums[i] for i in small], [grads[i] for i in small])
            for i, total in zip(small, added, strict=True):
                sums[i] = total
        for i in sorted(set(range(len(grads))).difference(small)):
            self._sum(sums, i, grads[i], flat.leaves[i], flat, i)

    def sums(self) -> list[torch.Tensor]:
        """What is summed over the shards so far: a tensor for each leaf of whole arguments; how often each was used."""
        found = self._sums()
        return found if self._used is None else [*found, found[0].new_tensor(self._used, dtype=torch.float32)]

    def _sums(self) -> list[torch.Tensor]:
        if len(self._whole) == 1 and self._whole[0] is not None and _are(self._whole[0], self._parts[0]):
            return self._parts[0]
        for held, i, home in self._held():
            wide = accumulator(home.dtype)  # in all processes, however many shards each has added up
            held[i] = torch.zeros_like(home, dtype=wide, device=self._device) if held[i] is None else held[i].to(wide)
        return [held[i] for held, i, _ in self._held()]

    def ours(self) -> list[bool]:
        """Which of them nobody else refers to, so that they may be written to; small ones count as not."""
        own = [home.nbytes >= LARGE and is_ours(held, i) for held, i, home in self._held()]
        return own if self._used is None else [*own, False]

    def replace_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Put others in their place."""
        if self._used is not None:
            *sums, used = sums
            self._used = used.tolist()
        for (held, i, _), x in zip(self._held(), sums, strict=True):
            held[i] = x

    def _held(self) -> Iterator[tuple[list[Any], int, torch.Tensor]]:
        """The sums, each with where it is held, and the tensor that it belongs to."""
        for flat, homes, all_parts in zip(self._flats, self._whole, self._parts, strict=True):
            if homes is not None:
                yield from ((all_parts, i, leaf) for i, leaf in enumerate(flat.leaves))
                continue
            for leaf, spec, parts in zip(flat.leaves, flat.specs, all_parts, strict=True):
                if isinstance(leaf, torch.Tensor) and spec is None:
                    yield parts, 0, leaf
                elif isinstance(leaf, Replicated):
                    homes = flatten(leaf.shards[0], flat.name).leaves
                    parts.extend([None] * (len(homes) - len(parts)))
                    yield from ((parts, i, home) for i, home in enumerate(homes))

    @staged("reduce")
    def finish(self) -> list[Tree]:
        """The gradient of each argument: a tree like it, with zeros or None where it is not used."""
        found = []
        for flat, homes, parts in zip(self._flats, self._whole, self._parts, strict=True):
            if homes is not None and _are(homes, parts):
                leaves = parts
            elif homes is not None:
                leaves = map(self._home, map(_filled, parts, flat.leaves), flat.leaves, repeat(flat), count())
            else:
                leaves = [self._joined(flat, i, part) for i, part in enumerate(parts)]
            if self._used is not None:
                leaves = [grad if used else None for grad, used in zip(leaves, self._used, strict=True)]
            found.append(unflatten(flat.structure, leaves))
        return found

    def _joined(self, flat: Flat, index: int, parts: list[Any]) -> Tree:
        leaf, spec = flat.leaves[index], flat.specs[index]
        if isinstance(leaf, Replicated):
            inner = flatten(leaf.shards[0], flat.path(index))
            places = enumerate(zip(parts, inner.leaves, strict=True))
            whole = [self._home(_filled(total, value), value, inner, k) for k, (total, value) in places]
            tree, name = unflatten(inner.structure, whole), inner.name
            return replicate_on(tree, leaf.devices, always=True, name=name, where="grad", peers=leaf.peers)
        if isinstance(leaf, Sharded):
            found = dict(zip(self._plan.slots, parts, strict=True))
            shards = enumerate(leaf.shards)
            grads = tuple(found[i] if i in found else tree_map(torch.zeros_like, shard) for i, shard in shards)
            return dataclasses.replace(leaf, shards=grads)
        if spec == "items":
            inner = flatten(leaf, flat.path(index))
            grads = enumerate(leaves_up_to(inner.structure, type(leaf)(chain.from_iterable(parts))))
            return unflatten(inner.structure, [self._home(grad, inner.leaves[k], inner, k) for k, grad in grads])
        if spec is None:
            return self._home(_filled(parts[0], leaf), leaf, flat, index)
        if not parts:  # other processes have all rows
            return torch.zeros_like(leaf)
        return concat([self._home(part, leaf, flat, index) for part in parts], spec)

    def _sum(self, held: list[Any], place: int, grad: Grad, home: torch.Tensor, flat: Flat, index: int) -> None:
        """Add the next gradient to the sum so far, if there is one, on the device where the sum goes."""
        if grad is None:
            return
        moved, wide = self._home(grad, home, flat, index), accumulator(home.dtype)
        del grad  # whether it may be written to depends on who refers to it
        if held[place] is None:
            held[place] = moved
            return
        if wide is not home.dtype:
            held[place], moved = held[place].to(wide), moved.to(wide)
        accumulate(held, place, moved)

    def _home(self, grad: torch.Tensor, value: torch.Tensor, flat: Flat, index: int) -> torch.Tensor:
        """A gradient on the output device, else where the tensor is that it belongs to."""
        device = self._device or value.device
        return grad if grad.device == device else copy(grad, device, flat, index)


def _are(homes: list[Any], grads: Sequence[Grad]) -> bool:
    """Whether all gradients are there, and as is usual."""
    if torch.compiler.is_compiling() or torch_private.is_transformed():
        return False
    try:
        return list(map(_home_of, grads)) == homes and _PLAIN.issuperset(map(type, grads))
    except AttributeError:  # one is None
        return False


_home_of: Any = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_PLAIN = frozenset({torch.Tensor})


def _empty(leaf: Any, spec: Any, plan: Partition) -> list[None]:
    """Room for the parts of a leaf that is split, for the sum of another; a Replicated may have any number."""
    if isinstance(leaf, Replicated):
        return []
    return [None] * (len(plan.slots) if isinstance(leaf, Sharded) or spec is not None else 1)


def _filled(grad: Grad, value: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return torch.zeros_like(value)
    return grad if grad.dtype is value.dtype else grad.to(value.dtype)
