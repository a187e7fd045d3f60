"""What the shards of this process come to, and what that and what others have come to is together."""

import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._placement.check_outputs import same_value
from fdp._placement.join import join
from fdp._placement.moves import accumulator, bytes_of, concat, is_inexact
from fdp._placement.peers import Joined
from fdp._trees.tree import Flat, flatten, leaves_up_to, unflatten
from fdp._trees.types import Tree
from fdp.distributed._autograd import AllGather, is_tracked
from fdp.distributed._chain import Chain
from fdp.distributed._epoch import Epoch
from fdp.distributed._exchange import all_of, objects

_GLOBAL = (None, "mean", "sum", "max", "min")


class LeafKind(NamedTuple):
    """A tensor, for a process that has none of it; `dtype` is that of the result."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@final
class Own:
    """What the shards of this process come to.

    Leaves under None, "mean", "sum", "max" and "min" become those of all processes, the others are those of this one.
    Without shards there is nothing, until the `outline` of another process is known.

    Attributes:
        leaves: What each leaf has come to, wide where it is to be added up.
        weight: What this process counts in means.
        means: Which leaves are means over processes, `sums` which are sums, and `rest` which others are of all.
        needs: Which require grad here.
    """

    def __init__(self, out: Joined, device: torch.device, where: str) -> None:
        self._name, self._where, self._device = out.name, where, device
        self.leaves: list[Any] = []
        self.weight = 0.0 if out.weights is None else float(sum(out.weights))
        self.kinds: list[Any] = []
        self.means: list[int] = []
        self.sums: list[int] = []
        self.rest: list[int] = []
        self.needs: list[bool] = []
        self.flat: Flat | None = None
        if not out.shards:
            return
        flat = flatten(out.shards[0], out.name, out.dims, "out_dims", where)
        for i, spec in enumerate(flat.specs):
            if callable(spec):
                flat.specs[i] = spec(flat.leaves[i]) if isinstance(flat.leaves[i], Tensor) else 0
        shards = [_widened(shard, flat) for shard in out.shards]
        weights = out.weights if out.weights is None or self.weight else [1.0] * len(out.weights)  # only others count
        specs = unflatten(flat.structure, flat.specs)
        joined = join(shards, specs, weights, device, out.name, where, out.hint)
        self.leaves = leaves_up_to(flat.structure, joined)
        self.needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat.leaves]
        self._set(flat, [_kind(leaf, spec) for leaf, spec in zip(flat.leaves, flat.specs, strict=True)])
        if out.weights is None and self.means and any(flat.specs[i] == "mean" for i in self.means):
            path = flat.path(self.means[0])
            raise ValueError(f"{where}: {path} has out_dim 'mean', but rows are not known: pass weights")

    def _set(self, flat: Flat, kinds: list[Any]) -> None:
        self.flat, self.kinds = flat, kinds
        are_tensors = [isinstance(kind, LeafKind) for kind in kinds]
        each = list(enumerate(zip(flat.specs, are_tensors, self.leaves, strict=True)))
        self.means = [i for i, (spec, is_tensor, x) in each if is_tensor and spec == "mean" and is_inexact(x)]
        self.sums = [i for i, (spec, is_tensor, _) in each if is_tensor and spec == "sum"]
        summed = {*self.means, *self.sums}
        plain = (*_GLOBAL, "stack")  # a value that is no tensor is returned once, also under an int
        self.rest = [
            i
            for i, (spec, is_tensor, _) in each
            if i not in summed and (spec in _GLOBAL if is_tensor else spec in plain or type(spec) is int)
        ]

    @property
    def outline(self) -> Any:
        """All but the values."""
        flat = self.flat
        return flat and (unflatten(flat.structure, [0] * len(self.kinds)), flat.specs, self.kinds)

    def take(self, outline: Any) -> None:
        """Have leaves of no rows, as another process says that they are."""
        tree, specs, kinds = outline
        self.leaves = [_empty(kind, spec, self._device) for kind, spec in zip(kinds, specs, strict=True)]
        self._set(flatten(tree, self._name)._replace(specs=specs), kinds)

    @property
    def same(self) -> Any:
        """What of it is the same in all processes; None if that is not known here."""
        flat = self.flat
        if flat is None:
            return None
        each = zip(self.kinds, flat.specs, strict=True)
        kinds = [kind if isinstance(kind, LeafKind) and spec != "list" else None for kind, spec in each]
        return str(flat.structure), repr(flat.specs), kinds

    def say(self) -> str:
        """The same for people."""
        flat = self.flat
        if flat is None:
            return "nothing, as there are no rows"
        each = enumerate(zip(self.kinds, flat.specs, strict=True))
        tracked = [", requires grad" if need else "" for need in self.needs or [False] * len(self.kinds)]
        return "\n".join(f"{flat.path(i)} {_said(kind)} under {spec!r}{tracked[i]}" for i, (kind, spec) in each)

    def finish(self, epoch: Epoch, chain: Chain, active: Sequence[int]) -> Tree:
        """The tree; `active` processes have shards. Means and sums are in their places already."""
        flat = self.flat
        assert flat is not None
        name, leaves = f"the end of {self._where}", self.leaves
        tracked = [i for i in self.rest if isinstance(leaves[i], Tensor) and is_tracked([leaves[i]])]
        plain = [i for i in self.rest if i not in tracked]
        columns: dict[int, Any] = {}
        if plain:
            every = objects(epoch, [_sendable(leaves[i]) for i in plain], name)
            columns = {i: [every[rank][k] for rank in active] for k, i in enumerate(plain)}
        for i in tracked:
            (parts,) = chain.through(functools.partial(AllGather.apply, epoch, name), [leaves[i]])
            columns[i] = [parts[rank] for rank in active]
        for i, column in columns.items():
            leaves[i] = self._of_all(flat.path(i), flat.specs[i], column, active)
        return self.tree()

    def tree(self) -> Tree:
        """That of the leaves as they are now."""
        assert self.flat is not None
        pairs = zip(self.leaves, self.kinds, strict=True)
        leaves = [x.to(kind.dtype) if isinstance(kind, LeafKind) and isinstance(x, Tensor) else x for x, kind in pairs]
        return unflatten(self.flat.structure, leaves)

    def _of_all(self, path: str, spec: Any, column: Sequence[Any], active: Sequence[int]) -> Any:
        """A leaf of all processes, which is no mean and no sum."""
        first = column[0]
        if isinstance(first, Tensor) and spec in ("max", "min"):
            return (torch.stack(list(column)).amax(0) if spec == "max" else torch.stack(list(column)).amin(0)).to(
                self._device
            )
        for rank, value in zip(active, column, strict=True):
            if isinstance(first, Tensor) and spec == "mean" and not torch.equal(first, value):
                raise ValueError(
                    f"{self._where}: {path} is {first.dtype}, which has no 'mean', and differs between processes: "
                    "choose 'sum', 'max', 'min' or 'list', or return a float"
                )
            if not isinstance(first, Tensor) and not same_value(value, first):
                raise ValueError(
                    f"{self._where}: {path} differs between processes: {first} in process {active[0]}, {value} in "
                    f"process {rank}. A value that is no tensor is returned once: return a tensor, or choose 'list'"
                )
        return first.to(self._device) if isinstance(first, Tensor) else first

    @property
    def digest(self) -> int | None:
        """A number that processes have where they agree on all of the rest; None where they have to exchange it."""
        assert self.flat is not None
        found = 0
        for i in self.rest:
            leaf = self.leaves[i]
            if isinstance(leaf, Tensor) and self.flat.specs[i] != "mean":
                return None
            data = bytes_of(_sendable(leaf).contiguous()) if isinstance(leaf, Tensor) else repr(leaf).encode()
            found = zlib.crc32(data, found)
        return found

    def joined(self, tree: Tree, epoch: Epoch) -> Tree:
        """The tree with the rows of all processes."""
        flat = self.flat
        assert flat is not None
        leaves = leaves_up_to(flat.structure, tree)
        for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True)):
            if spec in ("list", "items"):
                leaves[i] = type(leaf)(itertools.chain.from_iterable(objects(epoch, leaf, "gather")))
            elif isinstance(leaf, Tensor) and (type(spec) is int or spec == "stack"):
                leaves[i] = concat(all_of(epoch, leaf, "gather"), 0 if spec == "stack" else spec)
        return unflatten(flat.structure, leaves)


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
    shape = list(leaf.shape)
    if type(spec) is int:
        shape[spec] = 0
    return LeafKind(leaf.dtype, tuple(shape))


def _sendable(leaf: Any) -> Any:
    return leaf.detach().cpu().resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf


def _said(kind: Any) -> str:
    return f"{str(kind.dtype).removeprefix('torch.')}{list(kind.shape)}" if isinstance(kind, LeafKind) else str(kind)


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
