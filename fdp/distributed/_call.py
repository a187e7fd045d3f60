"""The part of a process in a call on a mesh: it begins together, and ends together."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._placement.moves import layers
from fdp._placement.peers import Joined, PeerCall, Say, Summed
from fdp._placement.sharded import leaf_tensors
from fdp._placement.slot import AXES, Slot
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.tree import Flat, map_tensors, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._autograd import AllReduce, GradientSum, is_tracked
from fdp.distributed._chain import Chain, Link
from fdp.distributed._epoch import Epoch, Tag, untransformed
from fdp.distributed._exchange import MOST, meet, objects, same_of, sums
from fdp.distributed._outputs import Own
from fdp.distributed._sum import SCALE
from fdp.distributed._table import MeshSlot, Once, Table


class Same(NamedTuple):
    """What of a call is the same in all processes, as a number and as text; a `seed` may change from call to call."""

    number: int
    say: Callable[[], str]
    seed: Any = None


class MeshCall(PeerCall):
    """See `PeerCall`. `flats` are the arguments of this process, whose shards have so many `rows`.

    It `is_eager` if it begins together.
    """

    is_eager = True

    def __init__(
        self,
        epoch: Epoch,
        slots: Sequence[int],
        where: str,
        kind: Same,
        rows: Sequence[int],
        flats: Sequence[Flat] = (),
    ) -> None:
        self.epoch, self.slots, self.where, self.kind, self.flats = epoch, slots, where, kind, flats
        self._rows = list(rows)
        self.number = 0 if AXES.get() else epoch.calls  # calls inside others have no order
        self.table = Once(self._ask)
        self.has_asked = False
        self.chain = Chain()
        self._count = 0.0
        self._whole = Once(self._sum_of_counts)
        self._is_transformed = torch_private.is_transformed() or torch_private.is_forward_mode()

    # ---- rows and places

    def _ask(self) -> Table:
        """The rows of all processes, which are all here, for the same."""
        same, most = same_of((self.number, tuple(self.slots), self.kind.number, self.kind.seed)), max(self.slots)
        tag = Tag(self.where if self.is_eager else f"the slots of {self.where}", same, self.say)
        if most < MOST:
            table = meet(self.epoch, tag, [len(self._rows), *self._rows, *[0] * (most - len(self._rows))])
            sizes = [row[1 : 1 + row[0]] for row in table]
        else:
            meet(self.epoch, tag)
            sizes = objects(self.epoch, self._rows, self.where)
        if not any(sizes):  # no rows at all are one empty shard
            sizes[0] = [0]
        return Table(sizes, self.epoch.rank)

    def say(self) -> str:
        """What of the call has to be the same everywhere, for people."""
        rows = "" if self._rows else "\nno rows here"
        return f"slots {tuple(self.slots)}\n{self.kind.say()}\ncall {self.number}{rows}"

    def asked(self) -> Table:
        """The same, for somebody who wants to know his place."""
        self.has_asked = True
        return self.table()

    @property
    def is_active(self) -> bool:
        """Whether this process has shards."""
        return len(self._rows) > 0 or (self.table.is_known and len(self.table().sizes[self.epoch.rank]) > 0)

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        most, rank = sum(self.slots), self.epoch.rank
        return [MeshSlot(slot, most, rank, self) for slot in own] if self.is_active else []

    def has_others(self) -> bool:
        return True

    def rows(self, own: int) -> int:
        return self.asked().rows

    def whole(self, own: float, *, counts: bool) -> float:
        if not counts:
            return self.table().rows
        self._count = own
        return self._whole()

    def _sum_of_counts(self) -> float:
        name = f"count of {self.where}"
        meet(self.epoch, Tag(name, same_of(self.number)))
        return sums(self.epoch, [torch.tensor(self._count, dtype=torch.float64)], name)[0].item()

    # ---- collectives, and gradients around the call

    def enter(self) -> None:
        tensors = self._inputs()
        is_differentiated = torch.is_grad_enabled() and any(layer.requires_grad for x in tensors for layer in layers(x))
        if not all(self.table().sizes) and (is_differentiated or self._is_transformed):
            raise RuntimeError(f"{self.where}: {_NO_ROWS}")
        if is_differentiated:
            _enter(self.flats, self, None if self._is_transformed else self.chain)

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        if not self._is_transformed:
            self.chain.begins_with(leaves)

    def ends(self) -> list[Tensor]:
        return self.chain.ends()

    def tie(self, tree: Tree) -> Tree:
        """What comes out; a backward from it comes to all collectives."""
        tensors = tensors_in(tree)
        each = iter(self.chain.tied(tensors))
        self.chain.end()
        self.flats = ()  # the graph holds this object
        return map_tensors(lambda _: next(each), tree)

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        if self._is_transformed:
            raise RuntimeError(_TRANSFORMED.format(operation.name))
        table = self._all_with_rows(operation.name)
        link = Link(self.epoch, table, self.number, operation, len(columns[0]), key, say)
        return self.chain.combine(link, columns)

    def _all_with_rows(self, name: str) -> Table:
        table = self.asked()
        if not all(table.sizes):
            raise RuntimeError(f"{name}: {_NO_ROWS}")
        return table

    def everywhere(self, values: list[Any], name: str, same: object = None, say: Say = str) -> list[Any]:
        self._all_with_rows(name)
        meet(self.epoch, Tag(name, same_of((self.number, same)), say))
        return list(itertools.chain.from_iterable(objects(self.epoch, values, name)))

    # ---- the end

    def stay(self, tree: Tree) -> Tree:
        self.meet_at_end([])
        return self.tie(tree)

    def join(self, out: Joined, device: torch.device, where: str) -> Tree:
        return self.joined(out, device, where)[0]

    def joined(self, out: Joined, device: torch.device, where: str) -> tuple[Tree, Own]:
        """The same, with what is known of its leaves."""
        own = Own(out, device, where)
        self._check_captured(out.shards, ())
        return self.tie(self._finish([own], [])[0])[0], own

    def reduce(
        self,
        loss: Joined,
        aux: Joined | None,
        gradients: Summed,
        aliases: Sequence[Tensor],
        device: torch.device,
        where: str,
    ) -> tuple[Tensor, Tree]:
        each, grads = [Own(out, device, where) for out in (loss, aux) if out is not None], gradients.sums()
        self._check_captured([loss.shards, None if aux is None else aux.shards, grads], aliases)
        (value, *rest), grads = self.tie(self._finish(each, grads))
        gradients.replace_sums(grads)
        return value, rest[0] if rest else None

    def meet_at_end(self, each: Sequence[Own], more: Sequence[Tensor] = ()) -> tuple[list[int], bool]:
        """Which processes have shards, and whether any has asked for places. All know what it looks like then."""
        added = [(x.dtype, tuple(x.shape)) for x in more]
        needs = None if self.chain.has_gone_back else [own.needs for own in each]
        same = same_of((self.number, self.kind.number, [own.same for own in each], needs, added))
        name = f"the end of {self.where}"

        def say() -> str:
            return "\n".join([self.say(), *(own.say() for own in each), *(f"gradient {list(s)}" for _, s in added)])

        table = meet(self.epoch, Tag(name, same if self.is_active else 0, say), [self.is_active, self.has_asked])
        active = [rank for rank, (is_active, _) in enumerate(table) if is_active]
        if each and len(active) < self.epoch.size:
            every = objects(self.epoch, [own.outline for own in each] if self.is_active else None, name)
            for own, outline in zip(each, every[active[0]], strict=True):
                if not self.is_active:
                    own.take(outline)
        return active, any(has_asked for _, has_asked in table)

    def _finish(self, each: Sequence[Own], more: Sequence[Tensor]) -> tuple[list[Tree], list[Tensor]]:
        """The results of all processes, and the sums of `more`."""
        active, _ = self.meet_at_end(each, more)
        terms: list[Tensor] = []
        for own in each:
            leaves, weight = own.leaves, own.weight * SCALE
            terms += [leaves[i] * weight if own.weight else torch.zeros_like(leaves[i]) for i in own.means]
            terms += [leaves[i] for i in own.sums]
        rest, totals = iter(self._total([*terms, *more])), [1.0] * len(each)
        if any(own.means for own in each):
            with untransformed():
                weights = torch.tensor([own.weight * SCALE for own in each], dtype=torch.float64)
                totals = sums(self.epoch, [weights], f"the end of {self.where}")[0].tolist()
        for own, total in zip(each, totals, strict=True):
            for i in own.means:
                own.leaves[i] = next(rest) / total
            for i in own.sums:
                own.leaves[i] = next(rest)
        return [own.finish(self.epoch, self.chain, active) for own in each], list(rest)

    def _total(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        name = f"the end of {self.where}"
        if is_tracked(tensors) or self.chain.has_gone_back:
            return self.chain.through(functools.partial(AllReduce.apply, self.epoch, name), tensors)
        return sums(self.epoch, tensors, name)

    def _inputs(self) -> list[Tensor]:
        return [tensor for flat in self.flats for leaf in flat.leaves for tensor in leaf_tensors(leaf)]

    def _check_captured(self, outputs: Tree, aliases: Sequence[Tensor]) -> None:
        """A gradient goes through arguments only: of what is captured each process would have a part."""
        inputs = [*self._inputs(), *aliases]  # aliases stand for some of them
        found = captured(_layers_of(tensors_in(outputs)), _layers_of(inputs))
        if any(x.numel() for x in found):  # a token has no elements
            raise ValueError(CAPTURED)


CAPTURED = (
    "the function uses a tensor that requires grad and is none of its arguments. Each process would have a part of its "
    "gradient only: pass it in an argument, or detach it"
)
_TRANSFORMED = (
    "{}: a call over several processes, with collectives, cannot be transformed by torch.func from outside, since what "
    "is transformed stays in its process. Transform inside the mapped function"
)
_NO_ROWS = (
    "a process without rows cannot follow collectives, nor gradients or transforms around the call. Give every process "
    "rows (drop_last=True, or padding with count=0), or call it under torch.no_grad() if no gradient is needed"
)


def _layers_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(map(layers, tensors)))


def _enter(flats: Sequence[Flat], call: MeshCall, chain: Chain | None) -> None:
    """Mark what is whole on every slot, and so the same in all processes: its gradient is the sum over them."""
    places: list[tuple[Flat, int]] = [
        (flat, i)
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if isinstance(leaf, Tensor)
        and (spec is None or leaf.ndim == 0)
        and any(layer.requires_grad for layer in layers(leaf))
    ]
    if not places:
        return
    distinct = {id(flat.leaves[i]): flat.leaves[i] for flat, i in places}
    node = functools.partial(GradientSum.apply, call.epoch, f"{call.where}, call {call.number}", None)
    leaves = list(distinct.values())
    entered = dict(zip(distinct, node(*leaves) if chain is None else chain.enter(node, leaves), strict=True))
    for flat, i in places:
        flat.leaves[i] = entered[id(flat.leaves[i])]
