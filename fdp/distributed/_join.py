"""From shards to one tree, where other processes have shards too."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._placement.check_outputs import same_value
from fdp._placement.join import join
from fdp._placement.moves import accumulator, concat, is_inexact
from fdp._trees.tree import Flat, flatten, leaves_up_to, unflatten
from fdp._trees.types import Dims, Tree
from fdp.distributed._agreement import Agreement
from fdp.distributed._autograd import AllGather, ZeroGradients, total
from fdp.distributed._chain import Chain
from fdp.distributed._communicator import Communicator
from fdp.distributed._session import Tag

_GLOBAL = (None, "mean", "sum", "max", "min")


class _Shape(NamedTuple):
    """A tensor, for a process that has none of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@final
class PartialResult:
    """What the shards of this process come to; `finish` adds what those of the others do.

    `weights` are for means, and `whole` is the sum over all processes; the `first` leaf may have others.

    Values under None, "mean", "sum", "max" and "min" are those of all processes, the others those of this one.
    """

    def __init__(
        self,
        shards: Sequence[Tree],
        dims: Dims,
        weights: Sequence[float] | None,
        whole: float | None,
        device: torch.device,
        where: str,
        name: str = "out",
        *,
        first: tuple[Sequence[float] | None, float | None] | None = None,
    ) -> None:
        self._device, self._name, self._where = device, name, where
        self._flat: Flat | None = None
        self._problem: str | None = None
        self._leaves: list[Any] = []
        if not shards:
            return
        flat = self._flat = flatten(shards[0], name, dims, "out_dims", where)
        for i, spec in enumerate(flat.specs):
            if callable(spec):
                flat.specs[i] = spec(flat.leaves[i]) if isinstance(flat.leaves[i], Tensor) else 0
        shards = [_widened(shard, flat) for shard in shards]
        local = join(shards, unflatten(flat.structure, flat.specs), _counted(weights, whole), device, name, where)
        self._leaves = leaves_up_to(flat.structure, local)
        if first is not None and first[0] is not weights:
            column = [leaves_up_to(flat.structure, shard)[0] for shard in shards]
            self._leaves[0] = join(column, flat.specs[0], _counted(*first), device, name, where)
        for i, (leaf, spec) in enumerate(zip(self._leaves, flat.specs, strict=True)):
            if spec != "mean" or not isinstance(leaf, Tensor) or not is_inexact(leaf):
                continue
            parts, all_parts = first if first is not None and i == 0 else (weights, whole)
            if parts is None or all_parts is None:
                raise ValueError(f"{where}: {flat.path(i)} has out_dim 'mean', but rows are not known: pass weights")
            self._leaves[i] = leaf * (sum(parts) / all_parts) if sum(parts) else torch.zeros_like(leaf)

    @property
    def kind(self) -> Any:
        """What of it is the same in all processes."""
        flat = self._flat
        assert flat is not None
        kinds = [_kind(leaf, spec) for leaf, spec in zip(flat.leaves, flat.specs, strict=True)]
        each = zip(kinds, flat.specs, strict=True)
        shapes = [kind if isinstance(kind, _Shape) and spec != "list" else None for kind, spec in each]
        return flat.structure, flat.specs, shapes

    def tag(self, more: Sequence[Tensor] = (), *, may_differ: bool = False) -> Tag:
        """What has to be the same in all processes; `more` tensors are summed. What requires grad `may_differ`."""
        flat = self._flat
        if flat is None:
            return Tag(f"the end of {self._where}")
        needs = [not may_differ and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat.leaves]
        added = [(x.dtype, tuple(x.shape)) for x in more]  # not the tensors: nobody else is to refer to them

        def say() -> str:
            each = enumerate(zip(flat.leaves, flat.specs, strict=True))
            tracked = [", requires grad" if need else "" for need in needs]
            said = [f"{flat.path(i)} {_said(_kind(leaf, spec))} under {spec!r}{tracked[i]}" for i, (leaf, spec) in each]
            return "\n".join(said + [f"gradient {list(shape)}" for _, shape in added])

        return Tag(f"the end of {self._where}", repr((self.kind, needs, added)), say)

    def finish(
        self,
        across: Agreement,
        chain: Chain,
        inputs: Sequence[Tensor] = (),
        more: Sequence[Tensor] = (),
        ours: Sequence[bool] = (),
        sent_as: torch.dtype | None = None,
    ) -> tuple[Tree, list[Tensor]]:
        """The tree, and the sums of `more`, of which some are `ours` to overwrite, and all may be `sent_as` a dtype.

        In a process without shards it depends on the `inputs`.
        """
        summed = list(more)
        flat = self._flat
        first: Any = None
        exchanged = self._skeletons(across, any(x.requires_grad for x in more))
        if flat is None:
            first = next(skeleton for skeleton in exchanged if skeleton is not None)
            self._leaves = [_empty(kind, spec, self._device) for kind, spec in first[1]]
            structure, specs, flags = flatten(first[0], self._name).structure, [spec for _, spec in first[1]], first[2]
        else:
            structure, specs, flags = flat.structure, flat.specs, []
        if across.session is not None and flat is not None:
            summed = self._combine(across.session.comm, chain, flat, more, ours, sent_as)
        if flat is not None:
            pairs = zip(self._leaves, flat.leaves, strict=True)
            self._leaves = [x.to(own.dtype) if isinstance(x, Tensor) else x for x, own in pairs]
        if not across.table.is_whole:
            position = across.table.ranks[0]
            for i, (leaf, spec) in enumerate(zip(self._leaves, specs, strict=True)):
                if spec in _GLOBAL and isinstance(leaf, Tensor):
                    self._leaves[i] = _shared(leaf, across.everybody.comm, position, across.is_active, self._where)
            summed = [_shared(x, across.everybody.comm, position, across.is_active, self._where) for x in summed]
        if self._problem is not None:  # said when nobody waits any more
            raise ValueError(self._problem)
        leaves = self._leaves
        inputs = [x for x in inputs if x.requires_grad]
        if not across.is_active and inputs and torch.is_grad_enabled():
            tensors = [i for i, needs in enumerate(flags) if needs and isinstance(leaves[i], Tensor)]
            if first is not None and first[3]:
                summed = list(ZeroGradients.apply(len(summed), *summed, *inputs))
            tied = ZeroGradients.apply(len(tensors), *[leaves[i] for i in tensors], *inputs)
            for i, leaf in zip(tensors, tied, strict=True):
                leaves[i] = leaf
        return unflatten(structure, leaves), summed

    def joined(self, tree: Tree, comm: Communicator) -> Tree:
        """The tree with the rows of all processes."""
        flat = self._flat
        assert flat is not None
        leaves = leaves_up_to(flat.structure, tree)
        for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True)):
            if spec in ("list", "items"):
                leaves[i] = type(leaf)(itertools.chain.from_iterable(comm.objects(leaf, "gather")))
            elif isinstance(leaf, Tensor) and (type(spec) is int or spec == "stack"):
                leaves[i] = concat(comm.all(leaf, "gather"), 0 if spec == "stack" else spec)
        return unflatten(flat.structure, leaves)

    def _combine(
        self,
        comm: Communicator,
        chain: Chain,
        flat: Flat,
        more: Sequence[Tensor],
        ours: Sequence[bool],
        sent_as: torch.dtype | None,
    ) -> list[Tensor]:
        """Add up what the processes have."""
        leaves, name = self._leaves, f"the end of {self._where}"
        summed = [
            i
            for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True))
            if isinstance(leaf, Tensor) and (spec == "sum" or (spec == "mean" and is_inexact(leaf)))
        ]
        dtypes = [None] * len(summed) + [sent_as] * len(more)
        found = total(comm, name, chain, [*(leaves[i] for i in summed), *more], [*[False] * len(summed), *ours], dtypes)
        for i, x in zip(summed, found, strict=False):
            leaves[i] = x
        rest = found[len(summed) :]
        for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True)):
            if i in summed or not isinstance(leaf, Tensor) or spec not in _GLOBAL:
                continue
            (parts,) = chain.through(functools.partial(AllGather.apply, comm, name), [leaf])
            if spec == "mean" and not all(torch.equal(parts[0], part) for part in parts):
                self._problem = (
                    f"{self._where}: {flat.path(i)} is {leaf.dtype}, which has no 'mean', and differs between "
                    "processes: choose 'sum', 'max', 'min' or 'list', or return a float"
                )
            leaves[i] = parts.amax(0) if spec == "max" else parts.amin(0) if spec == "min" else parts[0]
        return rest

    def _skeletons(self, across: Agreement, needs: bool) -> list[Any]:
        """What is no tensor, and where a process has no shards what all of it looks like: from every process."""
        flat = self._flat
        plain = flat is not None and any(
            not isinstance(leaf, Tensor) and spec not in ("list", "items")
            for leaf, spec in zip(flat.leaves, flat.specs, strict=True)
        )
        if across.table.is_whole and not plain:
            return []
        own = None
        if flat is not None:
            kinds = [_kind(leaf, spec) for leaf, spec in zip(flat.leaves, flat.specs, strict=True)]
            flags = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat.leaves]
            own = unflatten(flat.structure, [0] * len(kinds)), list(zip(kinds, flat.specs, strict=True)), flags, needs
        every = across.everybody.comm.objects(own, f"the end of {self._where}")
        skeletons: dict[int, Any] = {rank: each for rank, each in enumerate(every) if each is not None}
        first = next(iter(skeletons.values()))
        for rank, skeleton in skeletons.items():
            for i, (kind, spec) in enumerate(skeleton[1]):
                if (
                    not isinstance(kind, _Shape)
                    and spec not in ("list", "items")
                    and not same_value(kind, first[1][i][0])
                ):
                    raise ValueError(
                        f"{self._where}: {self._name if flat is None else flat.path(i)} differs between processes: "
                        f"{first[1][i][0]} in process {across.table.ranks[0]}, {kind} in process {rank}. A value that "
                        "is no tensor is returned once: return a tensor, or choose 'list'"
                    )
        return every


