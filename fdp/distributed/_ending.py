"""The end of a call whose results are sums over processes: gradients, a loss, and aux that is a sum or a mean."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor

from fdp._placement.peers import Joined, Summed
from fdp._trees.types import Tree
from fdp.distributed._agreed import Agreed
from fdp.distributed._buckets import Packing, kind_of
from fdp.distributed._join import PartialResult
from fdp.distributed._lanes import Header, room_for_notes
from fdp.distributed._overlap import Sending

_MOST = 8.0
"""How many times larger or smaller a mean may get before a step begins anew: half precision has no room for more."""


@final
class Ending:
    """What this process has at the end: its part of the loss and of aux, and its gradients."""

    def __init__(self, loss: Joined, aux: Joined | None, gradients: Summed, device: torch.device, where: str) -> None:
        self._where, self._gradients = f"the end of {where}", gradients
        self._is_mean = loss.dims == "mean"
        self._weight = float(sum(loss.weights or ())) if self._is_mean else 1.0
        if not self._weight:  # only the others count
            loss = loss._replace(weights=[1.0] * len(loss.shards))
        self._loss = loss.tree(device, where)
        # What aux is a mean over, or was the last time: so means are sent in their own size, and cannot overflow.
        self._aux_whole = 1.0 if aux is None else float(aux.whole())
        rest = device, where, "aux"
        self._aux = None if aux is None else PartialResult(aux.shards, aux.dims, aux.weights, self._aux_whole, *rest)
        self._aux_weight = 0.0 if aux is None else float(sum(aux.weights or ()))
        self._parts = [] if self._aux is None else self._aux.own()
        self._kinds = list(map(kind_of, chain(self._parts, gradients.sums())))

    @property
    def is_plain(self) -> bool:
        """Whether all of it are sums that nothing differentiates."""
        dense = all(layout is torch.strided and not tracked for *_, layout, tracked in self._kinds)
        return dense and not self._loss.requires_grad and (self._aux is None or self._aux.is_plain)

    @property
    def kind(self) -> Any:
        """What of it is the same in all processes, beside the kinds of what is added up."""
        return self._is_mean, self._loss.dtype, self._loss.requires_grad, None if self._aux is None else self._aux.kind

    def packing(self, count: int, order: Sequence[int] | None = None) -> Packing:
        """How it is sent between so many processes; in the order of gradients, if that is known."""
        n, sent_as = len(self._parts), self._gradients.sent_as
        dtypes = [None] * n + [sent_as] * (len(self._kinds) - n)
        return Packing(self._kinds, room_for_notes(count), order and [*(i + n for i in order), *range(n)], dtypes)

    def fits(self, agreed: Agreed) -> bool:
        """Whether it is what was agreed on."""
        return self._kinds == agreed.packing.kinds and self.kind == agreed.kind

    def begin(
        self, agreed: Agreed, number: int, sending: Sending | None = None
    ) -> Callable[[], tuple[Tensor, Tree] | None]:
        """Add it up over all processes; what is returned waits for that. None if one is not in the call `number`.

        What is `sending` is on its way.
        """
        packing, gradients = agreed.packing, self._gradients
        ours = [*[False] * len(self._parts), *gradients.ours()]
        tensors = [*self._parts, *gradients.sums()]
        flats, waits = ([], []) if sending is None else (sending.flats, sending.waits)
        flats += [packing.packed(k, tensors, ours) for k in range(len(flats), len(packing.buckets))]
        del tensors
        note = Header(number, self._weight, self._aux_weight, self._loss.item())
        wait = agreed.lane.begin(self._where, note, flats, packing.room_of(flats), waits)

        def finish() -> tuple[Tensor, Tree] | None:
            notes = wait()
            if {other.call for other in notes} != {number}:
                return None
            whole = sum(other.weight for other in notes) if self._is_mean else 1.0
            weight = sum(other.aux_weight for other in notes)
            if not whole or (self._aux is not None and not weight):  # what is a mean over nothing is said in full
                return None
            if not 1 / _MOST <= whole / agreed.whole <= _MOST:
                return None
            sums = packing.unpacked(flats)
            own, sums = sums[: len(self._parts)], sums[len(self._parts) :]
            if whole != agreed.whole:
                for x in sums:
                    x.mul_(agreed.whole / whole)
                agreed.whole = whole
            gradients.replace_sums(sums)
            aux = None if self._aux is None else self._aux.completed(own, weight / self._aux_whole)
            # Without those that count nothing, whose value may be infinite.
            value = sum(other.value * (other.weight / whole) for other in notes if other.weight)
            found = torch.tensor(value, dtype=torch.float64, device="cpu")
            return found.to(self._loss.device, self._loss.dtype), aux

        return finish
