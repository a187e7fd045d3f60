"""A gradient step over processes, which asks nothing of the others before its one sum.

The first of a kind begins together, as every call does. Those after it know what has been agreed on then.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._placement.peers import Joined, Say, Summed
from fdp._trees.tree import Flat, map_tensors, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._autograd import Refused
from fdp.distributed._call import CAPTURED, MeshCall, Same
from fdp.distributed._exchange import meet, same_of
from fdp.distributed._outputs import Outline, Own
from fdp.distributed._reports import Tag
from fdp.distributed._sum import PLAIN, Wire
from fdp.distributed._waits_and_failures import Epoch


class End(NamedTuple):
    """What all have agreed on: how they send, the dtype of the loss, and what its aux looks like."""

    wire: Wire
    dtype: torch.dtype
    aux: Outline | None


class Agreed:
    """What has been agreed on of a kind: whether its function asks for places, and how it ends."""

    def __init__(self) -> None:
        self.asks, self.is_checked = False, False
        self.ends: dict[Any, End] = {}
        self.last: End | None = None


@final
class StepCall(MeshCall):
    """A gradient function.

    Shares of the loss are those of this process, and its sums are weighted in the end. They are `global` ones where
    that would be too late: after collectives, and for gradients of rows.
    """

    def __init__(
        self,
        epoch: Epoch,
        slots: Sequence[int],
        where: str,
        kind: Same,
        rows: Sequence[int],
        flats: Sequence[Flat],
        known: Agreed,
        *,
        is_global: bool,
    ) -> None:
        super().__init__(epoch, slots, where, kind, rows, flats)
        self._known = known
        self._is_global, self._is_local = is_global, False
        self.is_eager = is_global or kind.seed is not None or known.last is None or known.asks
        if self.is_eager:
            self.table()

    def whole(self, own: float, *, counts: bool) -> float:
        if self._is_global:
            return super().whole(own, counts=counts)
        self._is_local = True
        return own or float(not self.is_known or self.table().rows > 0)

    def enter(self) -> bool:
        """Nothing goes back to the arguments."""
        return False

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        if self._is_local:
            raise RuntimeError(
                f"{operation.name}: slots have exchanged nothing in the microbatches before this one. A function calls "
                "the same collectives in each microbatch"
            )
        self._is_global = True
        return super().combine(operation, columns, key, say)

    def reduce(
        self,
        loss: Tensor | None,
        weight: float | None,
        aux: Joined | None,
        gradients: Summed,
        device: torch.device,
        where: str,
    ) -> tuple[Tensor, Tree]:
        known, grads = self._known, gradients.sums()
        rest = None if aux is None else Own(aux, device, where)
        if any(x.requires_grad for x in tensors_in((loss, rest and rest.leaves))):
            raise ValueError(CAPTURED)
        self.chain.end()
        end = known.last if loss is None else known.ends.get((self._is_global, loss.dtype, rest and rest.key))
        said = f"loss {None if loss is None else loss.dtype}"
        active: Sequence[int] = ()
        if end is None:
            active, end = self._agree(loss, weight, rest, grads, gradients.sent_as, device, said)
        tag = self.ending(end.wire.mark, rest, said)
        if rest is not None:
            if rest.flat is None and end.aux is not None:
                rest.take(end.aux)
            if rest.needs_all and not active:
                flags = meet(self.epoch, tag, [self.is_active])
                active = [rank for rank, (is_active,) in enumerate(flags) if is_active]
        value = torch.zeros((), dtype=end.dtype, device=device) if loss is None else loss
        tensors = [*grads, value, *(rest.terms(self.epoch.rank, self.epoch.size, active) if rest else ())]
        sums = self._summed(end.wire, tag, weight, rest, tensors)
        gradients.replace_sums(sums[: len(grads)])
        value, *others = sums[len(grads) :]
        return value, rest.put(others, active) if rest else None

    def _agree(
        self,
        loss: Tensor | None,
        weight: float | None,
        rest: Own | None,
        grads: Sequence[Tensor],
        sent_as: torch.dtype | None,
        device: torch.device,
        said: str,
    ) -> tuple[Sequence[int], End]:
        """The first of its kind: which processes have shards, and how it ends in all of them."""
        ended = self.exchange(rest, said, None if loss is None else loss.dtype)
        self._known.asks = ended.have_asked
        terms = rest.terms(self.epoch.rank, self.epoch.size, ended.active) if rest else []
        first, means = PLAIN if weight is None else 0, len(rest.means) if rest else 0
        own = [PLAIN if self._is_global else first] * len(grads)
        weights = [*own, first, *[1] * means, *[PLAIN] * (len(terms) - means)]
        tensors = [*grads, torch.zeros((), dtype=ended.more, device=device), *terms]
        mark = same_of((self.where, self.kind.number, weights, [(x.dtype, tuple(x.shape)) for x in tensors]))
        wire = Wire(tensors, weights, len(grads), sent_as, mark)
        end = End(wire, ended.more, ended.outline)
        self._known.last = self._known.ends[self._is_global, end.dtype, rest and rest.key] = end
        return ended.active, end

    def _summed(
        self, wire: Wire, tag: Tag, weight: float | None, rest: Own | None, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        has_values = rest is not None and len(rest.values) > 0
        weights = 0.0 if weight is None else weight, rest.weight if rest else 0.0
        digest = rest.digest if rest and self.is_active else None
        is_read = has_values or weight == 0
        sent = wire.summed(self.epoch, tag, tensors, weights, digest, is_read=is_read)
        if sent.weight == 0 and weight is not None:
            raise ValueError(
                f"{self.where}: there are no rows, or count is zero on all shards: the mean over nothing is not defined"
            )
        if has_values and not sent.are_same:
            self.exchange(rest)
        return sent.found

    def last(self, tree: Tree, given: Sequence[Tensor]) -> Tree:
        tensors = tensors_in(tree)
        made = iter(Refused.apply(next(x for x in given if x.requires_grad), *tensors))
        return map_tensors(lambda _: next(made), tree)
