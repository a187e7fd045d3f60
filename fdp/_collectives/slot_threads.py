"""Running slots so that all are alive at once: a thread each, in turns.

What holds at any time:

- Each slot has a thread of the pool, or slot 0 the calling one. Its thread is a `Participant` of the scheduler of its
  rendezvous, which is that of the participant that called, if there is one. So nested calls take turns with those
  around them.
- Before threads begin the scheduler expects them, in one step with it where others take its turns already. So
  nobody is told that nobody comes while some are on their way.
- A slot ends in its rendezvous before its turn ends. So who waits for it is told while somebody still runs.
- Who calls gives its turn back while it waits for its slots, and takes it again before it goes on, also after an
  interrupt. What it cannot give back (see `patches.firm`) makes the slots take turns of their own.
- A slot with generators of its own has them, with the lock of the process, only while it has a turn.

`run_slots` and `run_slots_here` may be called from any thread. `_serve` runs in the pool, `_serve_here` in the caller.
Locks are those of the scheduler and of the rendezvous; neither is held where the other is taken, nor where code of the
user's runs. What changes a scheduler that others use is shielded, because an interrupt may come between any two steps
of the main thread.
"""

import contextvars
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch

from fdp._collectives.anchors import ANCHORS
from fdp._collectives.rendezvous import Rendezvous, Settings
from fdp._execution.alone import be_alone
from fdp._execution.interrupts import shielded
from fdp._execution.patches import firm
from fdp._execution.pool import Job, begin, is_any_at_work
from fdp._execution.random import OwnGenerators
from fdp._execution.scheduler import PARTICIPANT, Abandoned, Participant, Scheduler, this_participant
from fdp._execution.seeds import SlotSeeds
from fdp._placement.slot import (
    EXCLUSIVE,
    IN_ORDER,
    LENT,
    Slot,
    check_process,
    is_forked,
    run_in_slot,
    text_of,
)
from fdp._trees import torch_private

Task = Callable[[], Any]


Failures = list[tuple[Slot, Exception]]


class Outcome(NamedTuple):
    """What the tasks of each slot have returned, and which slots failed, those first that did not only wait."""

    results: list[list[Any]]
    failures: Failures


def run_slots(
    tasks: Sequence[Sequence[Task]], slots: Sequence[Sequence[Slot]], settings: Settings, token: object
) -> Outcome:
    """Run the tasks of each slot in a thread of its own, so many at a time.

    With a seed one runs at a time, and each draws from generators of its own. So it is where the caller has the random
    generators to itself: what it draws can be repeated, and what its slots draw has to be.
    """
    if settings.seed is not None:
        be_alone()  # nobody else is to draw from what its slots draw from
    run = _Lockstep(tasks, slots, settings, token, settings.limit)
    if settings.seed is None and (settings.limit == 1 or EXCLUSIVE.is_here()):
        run.seeds.take()
    return run.outcome(run.in_threads)


def run_slots_here(
    tasks: Sequence[Sequence[Task]], slots: Sequence[Sequence[Slot]], settings: Settings, token: object
) -> Outcome:
    """`run_slots` with slot 0 in the calling thread; the others begin when it first meets them, else after it.

    So that a function with effects runs as it would without collectives, until it calls one.
    """
    run = _Lockstep(tasks, slots, settings, token, 1)
    return run.outcome(run.here)


def _scheduler(limit: int) -> tuple[Participant | None, Scheduler]:
    """The turns that slots take part in, and the participant that waits for them meanwhile.

    Where this thread has something that it cannot give back, it keeps its turn, and the slots have turns of their own.
    """
    around, slot = this_participant(), PARTICIPANT.get()
    if around is None and slot is not None and slot.belongings:
        raise RuntimeError(
            "a call with collectives in a thread that a slot has started, while the slot has the random generators. "
            "Call it in the thread where the function runs, or mark the function with fdp.thread_safe"
        )
    if around is not None and firm() <= around.firm:
        return around, around.scheduler
    return None, Scheduler(1 if EXCLUSIVE.is_here() else limit)


