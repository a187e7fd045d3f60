"""Where the slots of a call meet that are all alive at once.

What holds at any time:

- A meeting has a key: what kind it is, and its how-many-th of this kind for a slot. It is in `_meetings` from when the
  first slot comes until slot 0 has seen all, and each slot comes once.
- The values of a meeting are combined once, by slot 0, in its thread. The others wait until then, also the last.
- A slot that has ended meets no more. Who waits for it has an error then, and who comes later gets it at once: to come
  and to end happen under one lock, so one of the two sees the other.
- Results are read without the lock, after the wait for them is over, when nobody changes them any more.

`meet` is called by the participant of a slot, in its turn; `end` by anyone. `_lock` is held while somebody comes or
ends, and errors are made under it from what is there. It is not held while waits are resolved, which takes the lock of
the scheduler, nor while values are combined.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from fdp._execution.interrupts import soon
from fdp._execution.patches import firm
from fdp._execution.scheduler import Abandoned, Scheduler, Waiter, this_participant
from fdp._execution.seeds import Seed
from fdp._execution.thread_state import ThreadState
from fdp._placement.peers import PeerCall
from fdp._placement.slot import AXES, Slot, check_process, text_of
from fdp._trees.listing import differing


class Signature(NamedTuple):
    """Which collective a slot is in, and what has to be the same on all slots."""

    name: str
    same: Any
    say: Callable[[], str]
    advice: str = "All shards must call the same collectives in the same order"


class Settings(NamedTuple):
    """How slots run together; `peers` have slots among them too.

    `joint`: something outside differentiates or maps through the call, at `depth` layers of torch.func.
    """

    limit: int
    seed: Seed | None
    state: ThreadState
    joint: bool
    depth: int
    peers: PeerCall


@final
class Rendezvous:
    """The slots of a call that run together, and where they meet."""

    def __init__(self, slots: Sequence[Slot], settings: Settings, scheduler: Scheduler, token: object) -> None:
        self.slots, self.settings, self.scheduler, self.token = slots, settings, scheduler, token
        self.process = os.getpid()
        self.first = slots[0].index  # those of other processes may come before
        self.run = object()  # of the runs under a token, such as a forward and its backward, this one
        self._lock = threading.Lock()
        self._meetings: dict[Any, _Meeting] = {}
        self._met: list[Counter[Any]] = [Counter() for _ in slots]
        self._ended: dict[int, str] = {}
        self.known: dict[Any, bool] = {}  # see `meets` in fdp._execution.function_traits
        self.start: Callable[[], None] | None = None  # the other slots, when they are first needed

    def place(self, slot: Slot) -> int:
        """Which of these a slot is."""
        return slot.index - self.first

    def number(self, index: int, key: Any) -> Any:
        """The next meeting of a slot under a key: the first of one slot is with the first of the others."""
        self._met[index][key] += 1
        return key, self._met[index][key]

    def meet(self, index: int, key: Any, what: Signature, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until all slots are here with the same; slot 0 combines their values to one for each.

        Always the same slot: memory that a thread has freed serves the next results.
        """
        participant = this_participant()
        check_process(self.process, what.name)
        if participant is None:
            raise RuntimeError(f"{what.name}: this thread is none of fdp's; call collectives where the function runs")
        if participant.scheduler is not self.scheduler or firm() > participant.firm:
            raise RuntimeError(
                f"{what.name}: slots cannot wait for each other inside forward-mode differentiation (jvp, jacfwd, "
                "hessian), in a module that is called in place, or in a thread that the function has started"
            )
        if self.start is not None:
            self.start()
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting(self))
            wait = meeting.come(index, what, value)
            complete = len(meeting.values) == len(self.slots)
            if any(other in meeting.missing() for other in self._ended):
                wait.error = meeting.explain(index)
        if wait.error is not None:
            wait.explain = None
            wait.check()
        if complete and index != 0:
            self.scheduler.resolve([meeting.waits[0]])
        if not complete or index != 0:
            participant.wait(wait)
        if index == 0:
            with self._lock:
                del self._meetings[key]
            meeting.conclude(combine)
        return meeting.results[index]

    def end(self, index: int, how: str) -> None:
        """A slot will meet no more: those that wait for it get an error."""
        with self._lock:
            self._ended[index] = how
            vain = []
            for meeting in self._meetings.values():
                if index in meeting.missing():
                    for other, wait in meeting.waits.items():
                        if other != index and not wait.is_over:
                            wait.error = meeting.explain(other)
                            vain.append(wait)
        soon(partial(self.scheduler.resolve, vain))

    def clear(self) -> None:
        """Let go of what refers to this, and of meetings that did not take place."""
        self.start = None
        self._meetings.clear()

    def have_ended(self, missing: Sequence[int]) -> bool:
        """Whether one of them comes no more."""
        return not self._ended.keys().isdisjoint(missing)

    def where(self, missing: Sequence[int], own: str) -> str:
        """What those do for whom a slot waits."""
        said = []
        for other in missing:
            if other in self._ended:
                said.append(f"shard {self.first + other}, which {self._ended[other]}")
                continue
            at = [meeting.named(other) for meeting in list(self._meetings.values()) if other in meeting.whats]
            at += [wait.where.name for wait in self.scheduler.waits() if (self, other) in wait.where.inside]
            name = f"shard {self.first + other}, which"
            waits = " and ".join(x + " elsewhere" * (x == own) for x in dict.fromkeys(at))
            said.append(f"{name} waits in {waits}" if at else f"{name} has not come to it")
        return ", and for ".join(said)


