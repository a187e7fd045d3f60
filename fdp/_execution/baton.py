"""Whose turn it is, where the slots of a call meet: exactly one thread of a tree of nested calls runs.

A *strand* is a thread of control: that of the caller of the outermost call, and those of slots that were started. What
a strand waits for is a condition, and the first strand whose condition holds goes on. If there is none, all waits that
somebody can give up are given up. So nothing is counted or timed, and nothing has to be undone.

What holds at any time:

- Who has the baton stands in `Tree.turn`. Only that strand reads or changes the tree, so there is no lock.
- Who passes the baton on has noted before what it waits for. It goes on when it has the baton again, and not before: an
  interrupt that comes meanwhile is kept (`late`) until then. So no two strands ever run code of the user's at once.
- A strand that ends passes the baton on in `finally`.
- An interrupt may come between any two steps of passing it on. Then they are taken again: a turn is passed on once,
  since each is another object, and a strand that was woken before looks whose turn it is.
"""

import _thread
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, final

from fdp._placement.slot import AXES

HEARS = 1.0
"""Seconds until who waits looks again: an interrupt that came just before it waited does not end the wait."""


class Stop(BaseException):
    """Unwinds a slot whose call was interrupted elsewhere. Nobody else sees it."""


class TurnState(Protocol):
    """What a strand has to itself while it has the baton."""

    def resume(self) -> None:
        """It has the baton."""
        ...

    def pause(self) -> None:
        """It passes the baton on. It may be called twice."""
        ...


class Holder:
    """Who has the lock of the process, and how often: see `process_lock`."""

    count = 0


class Here(threading.local):
    """What this thread is: the strand of a tree, if it is one, and what it has to itself, the outermost first."""

    def __init__(self) -> None:
        self.strand: Strand | None = None
        self.states: tuple[TurnState, ...] = ()
        self.holder = Holder()


HERE = Here()


@final
class Tree:
    """The strands of nested calls, in the order of their slots, and what they wait for in common."""

    def __init__(self, root: "Strand") -> None:
        self.strands = [root]
        self.turn = (root,)  # a new tuple each time that the baton is passed on
        self.holder = HERE.holder
        self.number = 0  # what the threads of its next call begin with: see `thread_pool`
        self.open: dict[Any, Any] = {}  # meetings that are not over, each with `give_up`

    def pick(self) -> "Strand":
        """Who goes on: the first that can. If nobody can, everybody is told so, and can."""
        while True:
            for strand in self.strands:
                if strand.is_ready():
                    return strand
            waits = list(self.open.values())
            assert waits, "nobody can go on, and nobody waits for others"
            for wait in waits:
                wait.explain()
            for wait in waits:
                wait.give_up()

    def remove(self, run: Any) -> None:
        """Forget the strands of a run that is over."""
        self.strands = [strand for strand in self.strands if strand.run is not run]


@final
class Strand:
    """A thread of control: that of a slot of a `run`, or the root. What has not begun yet has `begin`."""

    def __init__(self, tree: Tree | None = None, run: Any = None) -> None:
        self.tree = tree or Tree(self)
        self.run = run
        self._runs = _runs_here()  # an interrupt of one of these ends what runs in it
        self.begin: Callable[[Strand], None] | None = None
        self.is_over: Callable[[], bool] | None = None  # what it waits for; None if it does not wait
        self.late: BaseException | None = None
        self.has_ended, self._hears = False, True
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    def is_ready(self) -> bool:
        """Whether it can go on."""
        if self.has_ended:
            return False
        if self.is_over is None or self.is_over():
            return True
        return self._hears and (self.late is not None or self.is_stopped())

    def is_stopped(self) -> bool:
        """Whether a call around it was interrupted."""
        return any(run.interrupt is not None for run in self._runs)

    def wait(self, is_over: Callable[[], bool], *, hears: bool = True) -> None:
        """Pass the baton on, and go on when it is over; then raise an interrupt that came meanwhile.

        One that `hears` goes on for an interrupt too, when it has the baton.
        """
        self.is_over, self._hears, self._runs = is_over, hears, _runs_here()
        tree, mine, states = self.tree, self.tree.turn, HERE.states
        while True:
            try:
                if tree.turn is mine:
                    for state in reversed(states):
                        state.pause()
                    given = tree.pick()
                    if given is self:
                        break
                    tree.turn = (given,)
                tree.turn[0].wake()
                while tree.turn is mine or tree.turn[0] is not self:
                    self._gate.acquire(timeout=HEARS)
                break
            except AssertionError:
                raise
            except BaseException as error:
                self.late = error
        self.is_over = None
        for state in states:
            state.resume()
        late, self.late = self.late, None
        if late is not None:
            try:
                raise late
            finally:
                del late  # no cycle

    def end(self) -> None:
        """Pass the baton on for good."""
        self.has_ended = True
        self.tree.turn = (self.tree.pick(),)
        self.tree.turn[0].wake()

    def wake(self) -> None:
        """Tell it that it has the baton."""
        begin = self.begin
        if begin is not None:
            begin(self)  # twice, perhaps: its thread sees to that
            self.begin = None
        with contextlib.suppress(RuntimeError):  # it was woken before: it looks who has the baton
            self._gate.release()


def _runs_here() -> tuple[Any, ...]:
    return tuple([axis.run for axis in AXES.get()])


def strand_here(number: int) -> Strand:
    """That of this thread; if it is none yet, the root of a new tree, whose other threads begin with that number."""
    strand = HERE.strand
    if strand is None:
        strand = Strand()
        strand.tree.number = number
        HERE.strand = strand
    return strand


def _forget() -> None:
    """A forked child has none of the other strands."""
    HERE.strand = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