@final
class _Lockstep:
    def __init__(
        self,
        tasks: Sequence[Sequence[Task]],
        slots: Sequence[Sequence[Slot]],
        settings: Settings,
        token: object,
        limit: int,
    ) -> None:
        self._around, scheduler = _scheduler(limit)
        self._is_lent = EXCLUSIVE.is_here() if self._around is None else LENT.get()
        self._rendezvous = Rendezvous([places[0] for places in slots], settings, scheduler, token)
        self._tasks, self._slots, self._settings = tasks, slots, settings
        self._results: list[list[Any]] = [[] for _ in tasks]
        self._errors: dict[int, tuple[Slot, BaseException]] = {}
        self._jobs: Sequence[Job] = ()
        self._left: SimpleQueue[None] = SimpleQueue()
        self._first: Participant | None = None  # of slot 0, where it runs in the calling thread
        self.seeds = SlotSeeds(settings.seed, has_values=settings.state.fake is None)

    def outcome(self, run: Callable[[], None]) -> Outcome:
        """What becomes of the slots; what is no Exception is raised, when all have ended."""
        around = self._around
        try:
            if around is not None:
                around.suspend()
            try:
                run()
                check_process(self._rendezvous.process)
            except BaseException:
                self._give_up()
                raise
            finally:
                if around is not None and not is_forked(self._rendezvous.process):
                    around.begin()
            self.seeds.leave()
            return self._outcome()
        finally:
            self._clear()

    def in_threads(self) -> None:
        """All slots in threads of their own."""
        self._begin(0)
        self._wait()

    def here(self) -> None:
        """Slot 0 in the calling thread."""
        self._rendezvous.start = self._start_others
        self._serve_here(0)
        if self._jobs:
            self._wait()
            return
        # It has met nobody: the others run after it, as if there were no collectives.
        self._rendezvous.start = None
        for index in range(1, len(self._tasks)):
            self._serve_here(index)

    def _start_others(self) -> None:
        # Each has generators of its own from here on; the caller's go on as those of slot 0.
        self.seeds.take()
        self._begin(1)

    def _begin(self, first: int) -> None:
        """Start the slots from this one on, in threads."""
        contexts = [(i, contextvars.copy_context()) for i in range(first, len(self._tasks))]
        jobs = [Job(partial(self._serve, *place), partial(self._left.put, None)) for place in contexts]

        def start() -> None:
            self._jobs, self._rendezvous.start = jobs, None
            self._rendezvous.scheduler.expect(len(jobs), self._around)
            try:
                begin(jobs)
            except RuntimeError:  # there can be no more threads
                self._rendezvous.scheduler.expect(-len(jobs), self._around)
                raise

        if PARTICIPANT.get() is None:  # nobody else takes these turns yet
            start()
        else:
            shielded(start)

    def _serve(self, index: int, context: contextvars.Context) -> None:
        """What the thread of a slot does."""
        try:
            with self._settings.state.restored(), torch.autograd.set_multithreading_enabled(False):
                context.run(self._work, index)
        except BaseException as error:
            self._errors.setdefault(index, (self._slots[index][0], error))
        finally:
            check_process(self._rendezvous.process)
            self._rendezvous.end(index, self._how(index))

    def _serve_here(self, index: int) -> None:
        """What the calling thread does for a slot; raises what is no Exception."""
        around = self._around
        keeps = index == 0 and (around is None or not around.belongings)
        own = self.seeds.kept(self._slots[0][0]) if keeps else []
        self._first = participant = self._participant(own)
        before = torch_private.is_multithreading_enabled()
        try:
            torch_private.set_multithreading_enabled(before and index > 0)
            shielded(partial(self._rendezvous.scheduler.expect, 1, around))
            contextvars.copy_context().run(self._run_as, index, participant, own)
        except Exception as error:
            if is_forked(self._rendezvous.process):
                raise
            self._errors.setdefault(index, (self._slots[index][0], error))
        finally:
            torch_private.set_multithreading_enabled(before)

    def _work(self, index: int) -> None:
        own = self.seeds.of(self._slots[index][0])
        self._run_as(index, self._participant(own), own)

    def _participant(self, own: Sequence[OwnGenerators]) -> Participant:
        """With generators of its own, or those of the one that waits for it."""
        around = self._around
        return Participant(
            self._rendezvous.scheduler, own or (around.belongings if around is not None else ()), around, firm()
        )

    def _run_as(self, index: int, participant: Participant, own: Sequence[OwnGenerators]) -> None:
        PARTICIPANT.set(participant)
        LENT.set(self._is_lent)
        IN_ORDER.set(True)  # calls inside may use no other threads than those that take turns
        ANCHORS.set(())  # each thread has a graph of its own
        participant.begin()
        try:
            for slot, task in zip(self._slots[index], self._tasks[index], strict=True):
                try:
                    seeded = partial(self.seeds.run, slot, own, task)
                    self._results[index].append(run_in_slot(slot, seeded, rendezvous=self._rendezvous))
                except BaseException as error:
                    self._errors[index] = slot, error
                    raise
        finally:
            check_process(self._rendezvous.process)
            self._rendezvous.end(index, self._how(index))  # before its turn ends, and nobody can go on
            participant.end()

    def _how(self, index: int) -> str:
        if index not in self._errors:
            return "has returned"
        error = self._errors[index][1]
        if isinstance(error, Abandoned):
            return "has given up"
        return f"has raised {type(error).__name__}: {text_of(error)}"

    def _wait(self) -> None:
        """Until the slots in threads have ended."""
        while is_any_at_work(self._jobs):
            self._left.get()

    def _give_up(self) -> None:
        """After an interrupt: the slots stop at their next collective. Wait until they have."""
        if is_forked(self._rendezvous.process):
            return
        try:
            shielded(self._end)
            self._wait()
        except BaseException:
            self._give_up()
            raise

    def _end(self) -> None:
        for index in range(len(self._tasks)):
            self._rendezvous.end(index, "was interrupted")
        if self._first is not None:
            self._first.leave()

    def _clear(self) -> None:
        """Let go: tracebacks hold this object."""
        self._errors.clear()
        self._tasks, self._results, self._jobs = (), [], ()
        self._rendezvous.clear()

    def _outcome(self) -> Outcome:
        for _, error in self._errors.values():
            if not isinstance(error, Exception):
                try:
                    raise error
                finally:
                    del error  # no cycle
        failures = [(slot, error) for _, (slot, error) in sorted(self._errors.items()) if isinstance(error, Exception)]
        failures.sort(key=lambda failure: 1 + failure[1].follows if isinstance(failure[1], Abandoned) else 0)
        return Outcome(self._results, failures)
