"""A step whose plan all processes have agreed on before: what they say goes with the sums of gradients, in one message.

Nobody knows before the end whether the others are in the same step. So a run goes on with what was agreed on the last
time, which is right if all notes that arrive are as they have to be. If not, all begin the call anew, and agree in
full: there a process that has failed, or is elsewhere, is named. What a loss is a mean over may change from step to
step: seeds of the backward are shares of what it was before, and what comes of them is corrected by the ratio.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from fdp._execution.restart import Anew
from fdp._placement.peers import Joined, PeerCall, Summed
from fdp._placement.slot import Slot
from fdp._trees.types import Tree
from fdp.distributed._agreed import Agreed
from fdp.distributed._ending import Ending
from fdp.distributed._overlap import Sending, hooked
from fdp.distributed._processes import has_begun, in_full


@final
class KnownCall(PeerCall):
    """See `PeerCall`. `number` says which call of which plan this is, and what it goes on from."""

    def __init__(self, where: str, agreed: Agreed, number: int) -> None:
        self.where, self.agreed, self.number = where, agreed, number
        self._end = agreed.lane.begun + len(agreed.packing.buckets)
        self._sending: Sending | None = None
        self._runs = 0

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.send_nothing()
            raise

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        return self.agreed.places(own)

    def has_others(self) -> bool:
        return True

    def rows(self, own: int) -> float:
        return self.agreed.whole

    def total(self, number: float, name: str) -> float:
        return self.agreed.whole

    def sizes(self, own: Sequence[int], pieces: Callable[[int], Sequence[int]]) -> Sequence[int]:
        table = self.agreed.table
        if [piece for size in table.sizes[table.rank] for piece in pieces(size)] != list(own):
            self.talk()
        return table.pieces(pieces)

    def during_backward(
        self, gradients: Summed, loss: Tensor, leaves: Sequence[Tensor]
    ) -> contextlib.AbstractContextManager[object]:
        before = gradients.before()
        self._runs += 1
        if before is None or len(before) != len(leaves) or len(self.agreed.packing.buckets) == 1 or self._runs > 1:
            return contextlib.nullcontext()
        self._sending = Sending(self.agreed, f"the end of {self.where}", before)
        return hooked(loss, leaves, self._sending.take)

    def reduce(
        self,
        loss: Joined,
        aux: Joined | None,
        gradients: Summed,
        aliases: Sequence[Tensor],
        device: torch.device,
        where: str,
    ) -> Callable[[], tuple[Tensor, Tree]]:
        ending = Ending(loss, aux, gradients, device, where)
        if not ending.fits(self.agreed) or (self._runs > 1 and self._sending is not None and self._sending.flats):
            self.talk()  # or the last backward was begun anew, after gradients of it had been sent
        wait = ending.begin(self.agreed, self.number, self._sending)

        def finish() -> tuple[Tensor, Tree]:
            try:
                found = wait()
            except BaseException:  # the others cannot be reached, or Ctrl-C ends the wait: they have all that they need
                has_begun()
                raise
            if found is None:
                self.talk()
            has_begun()
            return found

        return finish

    def send_nothing(self) -> None:
        """Take part in the message, so that nobody waits for it, and all see that this process has more to say."""
        if self.agreed.lane.begun < self._end:
            self.agreed.lane.begin_with_nothing(self.where)

    def talk(self, *args: Any, **options: Any) -> NoReturn:
        """Have all begin the call anew, and agree in full."""
        self.send_nothing()
        in_full()
        raise Anew

    # What needs others before the end.
    slots_before = slots = meet = agree = combine = everywhere = again = join = talk
