"""Running slots so that all are alive at once: a thread each, in turns."""

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fdp._context import EXCLUSIVE, IN_ORDER, SIDE_BY_SIDE, Slot, fold_in, run_in_slot, text_of
from fdp._gang import MEMBER, Gang, Settings
from fdp._generators import KeptGenerators, OwnGenerators
from fdp._seats import seats
from fdp._tensor import bytes_of
from fdp._turns import Abandoned, Member, Turns

Task = Callable[[], Any]


class Outcome(NamedTuple):
    """What the tasks of each slot have returned, and which slots failed, those first that did not only wait."""

    results: list[list[Any]]
    failures: list[tuple[Slot, Exception]]


def run_gang(
    tasks: Sequence[Sequence[Task]], slots: Sequence[Sequence[Slot]], settings: Settings, token: object
) -> Outcome:
    """Run the tasks of each slot in a thread of its own, so many at a time.

    With a seed one runs at a time, and each draws from generators of its own.
    """
    around = MEMBER.get()
    turns = Turns(settings.limit) if around is None else around.turns
    gang = Gang([places[0] for places in slots], settings, turns, token)
    run = _Run(gang, tasks, slots, settings)
    if settings.seed is None and settings.limit == 1 and not settings.joint:
        run.take_seed()
    with seats(len(tasks)) as taken:
        turns.expect(len(tasks))
        for index, seat in enumerate(taken):
            seat.put((run.serve, index, contextvars.copy_context()))
        with contextlib.nullcontext() if around is None else around.suspended():
            run.wait(len(tasks))
    run.leave_seed()
    try:
        return run.outcome()
    finally:
        run.clear()


def run_gang_here(
    tasks: Sequence[Sequence[Task]], slots: Sequence[Sequence[Slot]], settings: Settings, token: object
) -> Outcome:
    """`run_gang` with slot 0 in the calling thread; the others begin when it first meets them, else after it.

    So that a function with effects runs as it would without collectives, until it calls one.
    """
    around = MEMBER.get()
    turns = Turns(1) if around is None else around.turns
    gang = Gang([places[0] for places in slots], settings, turns, token)
    run = _Run(gang, tasks, slots, settings)
    with contextlib.ExitStack() as stack:

        def start() -> None:
            # Each has generators of its own from here on; the caller's go on as those of slot 0.
            if not settings.joint:
                run.take_seed()
            taken = stack.enter_context(seats(len(tasks) - 1))
            turns.expect(len(tasks) - 1)
            for index, seat in enumerate(taken, 1):
                seat.put((run.serve, index, contextvars.copy_context()))

        gang.start = start
        try:
            with contextlib.nullcontext() if around is None else around.suspended():
                run.serve_here()
                if gang.start is None:
                    run.wait(len(tasks) - 1)
                    run.leave_seed()
                else:
                    run.serve_the_others_here()
            return run.outcome()
        finally:
            run.clear()


