"""The plan of a call, to read and to look at."""

import dataclasses
from typing import Any

import torch

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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Drawn):
    """What `explain` found: what a call of `dp_apply` will do. It prints itself.

    Attributes:
        devices: The device of each slot that has a shard.
        sizes: Rows of each of these, None if nothing is split.
        arguments: The leaves of `params`, `inputs` and `kwargs`.
        outputs: The leaves of the output, None if they cannot be known.
        collectives: What slots exchange, in order: name, tensors and bytes that slot 0 brings.
        copies: All copies between devices, in order, as `transfers` logs them.
        problem: Why outputs are not known: the function depends on values, or what it raised.
    """

    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...] | None
    arguments: tuple[PlannedLeaf, ...]
    outputs: tuple[PlannedLeaf, ...] | None
    collectives: tuple[Collective, ...]
    copies: tuple[Transfer, ...]
    problem: str | None = None

    def drawing(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [self._slots(), "", _leaves("Arguments", self.arguments), ""]
        if self.outputs is None:
            parts.append(Text.assemble(("Outputs are not known: ", "bold"), self.problem or ""))
        else:
            parts.append(_leaves("Outputs", self.outputs))
        parts.append("")
        if self.collectives:
            rows = [(name, str(tensors), size_text(nbytes)) for name, tensors, nbytes in self.collectives]
            parts.append(table("Collectives", ["name", "tensors", "bytes a slot"], rows, ["tensors", "bytes a slot"]))
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
    numbers = ["bytes a slot", "copies"]
    return table(title, ["leaf", "tensor", "how", "rows", *numbers], map(_cells, leaves), numbers)


def _cells(leaf: PlannedLeaf) -> list[str]:
    kind = "" if leaf.dtype is None else dtype_text(leaf.dtype) + ("" if leaf.shape is None else str(list(leaf.shape)))
    rows = "" if leaf.rows is None else runs_text(leaf.rows)
    nbytes = runs_text(map(size_text, leaf.nbytes)) if any(leaf.nbytes) else ""
    copies = f"{leaf.copies} ({size_text(leaf.copied)})" if leaf.copies else ""
    return [leaf.path, kind, leaf.how, rows, nbytes, copies]
