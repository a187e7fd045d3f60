"""The processes of a mesh, as `fdp._placement.peers` has them."""

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from fdp._execution.forks import is_forked
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.partition import Partition
from fdp._placement.peers import Joined, PeerCall, Peers
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots
from fdp._trees.tree import Flat
from fdp._trees.types import Tree
from fdp.distributed._agreement import check_values, kinds_of, said_of
from fdp.distributed._call import MeshCall, Same
from fdp.distributed._exchange import same_of
from fdp.distributed._replicate import same_everywhere
from fdp.distributed._step import Agreed, StepCall
from fdp.distributed._world import World

_NUMBERS: "weakref.WeakKeyDictionary[Plan, dict[Any, tuple[int, bool]]]" = weakref.WeakKeyDictionary()
"""Of the kinds of calls with a plan, and whether some gradient of theirs is one of rows."""


@final
class MeshPeers(Peers):
    """See `Peers`. `slots` are how many each process has."""

    place: str = "a mesh"
    elsewhere: str = "not on it"
    world: World
    slots: tuple[int, ...]
    is_closed: bool

    def __init__(self, world: World, slots: Sequence[int]) -> None:
        self.world, self.slots = world, tuple(slots)
        self.is_closed = False

    def check(self, where: str) -> None:
        """The mesh is still there, and it is that of this process."""
        if is_forked(self.world.process):
            raise RuntimeError(f"{where}: this process was forked, and the mesh is its parent's: only that can use it")
        if self.is_closed or not dist.is_initialized():
            raise RuntimeError(f"{where}: the mesh is closed; fdp.distributed.init makes another")

    def begins(self, where: str) -> contextlib.AbstractContextManager[object]:
        self.check(where)
        return self.world.begins(where)

    def begin(
        self, where: str, plan: Plan, flats: Sequence[Flat], same: Mapping[str, Any]
    ) -> tuple[PeerCall, Partition]:
        """Agree on a call, and leave this process without shards if it has no rows."""
        epoch, gradients = self.world.epoch, plan.gradients
        options = {name: value for name, value in same.items() if name not in ("seed", "function")}
        numbers = _NUMBERS.setdefault(plan, {})
        key = self.slots, where, *options.items()
        if key not in numbers:
            is_global = gradients is not None and any(leaf.dim is not None for leaf in gradients.leaves)
            numbers[key] = same_of((key, kinds_of(flats))), is_global
        number, is_global = numbers[key]
        seed = None if same["seed"] is None else repr(same["seed"])
        kind = Same(number, partial(said_of, flats, {"seed": same["seed"], **options}), seed)
        args = epoch, self.slots, where, kind, self._rows(plan.partition, flats), flats
        if gradients is None:
            call = MeshCall(*args)
            call.table()
        else:
            known = epoch.known.setdefault((kind.number, same["function"]), Agreed())
            call = StepCall(*args, known, is_global=is_global)
            if not known.is_checked:
                self._check_parameters(where, plan, flats)
                known.is_checked = True
        return call, plan.partition if call.is_active else _NONE[plan.partition.sizes is None]

    def begin_on_slots(self, where: str, same: Mapping[str, Any], rows: Sequence[int]) -> PeerCall:
        call = MeshCall(self.world.epoch, self.slots, where, Same(same_of(same), lambda: repr(same)), rows)
        call.table()
        return call

    def same_everywhere(self, tree: Tree, flat: Flat, *, check_values: bool) -> Tree:
        return same_everywhere(flat, self.world.epoch, check_values)

    def gather(self, out: Joined, device: torch.device, *, across: bool) -> Tree:
        call: Any = self.begin_on_slots("gather", {"across": across}, (0,) * len(out.shards))
        tree, own = call.joined(out, device, "gather")
        return own.across(tree, self.world.epoch) if across else tree

    def refuse(self, where: str, way_out: str) -> None:
        raise ValueError(f"{where}: a mesh of several processes, which would have to talk. {way_out}")

    def _rows(self, partition: Partition, flats: Sequence[Flat]) -> list[int]:
        """The rows of each shard of this process."""
        if partition.sizes is not None:
            return [size for size in partition.sizes if size]
        whole = not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves)
        # What is not split runs once, on the first slot of all.
        return [0] * (0 if whole and self.world.rank else len(partition.slots))

    def _check_parameters(self, where: str, plan: Plan, flats: Sequence[Flat]) -> None:
        values = [leaf for flat in flats for leaf in flat.leaves]
        whole = [leaf for leaf in plan.gradients.leaves if _is_whole(leaf, values)]
        check_values(self.world.epoch, where, [leaf.path for leaf in whole], [values[leaf.index] for leaf in whole])

    def __str__(self) -> str:
        return f" of process {self.world.rank}"

    def __reduce__(self) -> NoReturn:
        raise TypeError("what is on a mesh of several processes cannot be pickled; pickle its .shards")


def _is_whole(leaf: LeafPlan, values: Sequence[Any]) -> bool:
    return leaf.summed(values[leaf.index]) is not None


_NONE = (Partition((), (), ()), Partition((), (), None))
