"""The processes of a mesh, as `fdp._placement.peers` has them."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from fdp._placement.partition import Partition
from fdp._placement.peers import Joined, PeerCall, Peers
from fdp._placement.plan import Plan
from fdp._trees.tree import Flat
from fdp._trees.types import Tree
from fdp.distributed._call import MeshCall, begin
from fdp.distributed._join import PartialResult
from fdp.distributed._processes import Processes
from fdp.distributed._replicate import same_everywhere


@final
class MeshPeers(Processes, Peers):
    """See `Peers`."""

    place: str = "a mesh"
    elsewhere: str = "not on it"

    def begin(
        self, where: str, plan: Plan, flats: Sequence[Flat], same: Mapping[str, Any]
    ) -> tuple[PeerCall, Partition]:
        return begin(self, where, plan, flats, same)

    def begin_on_slots(self, where: str, same: Mapping[str, Any], rows: Sequence[int]) -> PeerCall:
        return MeshCall(self, where, same, rows)

    def same_everywhere(self, tree: Tree, flat: Flat, *, check_values: bool) -> Tree:
        return same_everywhere(flat, self, check_values)

    def gather(self, out: Joined, device: torch.device, *, across: bool) -> Tree:
        call = MeshCall(self, "gather", across, (0,) * len(out.shards))
        whole = None if out.weights is None else call.total(sum(out.weights), "weights of gather")
        with call:
            part = PartialResult(out.shards, out.dims, out.weights, whole, device, "gather", out.name)
            call.ends_with(part.tag())
        tree = part.finish(call, call.chain)[0]
        return part.joined(tree, self.comm) if across else tree

    def refuse(self, where: str, way_out: str) -> None:
        raise ValueError(f"{where}: a mesh of several processes, which would have to talk. {way_out}")

    def __str__(self) -> str:
        return f" of process {self.comm.rank}"