@final
class _Run:
    def __init__(
        self, gang: Gang, tasks: Sequence[Sequence[Task]], slots: Sequence[Sequence[Slot]], settings: Settings
    ) -> None:
        self._gang, self._tasks, self._slots, self._settings = gang, tasks, slots, settings
        self._results: list[list[Any]] = [[] for _ in tasks]
        self._errors: dict[int, tuple[Slot, BaseException]] = {}
        self._left: SimpleQueue[None] = SimpleQueue()
        self._over: list[int] = []
        self._randoms: list[OwnGenerators] = []
        self._has_taken = False

    def serve(self, index: int, context: contextvars.Context) -> None:
        """What the thread of a slot does."""
        try:
            if torch.get_num_threads() != self._settings.threads:
                torch.set_num_threads(self._settings.threads)
            with self._settings.state.restored(), torch.autograd.set_multithreading_enabled(False):
                context.run(self._work, index)
        except BaseException as error:
            self._errors.setdefault(index, (self._slots[index][0], error))
        finally:
            self._gang.end(index, self._how(index))
            self._over.append(index)
            self._left.put(None)

    def _how(self, index: int) -> str:
        if index not in self._errors:
            return "has returned"
        error = self._errors[index][1]
        if isinstance(error, Abandoned):
            return "has given up"
        return f"has raised {type(error).__name__}: {text_of(error)}"

    def take_seed(self) -> None:
        """A seed for slots that take turns, from the state of the caller's generator."""
        if self._settings.state.fake is not None:  # what has no values draws none
            return
        # Inside a transform the state has no memory to read.
        with EXCLUSIVE.held(), temporarily_clear_interpreter_stack():
            state = bytes_of(torch.default_generator.get_state())
        seed = int.from_bytes(hashlib.sha256(state).digest()[:8], "little")
        self._settings, self._has_taken = self._settings._replace(seed=seed), True

    def leave_seed(self) -> None:
        """Move the caller's generator if slots have drawn: the next call is to draw something else."""
        if self._has_taken and any(random.has_drawn() for random in self._randoms):
            torch.rand((), device="cpu")  # whatever the default device is

    def serve_here(self) -> None:
        """Slot 0, in the calling thread."""
        self._gang.turns.expect(1)
        faking = self._settings.state.fake is not None
        member = Member(self._gang.turns, None if faking else KeptGenerators(self._slots[0][0].device))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                contextvars.copy_context().run(self._run_as, 0, member)
        except BaseException as error:
            self._errors.setdefault(0, (self._slots[0][0], error))
        finally:
            self._gang.end(0, self._how(0))

    def serve_the_others_here(self) -> None:
        """Slot 0 has met nobody: the others run after it, as if there were no collectives."""
        self._gang.start = None
        for index in range(1, len(self._tasks)):
            if not all(isinstance(error, Exception) for _, error in self._errors.values()):
                return
            self._gang.turns.expect(1)
            try:
                contextvars.copy_context().run(self._run_as, index, Member(self._gang.turns, None))
            except BaseException as error:
                self._errors.setdefault(index, (self._slots[index][0], error))
            finally:
                self._gang.end(index, self._how(index))

    def _work(self, index: int) -> None:
        seed, place = self._settings.seed, self._slots[index][0]
        faking = self._settings.state.fake is not None
        random = None if seed is None or faking else OwnGenerators(fold_in(seed, place.index), place.device)
        self._randoms += [] if random is None else [random]
        self._run_as(index, Member(self._gang.turns, random))

    def _run_as(self, index: int, member: Member) -> None:
        MEMBER.set(member)
        SIDE_BY_SIDE.set(_Place(member))
        IN_ORDER.set(True)  # calls inside may use no other threads than those that take turns
        with member.running():
            try:
                for slot, task in zip(self._slots[index], self._tasks[index], strict=True):
                    try:
                        if slot.piece and member.belongings is not None:
                            member.belongings.renew(slot.piece)
                        self._results[index].append(run_in_slot(slot, None, task, gang=self._gang))
                    except BaseException as error:
                        self._errors[index] = slot, error
                        raise
            finally:
                self._gang.end(index, self._how(index))  # before its turn ends, and somebody waits in vain

    def wait(self, count: int) -> None:
        """Until so many slots have ended. After an interrupt they stop at their next collective."""
        interrupt: BaseException | None = None
        while len(self._over) < count:
            try:
                self._left.get()  # an interrupt may lose what it returns: the list counts
            except BaseException as error:
                interrupt = error
                for index in range(len(self._tasks)):
                    self._gang.end(index, "was interrupted")
        if interrupt is not None:
            raise interrupt

    def clear(self) -> None:
        """Let go: tracebacks hold this object."""
        self._errors.clear()
        self._tasks = self._results = []

    def outcome(self) -> Outcome:
        """What has become of the slots; what is no Exception is raised."""
        for _, error in self._errors.values():
            if not isinstance(error, Exception):
                try:
                    raise error
                finally:
                    del error  # no cycle
        failures = [(slot, error) for _, (slot, error) in sorted(self._errors.items()) if isinstance(error, Exception)]
        failures.sort(key=lambda failure: isinstance(failure[1], Abandoned))
        return Outcome(self._results, failures)


class _Place(NamedTuple):
    """Of a slot among the others: see `Beside`."""

    member: Member

    def alone(self) -> None:
        self.member.turns.alone(self.member)