def _counted(weights: Sequence[float] | None, whole: float | None) -> Sequence[float] | None:
    """Weights with which there is a mean of this process, although only the others count."""
    return weights if weights is None or sum(weights) or not whole else [1.0] * len(weights)


def _widened(shard: Tree, flat: Flat) -> Tree:
    """A shard in which half precision that will be summed is wide until the end."""
    leaves = leaves_up_to(flat.structure, shard)
    for i, (leaf, spec) in enumerate(zip(leaves, flat.specs, strict=True)):
        if spec in ("mean", "sum") and isinstance(leaf, Tensor) and leaf.dtype is not accumulator(leaf.dtype):
            leaves[i] = leaf.to(accumulator(leaf.dtype))
    return unflatten(flat.structure, leaves)


def _kind(leaf: Any, spec: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)() if spec == "items" else leaf
    shape = list(leaf.shape)
    if type(spec) is int:
        shape[spec] = 0
    return _Shape(leaf.dtype, tuple(shape))


def _said(kind: Any) -> str:
    return f"{str(kind.dtype).removeprefix('torch.')}{list(kind.shape)}" if isinstance(kind, _Shape) else str(kind)


def _empty(kind: Any, spec: Any, device: torch.device) -> Any:
    """A leaf of no shards."""
    if spec == "list":
        return []
    if spec == "items":
        return type(kind)()
    if not isinstance(kind, _Shape):
        return kind
    shape = (0, *kind.shape) if spec == "stack" else kind.shape
    return torch.zeros(shape, dtype=kind.dtype, device=device)


def _shared(leaf: Tensor, comm: Communicator, position: int, is_active: bool, where: str) -> Tensor:
    """The tensor of the first process that has shards, also in those that have none."""
    data = leaf.detach().clone(memory_format=torch.contiguous_format)
    comm.share(data, position, f"the end of {where}")
    return leaf if is_active else data
