"""Slots that run one after the other in the caller's thread, until one comes to a collective.

It suspends there. The slots that have not begun get threads then, and all take turns by the baton. Without a collective
no thread is started. Kernels on accelerators are asynchronous, so shards on different devices overlap all the same.
"""

import _thread
import contextvars
import operator
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from fdp._execution.baton import HERE, Stop, Strand, Tree, strand_here
from fdp._execution.forks import is_forked
from fdp._execution.guards import install
from fdp._execution.run import Failures, Run, Take, Task
from fdp._execution.thread_pool import SlotThread, above_slots, advance, common_number, leave, take_thread
from fdp._execution.thread_state import ThreadState
from fdp._placement.peers import PeerCall
from fdp._placement.slot import AXES, Slot
from fdp._trees import torch_private

_device: Any = operator.attrgetter("device")


@final
class InOrder(Run):
    """What threads begin with is what holds where the call begins, and not what slot 0 has set since."""

    def __init__(self, tasks: Sequence[Task], slots: Sequence[Slot], peers: PeerCall) -> None:
        super().__init__(tasks, slots, peers)
        self._begun = 0  # how many slots have begun in the caller's thread
        if self.count > 1:
            install()
            above_slots()
            self._context, self._states = contextvars.copy_context(), HERE.states
            self._state = ThreadState.of_caller(map(_device, slots))

    def run(self, take: Take) -> Failures:
        """Run all slots; `take` has the results in order, each as soon as it can."""
        error: BaseException | None = None
        has_met = False
        while True:  # an interrupt may come anywhere in it
            try:
                if error is not None:
                    self.stop(error)
                    error = None
                while self._begun < self.count and self.interrupt is None:
                    if HERE.strand is not None and self._has_threads():
                        break
                    index = self._begun
                    self._begun += 1
                    self.run_slot(index)
                    if index not in self.errors and (HERE.strand is None or not self._has_threads()):
                        take(index, self.results[index])
                        self.results[index] = None
                if HERE.strand is not None:
                    self._wait()
                    has_met = self._end()
                break
            except BaseException as other:
                error = other
        try:
            failures = self.outcome()
            if has_met and not failures:
                for i, result in enumerate(self.results):
                    take(i, result)
            return failures
        finally:
            self.results = []

    def _has_threads(self) -> bool:
        return HERE.strand is not None and any(strand.run is self for strand in HERE.strand.tree.strands)

    def _wait(self) -> None:
        """Until the slots in threads have ended."""
        while (strand := HERE.strand) is not None and not self._is_over(strand):
            strand.wait(partial(self._is_over, strand), hears=self.interrupt is None)
            if strand.is_stopped():  # by an interrupt of a call around this one
                self.stop(Stop())

    def _is_over(self, caller: Strand) -> bool:
        return not any(strand.run is self and not strand.has_ended for strand in caller.tree.strands)

    def _end(self) -> bool:
        """Forget the strands; whether there were some."""
        strand, has_threads = HERE.strand, self._has_threads()
        if strand is None:
            return False
        strand.tree.remove(self)
        if len(strand.tree.strands) == 1:  # this is the outermost call that has met
            HERE.strand = None
            above_slots(strand.tree.number)
        return has_threads

    def meet(self, key: Any, index: int, come: Callable[[Any], Callable[[], bool]], make: Callable[[], Any]) -> Any:
        axes = AXES.get()
        for axis in axes[[axis.run for axis in axes].index(self) :]:  # those inside wait with this slot
            axis.run._start_others()
        strand = HERE.strand
        assert strand is not None
        if any(axis.run.interrupt is not None for axis in axes):
            raise Stop
        table = strand.tree.open
        meeting = table.get(key) or table.setdefault(key, make())
        is_over = come(meeting)
        try:
            strand.wait(is_over)
        finally:
            if is_over() and table.get(key) is meeting:  # the next one may be under way
                del table[key]
        if not is_over():
            raise Stop
        return meeting

    def meetings(self) -> list[Any]:
        return [] if HERE.strand is None else list(HERE.strand.tree.open.values())

    def _start_others(self) -> None:
        """Give those slots threads that have not begun."""
        if self.has_met or self.count == 1:
            return
        left = range(self._begun, self.count)
        strand = strand_here(HERE.strand.tree.number if HERE.strand is not None else common_number(left))
        tree = strand.tree
        others = [self._strand(tree, index) for index in left]
        at = tree.strands.index(strand) + 1
        tree.strands = [*tree.strands[:at], *others, *tree.strands[at:]]
        self.has_met = True

    def _strand(self, tree: Tree, index: int) -> Strand:
        strand, thread, begun = Strand(tree, self), take_thread(index, tree.number), _thread.allocate_lock()
        # The strand does not hold itself: if it never begins, its thread goes with it.
        strand.begin = lambda own: thread.jobs.put(partial(self._serve, index, own, thread, tree.number, begun))
        return strand

    def _serve(self, index: int, strand: Strand, thread: SlotThread, number: int, begun: Any) -> None:
        """What the thread of a slot does. It may be told so twice."""
        if not begun.acquire(False):
            return
        HERE.strand, HERE.states = strand, self._states
        try:
            advance(number)
            for state in self._states:
                state.resume()
            self.ended[index] = "was interrupted"
            if not strand.is_stopped():
                del self.ended[index]
                with self._state.restored():
                    self.run_slot(index, self._context.copy())
        except BaseException as error:
            if is_forked(self.process):  # there is nothing else than this thread
                traceback.print_exc()
                os._exit(1)
            self.errors.setdefault(index, error)
        finally:
            for state in reversed(self._states):
                state.pause()
            HERE.strand, HERE.states = None, ()
            strand.tree.number = max(strand.tree.number, torch_private.get_sequence_nr())
            leave(thread)
            strand.end()
