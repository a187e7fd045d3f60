"""What the shards of this process come to, and what that and what others have come to is together.

Processes say to each other what they have but for the tensors; then all tensors that become those of all are sums.
"""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._placement.check_outputs import same_value
from fdp._placement.join import join, resolve_specs
from fdp._placement.moves import accumulator, bytes_of, concat, is_inexact
from fdp._placement.peers import Joined
from fdp._trees.tree import Flat, flatten, leaves_up_to, unflatten
from fdp._trees.types import Tree
from fdp.distributed._exchange import all_of, objects
from fdp.distributed._reports import Tag
from fdp.distributed._sum import SCALE
from fdp.distributed._waits_and_failures import Epoch

_GLOBAL = (None, "mean", "sum", "max", "min")


class LeafKind(NamedTuple):
    """A tensor, for a process that has none of it; `dtype` is that of the result."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Outline(NamedTuple):
    """What a process has come to, but for the tensors."""

    tree: Tree
    specs: list[Any]
    kinds: list[Any]
    weight: float
    values: dict[int, Any]


@final
class Own:
    """What the shards of this process come to.

    Leaves under None, "mean", "sum", "max" and "min" become those of all processes, the others are those of this one.
    Without shards there is nothing, until the `outline` of another process is known.

    Attributes:
        weight: What this process counts in means.
        means: Which tensors are means over processes, and `summed` which become those of all by a sum.
        values: What is no tensor, or an integer under "mean": it is the same everywhere, or an error.
        needs_all: Whether it has to be known which processes have shards.
    """

    def __init__(self, out: Joined, device: torch.device, where: str) -> None:
        self._name, self._where, self._device = out.name, where, device
        self.weight = 0.0 if out.weights is None else float(sum(out.weights))
        self.flat: Flat | None = None
        self.leaves: list[Any] = []
        self.kinds: list[Any] = []
        self.means: list[int] = []
        self.summed: list[int] = []
        self.values: dict[int, Any] = {}
        self.needs_all = False
        if not out.shards:
            return
        flat = flatten(out.shards[0], out.name, out.dims, "out_dims", where)
        resolve_specs(flat)
        shards = [_widened(shard, flat) for shard in out.shards]
        weights = out.weights if out.weights is None or self.weight else [1.0] * len(out.weights)  # only others count
        specs = unflatten(flat.structure, flat.specs)
        joined = join(shards, specs, weights, device, out.name, where, out.hint)
        leaves = leaves_up_to(flat.structure, joined)
        self._set(flat, leaves, [_kind(leaf, spec) for leaf, spec in zip(flat.leaves, flat.specs, strict=True)])
        if out.weights is None and self.means:
            path = flat.path(self.means[0])
            raise ValueError(f"{where}: {path} has out_dim 'mean', but rows are not known: pass weights")

    def _set(self, flat: Flat, leaves: list[Any], kinds: list[Any]) -> None:
        self.flat, self.leaves, self.kinds = flat, leaves, kinds
        for i, (spec, kind) in enumerate(zip(flat.specs, kinds, strict=True)):
            if not isinstance(kind, LeafKind):  # it is returned once, also under an int
                if spec in (*_GLOBAL, "stack") or type(spec) is int:
                    self.values[i] = leaves[i]
            elif spec == "mean" and not is_inexact(leaves[i]):
                self.values[i] = leaves[i]
            elif spec in _GLOBAL:
                (self.means if spec == "mean" else self.summed).append(i)
                self.needs_all = self.needs_all or spec in (None, "max", "min")

    @property
    def key(self) -> Any:
        """What it looks like here."""
        return self.flat and (self.flat.structure, repr(self.flat.specs), *self.kinds)

    @property
    def outline(self) -> Outline | None:
        flat = self.flat
        if flat is None:
            return None
        tree = unflatten(flat.structure, [0] * len(self.kinds))
        values = {i: _sendable(value) for i, value in self.values.items()}
        return Outline(tree, flat.specs, self.kinds, self.weight, values)

    @property
    def text(self) -> str:
        """What of it has to be the same everywhere, a line for each leaf; nothing without shards."""
        flat = self.flat
        if flat is None:
            return ""
        each = enumerate(zip(self.leaves, self.kinds, flat.specs, strict=True))
        lines = [f"{flat.path(i)} {_said(kind)} under {spec!r}{_needs(leaf)}" for i, (leaf, kind, spec) in each]
        return "\n".join([*lines, str(flat.structure)])

    def take(self, outline: Outline) -> None:
        """Have leaves of no rows, as another process says that they are."""
        leaves = [_empty(*pair, self._device) for pair in zip(outline.kinds, outline.specs, strict=True)]
        self._set(flatten(outline.tree, self._name)._replace(specs=outline.specs), leaves, outline.kinds)

    def agree(self, ranks: Sequence[int], outlines: Sequence[Outline]) -> None:
        """Values are the same in all processes that have shards, and become those of this one."""
        if self.flat is None:
            self.take(outlines[0])
        assert self.flat is not None
        for i in self.values:
            first = outlines[0].values[i]
            for rank, outline in zip(ranks, outlines, strict=True):
                self._check_same(self.flat.path(i), first, outline.values[i], ranks[0], rank)
            self.leaves[i] = first.to(self._device) if isinstance(first, Tensor) else first

    def _check_same(self, path: str, first: Any, value: Any, first_rank: int, rank: int) -> None:
        if isinstance(first, Tensor):
            if not torch.equal(first, value):
                raise ValueError(
                    f"{self._where}: {path} is {first.dtype}, which has no 'mean', and differs between processes: "
                    "choose 'sum', 'max', 'min' or 'list', or return a float"
                )
        elif not same_value(value, first):
            raise ValueError(
                f"{self._where}: {path} differs between processes: {first} in process {first_rank}, {value} in "
                f"process {rank}. A value that is no tensor is returned once: return a tensor, or choose 'list'"
            )

    def terms(self, rank: int, size: int, active: Sequence[int]) -> list[Tensor]:
        """What is summed over processes: means, then the others. Means have still to be weighted."""
        assert self.flat is not None
        found = [self.leaves[i] for i in self.means]
        for i in self.summed:
            leaf, spec = self.leaves[i], self.flat.specs[i]
            if spec is None and rank != active[0]:
                leaf = _nothing(leaf)
            elif spec in ("max", "min"):
                leaf = torch.stack([leaf if other == rank else torch.zeros_like(leaf) for other in range(size)])
            found.append(leaf)
        return found

    def put(self, sums: Sequence[Tensor], active: Sequence[int]) -> Tree:
        """The tree with these in the places of the terms."""
        assert self.flat is not None
        leaves = self.leaves
        for i, x in zip((*self.means, *self.summed), sums, strict=True):
            spec = self.flat.specs[i]
            if spec in ("max", "min"):
                x = x[list(active)].amax(0) if spec == "max" else x[list(active)].amin(0)
            leaves[i] = x
        pairs = zip(leaves, self.kinds, strict=True)
        cast = [x.to(kind.dtype) if isinstance(kind, LeafKind) and isinstance(x, Tensor) else x for x, kind in pairs]
        return unflatten(self.flat.structure, cast)

    def across(self, tree: Tree, epoch: Epoch) -> Tree:
        """The tree with the rows of all processes."""
        assert self.flat is not None
        leaves = leaves_up_to(self.flat.structure, tree)
        for i, (leaf, spec) in enumerate(zip(leaves, self.flat.specs, strict=True)):
            if spec in ("list", "items"):
                leaves[i] = type(leaf)(itertools.chain.from_iterable(objects(epoch, leaf, Tag("gather"))))
            elif isinstance(leaf, Tensor) and (type(spec) is int or spec == "stack"):
                leaves[i] = concat(all_of(epoch, leaf, "gather"), 0 if spec == "stack" else spec)
        return unflatten(self.flat.structure, leaves)

    @property
    def digest(self) -> int | None:
        """A number that processes have where all values are the same; None without shards."""
        if self.flat is None:
            return None
        found = 0
        for leaf in self.values.values():
            data = bytes_of(_sendable(leaf).contiguous()) if isinstance(leaf, Tensor) else repr(leaf).encode()
            found = zlib.crc32(data, found)
        return found


def weighted(leaf: Tensor, weight: float) -> Tensor:
    """A mean times what it counts."""
    return leaf * (weight * SCALE) if weight else _nothing(leaf)


def _nothing(leaf: Tensor) -> Tensor:
    """Zeros, also of NaN, with a graph that leads to the leaf."""
    return leaf.masked_fill(torch.tensor(True, device=leaf.device), 0) if leaf.requires_grad else torch.zeros_like(leaf)


def _widened(shard: Tree, flat: Flat) -> Tree:
    """A shard in which half precision that will be summed is wide until the end."""
    leaves = leaves_up_to(flat.structure, shard)
    for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True)):
        if spec in ("mean", "sum") and isinstance(leaf, Tensor) and leaf.dtype is not accumulator(leaf.dtype):
            leaves[i] = leaf.to(accumulator(leaf.dtype))
    return unflatten(flat.structure, leaves)


def _kind(leaf: Any, spec: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)() if spec == "items" else type(leaf)
    if spec == "list":  # they stay here, and may be of any kind
        return list
    shape = list(leaf.shape)
    if type(spec) is int:
        shape[spec] = 0
    return LeafKind(leaf.dtype, tuple(shape))


def _sendable(leaf: Any) -> Any:
    return leaf.detach().cpu().resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf


def _said(kind: Any) -> str:
    if not isinstance(kind, LeafKind):
        return ""
    return f"{str(kind.dtype).removeprefix('torch.')}{list(kind.shape)}"


def _needs(leaf: Any) -> str:
    return ", requires grad" if isinstance(leaf, Tensor) and leaf.requires_grad else ""


def _empty(kind: Any, spec: Any, device: torch.device) -> Any:
    """A leaf of no shards."""
    if spec == "list":
        return []
    if spec == "items":
        return type(kind)()
    if not isinstance(kind, LeafKind):
        return None
    shape = (0, *kind.shape) if spec == "stack" else kind.shape
    dtype = accumulator(kind.dtype) if spec in ("mean", "sum") else kind.dtype
    return torch.zeros(shape, dtype=dtype, device=device)
