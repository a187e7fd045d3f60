"""A mesh: the slots of this process beside those of others."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self, final

import torch
import torch.distributed as dist

from fdp._execution.forks import is_forked
from fdp._placement.common_rows import partition_of_tree
from fdp._placement.moves import split
from fdp._placement.partition import check_weights
from fdp._placement.peers import ALONE, Peers, Spread
from fdp._trees.tree import unflatten
from fdp._trees.types import Dims, Tree
from fdp.distributed._peers import MeshPeers
from fdp.distributed._world import leave


@final
class Mesh(Spread):
    """Local slots x processes. It goes wherever devices go; as a sequence it holds the devices of this process.

    Made by `fdp.distributed.init`. Leaving it as a context closes it.

    >>> import fdp
    >>> with fdp.distributed.init(devices=fdp.virtual_devices(2)) as mesh:  # outside of torchrun: one process
    ...     mesh
    Mesh(process 0 of 1, 2 slots on cpu x 2)

    Attributes:
        devices: The device of each slot of this process.
        rank: The number of this process.
        slots: How many slots each process has, by rank.
    """

    def __init__(self, devices: tuple[torch.device, ...], processes: MeshPeers | None, *, owns_group: bool) -> None:
        self.devices = devices
        self._processes, self._owns_group = processes, owns_group
        self._is_closed, self._process = False, os.getpid()
        self.rank: int = 0 if processes is None else processes.world.rank
        self.slots: tuple[int, ...] = (len(devices),) if processes is None else processes.slots

    @property
    def processes(self) -> MeshPeers | None:
        if self._is_closed:
            raise RuntimeError("the mesh is closed; fdp.distributed.init makes another")
        return self._processes

    @property
    def peers(self) -> Peers:
        return self.processes or ALONE

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index: Any) -> Any:
        return self.devices[index]

    def __repr__(self) -> str:
        names = ", ".join(f"{name}" + f" x {n}" * (n > 1) for name, n in Counter(map(str, self.devices)).items())
        closed = ", closed" if self._is_closed else ""
        count = f"{len(self)} slot" + "s" * (len(self) > 1)
        return f"Mesh(process {self.rank} of {len(self.slots)}, {count} on {names}{closed})"

    def local(self, batch: Tree, in_dims: Dims = 0, *, weights: Sequence[float] | None = None) -> Tree:
        """The rows of a global batch that this process works on.

        With them `dp_apply` gives each slot the rows that it would have if one process had all slots, without weights.

        >>> import fdp, torch
        >>> with fdp.distributed.init() as mesh:
        ...     mesh.local(torch.arange(3))
        tensor([0, 1, 2])

        Args:
            batch: Any tree, the same in all processes.
            in_dims: Which dimension holds the rows, as in `scatter`.
            weights: Relative rows of each slot of the whole mesh, in order of the processes. By default sizes differ by
                at most one. Give `dp_apply` those of this process; rounded anew, a slot may have a row more or less.

        Returns:
            A tree like it; tensors are views.

        Raises:
            ValueError, TypeError: As `scatter` does.
        """
        count, first = sum(self.slots), sum(self.slots[: self.rank])
        everybody = (torch.device("cpu"),) * count
        shares = None if weights is None else check_weights(weights, count, "mesh.local")
        flat, partition = partition_of_tree(batch, "batch", in_dims, everybody, shares, "mesh.local", keep_empty=True)
        if partition.sizes is None:
            return batch
        before, own = sum(partition.sizes[:first]), sum(partition.sizes[first : first + len(self)])
        parts = before, own, sum(partition.sizes) - before - own

        def cut(leaf: Any, spec: Any) -> Any:
            if spec is None:
                return leaf
            return leaf[before : before + own] if spec == "items" else split(leaf, parts, spec)[1]

        return unflatten(flat.structure, map(cut, flat.leaves, flat.specs))

    def close(self) -> None:
        """End the mesh, and the process group if `init` made it. All processes do."""
        is_own = not is_forked(self._process)  # else the mesh is its parent's
        if is_own and self._owns_group and not self._is_closed and dist.is_initialized():
            leave()  # Ctrl-C may come meanwhile: then it is still to be left
        self._is_closed = True
        if self._processes is not None and is_own:
            self._processes.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
