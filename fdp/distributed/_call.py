"""The part of a process in a call on a mesh: it begins together, and ends together."""

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._placement.peers import Joined, PeerCall, Say
from fdp._placement.sharded import leaf_tensors
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.tree import Flat, map_tensors, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._autograd import AllReduce, GradientSum
from fdp.distributed._chain import Chain, Link
from fdp.distributed._exchange import MOST, meet, objects, same_of, sums
from fdp.distributed._outputs import Outline, Own, weighted
from fdp.distributed._reports import END, NO_ROWS_HERE, Tag
from fdp.distributed._sum import SCALE
from fdp.distributed._table import MeshSlot, Table
from fdp.distributed._waits_and_failures import Epoch


class Same(NamedTuple):
    """What of a call is the same in all processes, as a number and as text; a `seed` may change from call to call."""

    number: int
    say: Callable[[], str]
    seed: Any = None


class Ended(NamedTuple):
    """What all processes say at the end: those that have shards, the weight of all, and whether any asked for places.

    `outline` and `more` are what all of these say.
    """

    active: list[int]
    weight: float
    have_asked: bool
    outline: Outline | None
    more: Any


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
        self.rows_here, self.number = rows, epoch.calls
        self.has_asked = False
        self.chain = Chain()
        self._table: Table | None = None
        self._whole: float | None = None
        self._lock = threading.RLock()

    # ---- rows and places

    def table(self) -> Table:
        with self._lock:  # shards that run side by side may ask at once
            if self._table is None:
                self._table = self._ask()
            return self._table

    @property
    def is_known(self) -> bool:
        """Whether the table is."""
        return self._table is not None

    def _ask(self) -> Table:
        """The rows of all processes, which are all here, for the same."""
        same, most = same_of((self.number, tuple(self.slots), self.kind.number, self.kind.seed)), max(self.slots)
        tag = Tag(self.where if self.is_eager else f"the slots of {self.where}", same, self.say)
        own = list(self.rows_here)
        with torch_private.without_transforms():  # of the function, which asks
            if most < MOST:
                table = meet(self.epoch, tag, [len(own), *own, *[0] * (most - len(own))])
                sizes = [row[1 : 1 + row[0]] for row in table]
            else:
                sizes = objects(self.epoch, own, tag)
        if not any(sizes):  # no rows at all are one empty shard
            sizes[0] = [0]
        return Table(sizes, self.epoch.rank)

    def say(self) -> str:
        """What of the call has to be the same everywhere, for people."""
        rows = "rows here" if self.rows_here else NO_ROWS_HERE
        return f"slots {tuple(self.slots)}\n{self.kind.say()}\ncall {self.number}\n{rows}"

    def asked(self) -> Table:
        """The same, for somebody who wants to know his place."""
        self.has_asked = True
        return self.table()

    @property
    def is_active(self) -> bool:
        """Whether this process has shards."""
        return len(self.rows_here) > 0 or (self.is_known and len(self.table().sizes[self.epoch.rank]) > 0)

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
        with self._lock:
            if self._whole is None:
                self._whole = sum(objects(self.epoch, own, Tag(f"count of {self.where}", same_of(self.number))))
            return self._whole

    # ---- collectives, and gradients around the call

    def enter(self) -> bool:
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in self._inputs())):
            return False
        if not all(self.table().sizes):
            raise RuntimeError(f"{self.where}: {_NO_ROWS}")
        each = [pair for flat in self.flats for pair in zip(flat.leaves, flat.specs, strict=True)]
        found = {id(x): x for x, spec in each if _is_whole(x, spec) and x.requires_grad}
        if found:  # what is whole on every slot is the same in all processes: its gradient is the sum over them
            made = GradientSum.apply(self.epoch, f"{self.where}, call {self.number}", None, *found.values())
            entered = dict(zip(found, made, strict=True))
            for flat in self.flats:
                pairs = zip(flat.leaves, flat.specs, strict=True)
                flat.leaves[:] = [entered.get(id(x), x) if _is_whole(x, spec) else x for x, spec in pairs]
        return True

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        self.chain.begins_with(leaves)

    def ends(self) -> list[Tensor]:
        return self.chain.ends()

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        table = self._all_with_rows(operation.name)
        return self.chain.combine(Link(self.epoch, table, self.number, operation, len(columns[0]), key, say), columns)

    def _all_with_rows(self, name: str) -> Table:
        table = self.asked()
        if not all(table.sizes):
            raise RuntimeError(f"{name}: {_NO_ROWS}")
        return table

    def everywhere(self, values: list[Any], name: str, same: object = None, say: Say = str) -> list[Any]:
        self._all_with_rows(name)
        tag = Tag(name, same_of((self.number, same)), say)
        with torch_private.without_transforms():
            return list(itertools.chain.from_iterable(objects(self.epoch, values, tag)))

    # ---- the end

    def stay(self, tree: Tree) -> Tree:
        meet(self.epoch, Tag(END + self.where, same_of((self.number, self.kind.number)), self.say))
        return self._tied(tree)

    def join(self, out: Joined, device: torch.device, where: str) -> Tree:
        return self.joined(out, device, where)[0]

    def joined(self, out: Joined, device: torch.device, where: str) -> tuple[Tree, Own]:
        """The same, with what is known of its leaves."""
        own = Own(out, device, where)
        if any(x.numel() for x in captured(tensors_in(out.shards), self._inputs())):  # a token has no elements
            raise ValueError(CAPTURED)
        ended = self.exchange(own)
        terms, n = own.terms(self.epoch.rank, self.epoch.size, ended.active), len(own.means)
        terms[:n] = [weighted(x, own.weight) for x in terms[:n]]
        is_tracked = torch.is_grad_enabled() and any(x.requires_grad for x in terms)
        add = AllReduce.apply if is_tracked else _sums
        found = list(add(self.epoch, END + self.where, *terms)) if terms else []
        found[:n] = [x / (ended.weight * SCALE) for x in found[:n]]
        return self._tied(own.put(found, ended.active)), own

    def ending(self, same: int, own: Own | None, text: str = "") -> Tag:
        """Where a process is that has come to this."""
        return Tag(END + self.where, same, lambda: "\n".join([self.say(), own.text if own else "", text]))

    def exchange(self, own: Own | None, text: str = "", more: Any = None) -> Ended:
        """What all have come to, but for tensors. What is not here is then known as in others."""
        mine, same = None, 0  # who has no rows does not know
        if self.is_active:
            same = same_of((self.number, self.kind.number, own and own.text, text))
            mine = own and own.outline, self.has_asked, more
        every = objects(self.epoch, mine, self.ending(same, own, text))
        active = [rank for rank, found in enumerate(every) if found is not None]
        outlines, asked, added = (list(column) for column in zip(*filter(None, every), strict=True))
        if own is not None:
            own.agree(active, outlines)
        weight = sum(outline.weight for outline in outlines if outline)
        return Ended(active, weight, any(asked), outlines[0], added[0])

    def _tied(self, tree: Tree) -> Tree:
        """What comes out; a backward from it comes to all collectives."""
        each = iter(self.chain.tied(tensors_in(tree)))
        self.chain.end()
        self.flats = ()  # the graph holds this object
        return map_tensors(lambda _: next(each), tree)

    def _inputs(self) -> list[Tensor]:
        return [tensor for flat in self.flats for leaf in flat.leaves for tensor in leaf_tensors(leaf)]


def _is_whole(leaf: Any, spec: Any) -> bool:
    return isinstance(leaf, Tensor) and (spec is None or leaf.ndim == 0)


def _sums(epoch: Epoch, name: str, *tensors: Tensor) -> Sequence[Tensor]:
    return sums(epoch, tensors, name)


CAPTURED = (
    "the function uses a tensor that requires grad and is none of its arguments. Each process would have a part of its "
    "gradient only: pass it in an argument, or detach it"
)
_NO_ROWS = (
    "a process without rows cannot follow collectives, nor gradients around the call. Give every process rows "
    "(drop_last=True, or padding with count=0), or call it under torch.no_grad() if no gradient is needed"
)
