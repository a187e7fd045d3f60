"""A gradient step over processes, which asks nothing of the others before its one sum.

The first of a kind begins together, as every call does. Those after it know what has been agreed on then.
"""

from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fdp._placement.peers import Joined, Say, Summed
from fdp._trees.tree import Flat, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._call import CAPTURED, MeshCall, Same
from fdp.distributed._epoch import Epoch, Tag
from fdp.distributed._exchange import meet, same_of
from fdp.distributed._outputs import Own
from fdp.distributed._sum import PLAIN, Wire


class Agreed:
    """What has been agreed on of a kind: whether its function asks for places, and how its sums are sent."""

    def __init__(self) -> None:
        self.asks, self.is_checked = False, False
        self.ends: dict[Any, tuple[Wire, list[Any]]] = {}
        self.last: tuple[Wire, list[Any]] | None = None


@final
class StepCall(MeshCall):
    """A gradient function without a graph of its results."""

    def __init__(
        self,
        epoch: Epoch,
        slots: Sequence[int],
        where: str,
        kind: Same,
        rows: Sequence[int],
        flats: Sequence[Flat],
        known: Agreed,
    ) -> None:
        super().__init__(epoch, slots, where, kind, rows, flats)
        self._known = known
        self._has_met, self._is_local = False, False
        self.is_eager = kind.seed is not None or known.last is None or known.asks
        if self.is_eager:
            self.table()

    def whole(self, own: float, *, counts: bool) -> float:
        """Of this process: its sums are weighted in the end. With collectives that is too late."""
        if self._has_met:
            return super().whole(own, counts=counts)
        self._is_local = True
        return own or float(not self.table.is_known or self.table().rows > 0)

    def enter(self) -> None:
        """Nothing goes back to the arguments."""

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        self.chain.begins_with(leaves[:1])

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        if self._is_local:
            raise RuntimeError(
                f"{operation.name}: slots have exchanged nothing in the microbatches before this one. A function calls "
                "the same collectives in each microbatch"
            )
        self._has_met = True
        return super().combine(operation, columns, key, say)

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
        if any(x.requires_grad for own in each for x in tensors_in(own.leaves)):
            raise ValueError(CAPTURED)
        self.chain.end()
        end = self._known.ends.get(self._key(each)) if self.is_active else self._known.last
        if end is None:
            _, self._known.asks = self.meet_at_end(each, grads)
        elif not self.is_active:
            for own, outline in zip(each, end[1], strict=True):
                own.take(outline)
        tensors, weights = self._sent(each, grads)
        if end is None:
            outlines = [own.outline for own in each]
            mark = same_of((self.where, self.kind.number, weights, [(x.dtype, tuple(x.shape)) for x in tensors]))
            end = Wire(tensors, weights, len(grads), gradients.sent_as, mark), outlines
            self._known.ends[self._key(each)] = self._known.last = end
        sums = self._summed(end[0], each, tensors)
        gradients.replace_sums(sums[: len(grads)])
        rest = iter(sums[len(grads) :])
        for own in each:
            for i in (*own.means, *own.sums):
                own.leaves[i] = next(rest)
        value, *others = [own.tree() for own in each]
        return value, others[0] if others else None

    def _key(self, each: Sequence[Own]) -> Hashable:
        """What the sums depend on, beside the kind of the call."""
        return self._has_met, *[
            (own.flat and own.flat.structure, repr(own.flat and own.flat.specs), *own.kinds) for own in each
        ]

    def _sent(self, each: Sequence[Own], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """What is summed, and which weight it has: with collectives gradients have theirs already."""
        weights = [0 if each[0].means and not self._has_met else PLAIN] * len(grads)
        tensors = list(grads)
        for number, own in enumerate(each):
            weights += [number] * len(own.means) + [PLAIN] * len(own.sums)
            tensors += [own.leaves[i] for i in (*own.means, *own.sums)]
        return tensors, weights

    def _summed(self, layout: Wire, each: Sequence[Own], tensors: Sequence[Tensor]) -> list[Tensor]:
        loss, rest = each[0], each[-1]
        name = f"the end of {self.where}"

        def say() -> str:
            return "\n".join([self.say(), *(own.say() for own in each)])

        digest = rest.digest if self.is_active else None
        sent = layout.summed(
            self.epoch,
            Tag(name, layout.mark, say),
            tensors,
            (loss.weight, rest.weight),
            digest,
            is_read=bool(rest.rest) or loss.weight == 0,
        )
        if sent.weight == 0 and loss.means:
            raise ValueError(
                f"{self.where}: there are no rows, or count is zero on all shards: the mean over nothing is not defined"
            )
        if rest.rest and not sent.are_same:
            table = meet(self.epoch, Tag(name, layout.mark, say), [self.is_active])
            rest.finish(self.epoch, self.chain, [rank for rank, (is_active,) in enumerate(table) if is_active])
        return sent.found
