"""The slots of one call while they run: what each does, and what has become of it."""

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fdp._execution.baton import Stop
from fdp._execution.forks import check_process, is_forked
from fdp._execution.in_slot import enter
from fdp._placement.peers import PeerCall
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.tracebacks import text_of

Task = Callable[[], Any]
Take = Callable[[int, Any], None]
Failures = list[tuple[Slot, Exception]]


class Follows(RuntimeError):
    """What a slot gets that waits for one which does not come: if that one has failed, it is the cause."""


Follows.__name__ = Follows.__qualname__ = "RuntimeError"  # for users it is one
Follows.__module__ = "builtins"


class Run:
    """The slots of a call.

    `depth` is how many transforms of torch.func are around the call, and `level` is that of forward mode. `peers` have
    slots in other processes. An `interrupt` ends all slots, each at its next collective.
    """

    is_beside = False  # its slots run side by side

    def __init__(self, tasks: Sequence[Task], slots: Sequence[Slot], peers: PeerCall) -> None:
        self.tasks, self.slots, self.peers = tasks, slots, peers
        self.count = len(slots)
        self.process, self.caller = os.getpid(), threading.get_ident()
        self.depth = torch_private.depth() if torch_private.is_transformed() else 0
        self.level = torch_private.forward_level()
        self.has_met, self.is_over, self.lacks_slots = False, False, False
        self.interrupt: BaseException | None = None
        self.results: list[Any] = [None] * len(slots)
        self.errors: dict[int, BaseException] = {}
        self.ended: dict[int, str] = {}
        self.met: dict[Any, int] = {}  # collectives inside gradients, counted: see `_collectives.levels`

    @property
    def first(self) -> int:
        """The number of its first slot."""
        return self.slots[0].index

    def meet(self, key: Any, index: int, come: Callable[[Any], Callable[[], bool]], make: Callable[[], Any]) -> Any:
        """Slot `index` comes to the meeting with that key, and waits until it is over. `make` makes it for the first.

        `come` notes who has come, and returns what says whether it is over for this slot. A meeting can `explain` to
        all that wait in it what they wait for, and then `give_up`.
        """
        raise NotImplementedError

    def meetings(self) -> list[Any]:
        """Those that are under way."""
        raise NotImplementedError

    def settled(self) -> None:
        """Said by the slot that has concluded a meeting, for which the others wait."""

    def run_slot(self, index: int, context: contextvars.Context | None = None) -> None:
        """Run a slot in this thread. What it raises is kept."""
        how = "was interrupted"
        try:
            here = context or contextvars.copy_context()
            self.results[index] = here.run(enter, self.slots[index], self.tasks[index], self)
            how = "has returned"
        except BaseException as error:
            if is_forked(self.process):
                raise
            self.errors[index] = error
            if isinstance(error, Exception) and not isinstance(error, torch_private.StopRecomputationError):
                how = f"has raised {type(error).__name__}: {text_of(error)}"
            else:
                self.stop(error)
        finally:
            self.ended[index] = how
        if os.getpid() != self.process:
            check_process(self.process)

    def stop(self, error: BaseException) -> None:
        """End the slots, each at its next collective."""
        if self.interrupt is None or isinstance(self.interrupt, Stop):
            self.interrupt = error

    def outcome(self) -> Failures:
        """Which slots failed, those first that did not only wait for others; what is no Exception is raised.

        The graph of results leads back to this object, which lets go of them.
        """
        errors, interrupt = self.errors, self.interrupt
        self.is_over, self.tasks, self.errors = True, (), {}
        if interrupt is None:
            if not errors:
                return []
            failures = [(self.slots[i], e) for i, e in sorted(errors.items()) if isinstance(e, Exception)]
            return sorted(failures, key=lambda failure: isinstance(failure[1], Follows))
        try:
            raise interrupt
        finally:
            self.results, self.interrupt = [], Stop()
            del errors, interrupt  # no cycle: the traceback holds this frame
