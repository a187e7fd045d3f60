"""The plan of a call: all that is decided before it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.leaf_table import table_of
from fdp._placement.partition import Partition
from fdp._placement.planned_leaf import PlannedLeaf
from fdp._placement.slot import Slot
from fdp._placement.transfer_log import Collective, Transfer
from fdp._trees.printed import Drawn, count_text, size_text, table


class Step(NamedTuple):
    """A part of a call: a function of the plan and of the state of the call.

    `text` is what a plan says of it, and `stage` what it is called in traces of torch.profiler, if it is there.
    """

    do: Callable[[Any, Any], None]
    text: Callable[["Plan"], str]
    stage: str = ""


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
        specs: The dim that each leaf of the arguments is split along.
        leaves: What becomes of each of them.
        moved: Those that are whole, and copied to other devices.
        cut: Those of which each shard has a part of its own.
        places: The place of each piece, as a shard sees it.
        around: What is around the call.
        steps: What the call does, in order; each says so in a line.
        gradients: Which of the leaves are differentiated, and how.
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
    specs: list[Any]
    leaves: tuple[LeafPlan, ...]
    moved: tuple[LeafPlan, ...]
    cut: tuple[LeafPlan, ...]
    places: tuple[Slot, ...]
    around: Any
    steps: tuple[Step, ...] = ()
    gradients: Any = None
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

    def __str__(self) -> str:
        parts = [self._slots()]
        if self.executor:
            parts.append(f"Runs: {self.executor}")
        if self.steps:
            parts.append(f"Steps: {' · '.join(step.text(self) for step in self.steps)}")
        parts += [f"Differs from one device: {text}" for text in self.differences]
        parts.append(table_of("Arguments", self.arguments, but="on"))
        if self.outputs is None:
            parts.append(f"Outputs are not known: {self.problem or ''}")
        else:
            parts.append(table_of("Outputs", self.outputs, but="on"))
        if self.collectives:
            head = ["name", "tensors", "bytes per slot"]
            rows = [(name, str(tensors), size_text(nbytes)) for name, tensors, nbytes in self.collectives]
            parts.append(table("Collectives", head, rows, head[1:]))
        moved = size_text(sum(copy.nbytes for copy in self.copies))
        parts.append(f"Copies between devices: {len(self.copies)} ({moved})")
        return "\n\n".join(parts)

    def _slots(self) -> str:
        start, rows = 0, []
        for slot, device in enumerate(self.devices):
            size = None if self.sizes is None else self.sizes[slot]
            extent = "" if size is None else f"{start}:{start + size}"
            start += size or 0
            nbytes = sum(leaf.nbytes[slot] for leaf in self.arguments)
            rows.append((str(slot), str(device), extent, "" if size is None else str(size), size_text(nbytes)))
        of = (
            "nothing to split: one slot"
            if self.sizes is None
            else f"{count_text(sum(self.sizes), 'row', 'rows')} on {count_text(len(self.devices), 'slot', 'slots')}"
        )
        head = ["slot", "device", "from:to", "rows", "bytes"]
        return table(f"Plan: {of}", head, rows, ["slot", "from:to", "rows", "bytes"])