class Where(NamedTuple):
    """The collective that a thread waits in, and the slots that it is inside of."""

    name: str
    inside: list[tuple[Rendezvous, int]]


@final
class _Meeting:
    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self.values: dict[int, Any] = {}
        self.whats: dict[int, Signature] = {}
        self.waits: dict[int, Waiter] = {}
        self.results: list[Any] = []
        self._is_nested = False

    def missing(self) -> list[int]:
        """Without whom it cannot be concluded."""
        absent = [i for i in range(len(self._rendezvous.slots)) if i not in self.values]
        return absent or [0]

    def come(self, index: int, what: Signature, value: Any) -> Waiter:
        self.values[index], self.whats[index] = value, what
        axes = AXES.get()
        self._is_nested = len(axes) > 1
        inside = [(axis.rendezvous, axis.rendezvous.place(axis.slot)) for axis in axes if axis.rendezvous is not None]
        return self.waits.setdefault(index, Waiter(lambda: self.explain(index), Where(self.named(index), inside)))

    def named(self, index: int) -> str:
        """The collective that a slot is in, with its axis where there are several."""
        name = self.whats[index].name
        return f"{name} over {self._rendezvous.slots[0].axis_name!r}" if self._is_nested else name

    def conclude(self, combine: Callable[[list[Any]], list[Any]]) -> None:
        """Combine the values, and let all go on."""
        try:
            self._check()
            self.results = combine([self.values[i] for i in range(len(self.values))])
        except BaseException as error:
            for wait in self.waits.values():
                wait.error = Abandoned(text_of(error))
            raise
        finally:
            self.values.clear()
            self.whats = {i: what._replace(say=str) for i, what in self.whats.items()}  # else it keeps tensors
            soon(partial(self._rendezvous.scheduler.resolve, list(self.waits.values())))

    def explain(self, index: int) -> Exception:
        """Whom a slot waits for that will not come."""
        name, missing = self.named(index), self.missing()
        error = Abandoned(
            f"{name} in shard {self._rendezvous.first + index} waits for {self._rendezvous.where(missing, name)}. "
            f"{self.whats[index].advice}"
        )
        error.follows = self._rendezvous.have_ended(missing)
        return error

    def _check(self) -> None:
        whats = [(self._rendezvous.first + i, what) for i, what in sorted(self.whats.items())]
        first = whats[0][1]
        if any(what.name != first.name for _, what in whats):
            each = ", ".join(f"{what.name} in shard {i}" for i, what in whats)
            raise RuntimeError(
                f"the shards call different collectives: {each}. All must call the same in the same order"
            )
        if any(what.same != first.same for _, what in whats):
            each = differing([what.say() for _, what in whats], [f"shard {i}" for i, _ in whats])
            raise ValueError(f"{first.name}: the shards do not fit together: {each}")
