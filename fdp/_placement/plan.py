"""The plan of a call: all that is decided before it runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.partition import Partition
from fdp._placement.slot import Slot
from fdp._placement.transfers import Collective, Transfer
from fdp._trees.table import Drawn, colors, count_text, dtype_text, runs_text, size_text, table


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One leaf of the arguments or the output of a call.

    Attributes:
        path: Where it stands: `"inputs[0]['x']"`.
        dtype: None if it is no tensor.
        shape: That of the whole. Of an output, when it is joined; None where it becomes a list, or is no tensor.
        how: What happens to it: `"split along dim 0"`, `"whole"`, `"concatenated along dim 0"`, `"mean"`, ...
        rows: Rows on each slot, None if it is not split.
        nbytes: Bytes on each slot. Slots that share a device share what is whole.
        copies: How many copies to other devices are made of it.
        copied: The bytes of these.
    """

    path: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    how: str
    rows: tuple[int, ...] | None
    nbytes: tuple[int, ...]
    copies: int
    copied: int


class PlannedArgument(NamedTuple):
    """How an argument is placed: the spec of each leaf, which leaves are not the same for all shards."""

    stage: str
    specs: list[Any]
    places: Sequence[int]
    moves: bool  # whether something is on another device than where it is needed
    gradients: list[Any] | None
    """Where all leaves are whole: dtype, device, layout of its gradient if it is dense, and that it has no graph; None
    for a leaf whose gradients are summed in another dtype."""


def places_of(partition: Partition, axis_name: str) -> tuple[Slot, ...]:
    """The place of every shard."""
    ranks = {slot: rank for rank, slot in enumerate(dict.fromkeys(partition.slots))}
    has_pieces = len(ranks) < len(partition.slots)
    first: dict[int, int] = {}
    found = []
    for i, (slot, device) in enumerate(zip(partition.slots, partition.devices, strict=True)):
        piece = i - first.setdefault(slot, i) if has_pieces else None
        found.append(Slot(ranks[slot], len(ranks), partition.rows(i), device, axis_name, piece))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Drawn):
    """What a call will do, decided from what is known of its arguments without their values. It prints itself.

    `explain` returns it with what a run on tensors without data has shown: `arguments` and all after it.

    Attributes:
        slots: The device of each slot.
        partition: Which slots have a shard, and their rows.
        pieces: The same with each shard cut into microbatches.
        args: How each argument is placed.
        places: The place of each piece, as a shard sees it.
        has_slots: Whether some argument is on its slots already.
        moves: Whether something is on another device than where it is needed.
        devices: The device of each slot that has a shard.
        sizes: Rows of each of these, None if nothing is split.
        executor: How shards run, and why.
        arguments: The leaves of `params`, `inputs` and `kwargs`.
        outputs: The leaves of the output, None if they cannot be known.
        differences: What makes the numbers of several slots differ from those of one device, as far as it was seen.
        collectives: What slots exchange, in order: name, tensors and bytes that slot 0 brings.
        copies: All copies between devices, in order, as `transfers` logs them.
        problem: Why outputs are not known: the function depends on values, or what it raised.
    """

    slots: tuple[torch.device, ...]
    partition: Partition
    pieces: Partition
    args: tuple[PlannedArgument, ...]
    places: tuple[Slot, ...]
    has_slots: bool = False
    moves: bool = False
    executor: str = ""
    arguments: tuple[PlannedLeaf, ...] = ()
    outputs: tuple[PlannedLeaf, ...] | None = None
    differences: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    copies: tuple[Transfer, ...] = ()
    problem: str | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self.partition.devices

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return self.partition.sizes

    def drawing(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [self._slots(), ""]
        if self.executor:
            parts += [Text.assemble(("Runs: ", "bold"), self.executor), ""]
        for text in self.differences:
            parts += [Text.assemble(("Differs from one device: ", "bold"), text), ""]
        parts += [_leaves("Arguments", self.arguments), ""]
        if self.outputs is None:
            parts.append(Text.assemble(("Outputs are not known: ", "bold"), self.problem or ""))
        else:
            parts.append(_leaves("Outputs", self.outputs))
        parts.append("")
        if self.collectives:
            rows = [(name, str(tensors), size_text(nbytes)) for name, tensors, nbytes in self.collectives]
            parts.append(
                table("Collectives", ["name", "tensors", "bytes per slot"], rows, ["tensors", "bytes per slot"])
            )
            parts.append("")
        moved = size_text(sum(copy.nbytes for copy in self.copies))
        parts.append(Text.assemble(("Copies between devices: ", "bold"), f"{len(self.copies)} ({moved})"))
        return Group(*parts)

    def _slots(self) -> Any:
        from rich.text import Text

        color_of = colors(self.devices)
        start, rows = 0, []
        for slot, device in enumerate(self.devices):
            size = None if self.sizes is None else self.sizes[slot]
            extent = "" if size is None else f"{start}:{start + size}"
            start += size or 0
            nbytes = sum(leaf.nbytes[slot] for leaf in self.arguments)
            name = Text(str(device), style=color_of(device))
            rows.append((str(slot), name, extent, "" if size is None else str(size), size_text(nbytes)))
        of = (
            "nothing to split: one slot"
            if self.sizes is None
            else f"{count_text(sum(self.sizes), 'row', 'rows')} on {count_text(len(self.devices), 'slot', 'slots')}"
        )
        head = ["slot", "device", "from:to", "rows", "bytes"]
        return table(f"Plan: {of}", head, rows, ["slot", "from:to", "rows", "bytes"])


def _leaves(title: str, leaves: tuple[PlannedLeaf, ...]) -> Any:
    numbers = ["bytes per slot", "copies"]
    return table(title, ["leaf", "tensor", "how", "rows", *numbers], map(_cells, leaves), numbers)


def _cells(leaf: PlannedLeaf) -> list[str]:
    kind = "" if leaf.dtype is None else dtype_text(leaf.dtype) + ("" if leaf.shape is None else str(list(leaf.shape)))
    rows = "" if leaf.rows is None else runs_text(leaf.rows)
    nbytes = runs_text(map(size_text, leaf.nbytes)) if any(leaf.nbytes) else ""
    copies = f"{leaf.copies} ({size_text(leaf.copied)})" if leaf.copies else ""
    return [leaf.path, kind, leaf.how, rows, nbytes, copies]
