"""Slots that are all alive at once, a thread each, so that they can meet."""

import contextlib
import contextvars
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch

from fdp._context import EXCLUSIVE, IN_ORDER, SIDE_BY_SIDE, Slot, fold_in, generators_of, run_in_slot, text_of
from fdp._state import ThreadState
from fdp._turns import Abandoned, Member, Turns, Wait

Task = Callable[[], Any]

_MEMBER: "contextvars.ContextVar[Member | None]" = contextvars.ContextVar("fdp_member", default=None)


class Together(BaseException):
    """Raised by a collective in a shard that runs by itself: the call begins anew, with all shards alive at once."""


class What(NamedTuple):
    """Which collective a slot is in, and what has to be the same on all slots."""

    name: str
    same: Any
    say: Callable[[], str] | None = None


class Settings(NamedTuple):
    """How slots run together.

    `joint`: something outside differentiates or maps through the call, at `depth` layers of torch.func.
    """

    limit: int
    threads: int
    seed: int | None
    state: ThreadState
    joint: bool
    depth: int


@final
class Gang:
    """The slots of a call that run together, and where they meet."""

    def __init__(self, slots: Sequence[Slot], settings: Settings, turns: Turns, token: object) -> None:
        self.slots, self.settings, self.turns, self.token = slots, settings, turns, token
        self._lock = threading.Lock()
        self._meetings: dict[Any, _Meeting] = {}
        self._met: list[Counter[Any]] = [Counter() for _ in slots]
        self._ended: dict[int, str] = {}
        self.start: Callable[[], None] | None = None  # the other slots, when they are first needed

    def number(self, index: int, key: Any) -> Any:
        """The next meeting of a slot under a key: the first of one slot is with the first of the others."""
        self._met[index][key] += 1
        return key, self._met[index][key]

    def meet(self, index: int, key: Any, what: What, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until all slots are here with the same; the last one combines their values to one for each."""
        member = _MEMBER.get()
        if member is None:
            raise RuntimeError(f"{what.name}: this thread is none of fdp's; call collectives where the function runs")
        if self.start is not None:
            start, self.start = self.start, None
            start()
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting(self))
            wait = meeting.come(index, what, value)
            complete = len(meeting.values) == len(self.slots)
            if complete:
                del self._meetings[key]
            elif any(other not in meeting.values for other in self._ended):
                wait.error = meeting.explain(index)
        if wait.error is not None:
            wait.explain = None
            raise wait.error
        if complete:
            meeting.conclude(combine)
        else:
            member.wait(wait)
        return meeting.results[index]

    def end(self, index: int, how: str) -> None:
        """A slot will meet no more: those that wait for it get an error."""
        with self._lock:
            self._ended[index] = how
            vain = []
            for meeting in self._meetings.values():
                if index not in meeting.values:
                    for other, wait in meeting.waits.items():
                        if not wait.is_over:
                            wait.error = meeting.explain(other)
                            vain.append(wait)
        self.turns.resolve(vain)

    def where(self, missing: Sequence[int]) -> str:
        """What those do for whom a slot waits."""
        said = []
        for other in missing:
            if other in self._ended:
                said.append(f"shard {other} {self._ended[other]}")
                continue
            at = [meeting.whats[other].name for meeting in list(self._meetings.values()) if other in meeting.whats]
            said.append(f"shard {other} waits in {at[0]}" if at else f"shard {other} has not come to it")
        return ", ".join(said)


@final
class _Meeting:
    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self.values: dict[int, Any] = {}
        self.whats: dict[int, What] = {}
        self.waits: dict[int, Wait] = {}
        self.results: list[Any] = []

    def come(self, index: int, what: What, value: Any) -> Wait:
        self.values[index], self.whats[index] = value, what
        return self.waits.setdefault(index, Wait(lambda: self.explain(index)))

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
            self._gang.turns.resolve(list(self.waits.values()))

    def explain(self, index: int) -> Exception:
        """Why a slot waits in vain."""
        missing = [i for i in range(len(self._gang.slots)) if i not in self.whats]
        return Abandoned(
            f"{self.whats[index].name} in shard {index} waits in vain: {self._gang.where(missing)}. All shards must "
            "call the same collectives in the same order"
        )

    def _check(self) -> None:
        whats = sorted(self.whats.items())
        first = whats[0][1]
        if any(what.name != first.name for _, what in whats):
            each = ", ".join(f"{what.name} in shard {i}" for i, what in whats)
            raise RuntimeError(
                f"the shards call different collectives: {each}. All must call the same in the same order"
            )
        if any(what.same != first.same for _, what in whats):
            said = {i: what.say() if callable(what.say) else what.same for i, what in whats}
            each = ", ".join(f"{text} in shard {i}" for i, text in said.items())
            raise ValueError(f"{first.name}: the shards do not fit together: {each}")


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
    around = _MEMBER.get()
    turns = Turns(settings.limit) if around is None else around.turns
    gang = Gang([places[0] for places in slots], settings, turns, token)
    run = _Run(gang, tasks, slots, settings)
    if settings.seed is None and settings.limit == 1 and not settings.joint:
        run.take_seed()
    turns.expect(len(tasks))
    with _seats(len(tasks)) as seats:
        contexts = [contextvars.copy_context() for _ in tasks]
        for index, seat in enumerate(seats):
            seat.put((run.serve, index, contexts[index]))
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
    around = _MEMBER.get()
    turns = Turns(1) if around is None else around.turns
    gang = Gang([places[0] for places in slots], settings, turns, token)
    run = _Run(gang, tasks, slots, settings)
    with contextlib.ExitStack() as stack:

        def start() -> None:
            # Each has generators of its own from here on; the caller's go on as those of slot 0.
            run.take_seed()
            turns.expect(len(tasks) - 1)
            for index, seat in enumerate(stack.enter_context(_seats(len(tasks) - 1)), 1):
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
        self._randoms: list[_Random] = []
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
        state = torch.default_generator.get_state().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(state).digest()[:8], "little")
        self._settings, self._has_taken = self._settings._replace(seed=seed), True

    def leave_seed(self) -> None:
        """Move the caller's generator if slots have drawn: the next call is to draw something else."""
        if self._has_taken and any(random.has_drawn() for random in self._randoms):
            torch.rand((), device="cpu")  # whatever the default device is

    def serve_here(self) -> None:
        """Slot 0, in the calling thread."""
        self._gang.turns.expect(1)
        member = Member(self._gang.turns, _Kept(self._slots[0][0].device))
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
        random = None if seed is None else _Random(fold_in(seed, place.index), place.device)
        self._randoms += [] if random is None else [random]
        self._run_as(index, Member(self._gang.turns, random))

    def _run_as(self, index: int, member: Member) -> None:
        _MEMBER.set(member)
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
        while count:
            try:
                self._left.get()
                count -= 1
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


class _Random:
    """The generators of a slot, in place of the process's while it has its turn."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generators = seed, generators_of(device)
        self._first: list[torch.Tensor] = []
        self._own: list[torch.Tensor] | None = None
        self._outside: list[torch.Tensor] = []

    def renew(self, data: int) -> None:
        """Another seed, during a turn."""
        for generator in self._generators:
            generator.manual_seed(fold_in(self._seed, data))

    def resume(self) -> None:
        """Begin a turn."""
        EXCLUSIVE.lock.acquire()
        self._outside = [generator.get_state() for generator in self._generators]
        for i, generator in enumerate(self._generators):
            if self._own is None:
                self._first.append(generator.manual_seed(self._seed).get_state())
            else:
                generator.set_state(self._own[i])

    def pause(self) -> None:
        """End a turn."""
        self._own = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        EXCLUSIVE.lock.release()

    def has_drawn(self) -> bool:
        """Whether something was drawn."""
        return self._own is not None and not all(map(torch.equal, self._own, self._first))


@final
class _Kept(_Random):
    """Those of the slot in the calling thread: what it finds there, and leaves."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)

    def renew(self, data: int) -> None:
        """It goes on."""

    def resume(self) -> None:
        if self._own is not None:
            for generator, state in zip(self._generators, self._own, strict=True):
                generator.set_state(state)

    def pause(self) -> None:
        self._own = [generator.get_state() for generator in self._generators]


# ---- threads that stay


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[SimpleQueue[Any]] = []


_POOL = _Pool()


@contextlib.contextmanager
def _seats(count: int) -> Iterator[list["SimpleQueue[Any]"]]:
    """Threads for a call: the same one for the same slot, unless calls overlap.

    Autograd orders a backward by numbers that each thread counts for itself.
    """
    pool = _POOL
    with pool.lock:
        taken = [pool.idle.pop() if pool.idle else _start() for _ in range(count)]
    try:
        yield taken
    finally:
        with pool.lock:
            pool.idle.extend(reversed(taken))


def _start() -> "SimpleQueue[Any]":
    jobs: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(jobs,), name="fdp-slot", daemon=True).start()
    return jobs


def _serve(jobs: "SimpleQueue[Any]") -> None:
    while True:
        serve, index, context = jobs.get()
        serve(index, context)
        del serve, context  # an idle thread keeps nothing alive


def _renew() -> None:
    global _POOL
    _POOL = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
