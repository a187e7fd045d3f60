"""Other processes that take part in a call; as they stand here, there are none.

`Peers` are those of a mesh, `PeerCall` is what they do together in one call. Both are complete as they are: one process
alone, which has nobody to talk to. `fdp.distributed` overrides their methods. So a call is the same code with a mesh
and without one, and nothing outside `fdp.distributed` asks which of the two it is.
"""

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fdp._placement.join import join
from fdp._placement.partition import Partition
from fdp._placement.plan import Plan
from fdp._placement.slot import Slot
from fdp._trees.profiling import NOTHING
from fdp._trees.tree import Flat
from fdp._trees.types import Dims, Tree

Say = Callable[[], str]


class Joined(NamedTuple):
    """What the shards of this process have returned, and how it becomes one tree: see `join`."""

    shards: Sequence[Tree]
    dims: Dims
    weights: Sequence[float] | None
    name: str
    hint: str = ""

    def tree(self, device: torch.device, where: str) -> Tree:
        """That of these shards alone."""
        return join(self.shards, self.dims, self.weights, device, self.name, where, self.hint)


class Summed(Protocol):
    """Gradients that are summed over all shards, and so over processes too, `sent_as` another dtype if it is given."""

    sent_as: torch.dtype | None

    def sums(self) -> list[Tensor]: ...
    def replace_sums(self, sums: Sequence[Tensor]) -> None: ...


class PeerCall:
    """What processes do together in one call."""

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        """The places of the shards of this process, counted over all."""
        return own

    def has_others(self) -> bool:
        """Whether other processes have shards."""
        return False

    def rows(self, own: int) -> float:
        """How many rows there are."""
        return own

    def whole(self, own: float, *, counts: bool) -> float:
        """What the shares of a loss are parts of, of which this process has so much: rows, or what it `counts`."""
        return own

    def enter(self) -> bool:
        """Have gradients of what is the same in all processes summed over them: whether leaves were replaced for it."""
        return False

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        """Have collectives from here on be functions of leaves: what a backward goes to.

        Once for each round of microbatches, with the aliases that it is differentiated in; else after `enter`, with all
        arguments that require grad.
        """

    def ends(self) -> list[Tensor]:
        """Where a backward of all shards begins too, so that all processes come to the same collectives.

        They have no elements. Each is its own gradient, detached if there will be no graph of the gradients.
        """
        return []

    def stay(self, tree: Tree) -> Tree:
        """End a call whose results stay on their slots."""
        return tree

    def join(self, out: Joined, device: torch.device, where: str) -> Tree:
        """End a call whose results become one tree."""
        return out.tree(device, where)

    def reduce(
        self,
        loss: Tensor | None,
        weight: float | None,
        aux: Joined | None,
        gradients: Summed,
        device: torch.device,
        where: str,
    ) -> tuple[Tensor, Tree]:
        """The same for a gradient function, whose `gradients` become those of all processes.

        The loss is that of this process, None without rows. It counts so much in the mean, or it is added up.
        """
        raise NotImplementedError

    def last(self, tree: Tree, given: Sequence[Tensor]) -> Tree:
        """Results that cannot be differentiated in what was given: a backward from them is an error."""
        return tree

    # What slots do together, while they run.

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        """A collective: for each leaf, what becomes of it on each slot of this process.

        `key` is the same in all processes: which one it is, and of what kinds. `say` is the text if it is not.
        """
        return [operation.results(tensors, leaf) for leaf, tensors in enumerate(columns)]

    def everywhere(self, values: list[Any], name: str, same: object = None, say: Say = str) -> list[Any]:
        """Values of all slots, in order, which are no tensors."""
        return values


class Peers:
    """The processes whose slots are those of a call."""

    place: str = "this process alone"
    elsewhere: str = "on a mesh"

    def begins(self, where: str) -> contextlib.AbstractContextManager[object]:
        """Around a call: what fails in it fails in all processes."""
        return NOTHING

    def check(self, where: str) -> None:
        """They can still be reached."""

    def begin(
        self, where: str, plan: Plan, flats: Sequence[Flat], same: Mapping[str, Any]
    ) -> tuple[PeerCall, Partition]:
        """Agree on a call, and what of the plan this process has."""
        return ALONE_IN_CALL, plan.partition

    def begin_on_slots(self, where: str, same: Mapping[str, Any], rows: Sequence[int]) -> PeerCall:
        """Agree on a call on all slots, whose arguments are there."""
        return ALONE_IN_CALL

    def same_everywhere(self, tree: Tree, flat: Flat, *, check_values: bool) -> Tree:
        """The tree of process 0; `flat` is that of this one."""
        return tree

    def gather(self, out: Joined, device: torch.device, *, across: bool) -> Tree:
        """What slots hold, as one tree; rows `across` processes if asked for."""
        return out.tree(device, "gather")

    def refuse(self, where: str, way_out: str) -> None:
        """Raise if there are others, which what comes next would have to talk to."""

    def __repr__(self) -> str:
        return f"Peers({self.place})"

    def __str__(self) -> str:
        return ""


ALONE = Peers()
ALONE_IN_CALL = PeerCall()


class Located:
    """What slots hold, with the peers whose slots these are among."""

    peers: Peers


class Spread(Sequence[torch.device]):
    """Devices of this process, one for each slot, beside those of its peers."""

    @property
    @abc.abstractmethod
    def peers(self) -> Peers: ...

    @abc.abstractmethod
    def local(self, batch: Tree) -> Tree:
        """The rows of a global batch that this process works on."""


def peers_of(devices: Any, held: Iterable[Any] = ()) -> Peers:
    """Those that a call is spread over: its devices, else something that it is given."""
    if type(devices) not in _ORDINARY and isinstance(devices, Spread):
        return devices.peers
    for each in held:
        if isinstance(each, Located) and each.peers is not ALONE:
            return each.peers
    return ALONE


_ORDINARY = frozenset({tuple, list, type(None), str, torch.device, int})  # not by the class, which asks in Python
