"""Gradients of shards, put together as gradients of the arguments: the adjoint of placing them."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch

from fdp._dims import Plan
from fdp._place import flatten_args
from fdp._replicate import replicate_on
from fdp._slots import Replicated, Sharded, Slots
from fdp._tensor import accumulator, add, concat, copy, is_inexact
from fdp._tree import Flat, flatten, leaves_up_to, tree_map, unflatten
from fdp._typing import AUTO, Tree

Grad = torch.Tensor | None


def check_differentiable(flats: Sequence[Flat], plan: Plan, where: str) -> None:
    """All leaves of the differentiated arguments are tensors that can carry a gradient."""
    wrong = []
    for flat in flats:
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
            f"{where}: only floating-point and complex tensors can be differentiated in, not {', '.join(wrong)}. Pass "
            "the others, such as a module's buffers, in an argument that argnums does not name"
        )


def _check_sharded(leaf: Sharded, path: str, spec: Any, plan: Plan, where: str) -> None:
    if spec is None:
        # Each slot would get the gradient of its own rows, and parameters would drift apart unnoticed.
        raise ValueError(
            f"{where}: {path} is a Sharded. If its shards are equal parameters, pass "
            "fdp.Replicated(x.shards, x.devices); if they are parts of the batch, give its dim in in_dims"
        )
    if len(set(plan.slots)) < len(plan.slots):
        raise ValueError(f"{where}: {path} is a Sharded, which cannot be differentiated in microbatches")
    inner = flatten_args([(path, leaf.shards[0], spec if leaf.dims is AUTO else leaf.dims, "in_dims")], where)[0]
    whole = [inner.path(i) for i, dim in enumerate(inner.specs) if dim is None]
    if whole:
        raise ValueError(
            f"{where}: {', '.join(whole)} was not split, and each slot would hold a part of its gradient. Pass it "
            "in an argument of its own"
        )


class Gradients:
    """Takes the gradients of one shard after the other: what is to be summed is summed at once, and not kept."""

    def __init__(self, flats: Sequence[Flat], plan: Plan, device: torch.device | None) -> None:
        self._flats, self._plan, self._device = flats, plan, device
        self._parts: list[list[list[Any]]] = [[[] for _ in flat.leaves] for flat in flats]

    def add(self, grads: Sequence[Sequence[Grad]], args: Sequence[Tree]) -> None:
        """Add the gradients of the next shard, None where it has none; `args` is what it was differentiated in."""
        for flat, all_parts, grad, arg in zip(self._flats, self._parts, grads, args, strict=True):
            rest = iter(grad)
            values = leaves_up_to(flat.structure, arg)
            for leaf, spec, parts, value in zip(flat.leaves, flat.specs, all_parts, values, strict=True):
                if isinstance(leaf, torch.Tensor):
                    found = next(rest)
                    parts[:] = [*parts, _filled(found, value)] if spec is not None else [self._sum(parts, found, leaf)]
                    continue
                inner = flatten(value, flat.name)
                found = list(islice(rest, len(inner.leaves)))
                if isinstance(leaf, Replicated):
                    sums = zip(*parts, strict=True) if parts else [()] * len(found)
                    homes = flatten(leaf.shards[0], flat.name).leaves
                    parts[:] = [[self._sum(s, g, home) for s, g, home in zip(sums, found, homes, strict=True)]]
                else:
                    parts.append(unflatten(inner.structure, map(_filled, found, inner.leaves)))

    def finish(self) -> list[Tree]:
        """The gradient of each argument: a tree like it, zeros where it is not used."""
        return [
            unflatten(flat.structure, map(self._joined, flat.leaves, flat.specs, parts))
            for flat, parts in zip(self._flats, self._parts, strict=True)
        ]

    def _joined(self, leaf: Any, spec: Any, parts: list[Any]) -> Tree:
        if isinstance(leaf, Replicated):
            inner = flatten(leaf.shards[0], "grad")
            whole = [self._home(_filled(g, value), value) for g, value in zip(parts[0], inner.leaves, strict=True)]
            return replicate_on(unflatten(inner.structure, whole), leaf.devices, always=True, name="grad", where="grad")
        if isinstance(leaf, Sharded):
            found = dict(zip(self._plan.slots, parts, strict=True))
            shards = enumerate(leaf.shards)
            grads = tuple(found[i] if i in found else tree_map(torch.zeros_like, shard) for i, shard in shards)
            return Sharded(grads, leaf.devices, leaf.sizes, leaf.dims)
        if spec == "items":
            return type(leaf)(map(lambda g, value: tree_map(self._home, g, value), chain.from_iterable(parts), leaf))
        if spec is None:
            return self._home(_filled(parts[0], leaf), leaf)
        return concat([self._home(part, leaf) for part in parts], spec)

    def _sum(self, before: Sequence[Grad], grad: Grad, home: torch.Tensor) -> Grad:
        """The sum so far (none or one) and the next gradient, on the device where the sum goes."""
        summed = before[0] if before else None
        if grad is None:
            return summed
        moved = self._home(grad, home)
        if summed is None:
            return moved
        wide = accumulator(home.dtype)
        return add(summed.to(wide), moved.to(wide))

    def _home(self, grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A gradient on the output device, else where the tensor is that it belongs to."""
        return copy(grad, self._device or value.device)


def _filled(grad: Grad, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value) if grad is None else grad.to(value.dtype)
