"""Running the shards of a call so that they can meet in collectives: forward, and backward in the same threads."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fdp._collectives.boundary import Ends, Made, Runs, isolated, made, stitched
from fdp._collectives.meeting import depth
from fdp._collectives.rendezvous import Settings
from fdp._collectives.slot_threads import Failures, run_slots, run_slots_here
from fdp._execution.patches import install, is_forward_mode
from fdp._execution.pool import cores
from fdp._execution.seeds import Seed
from fdp._execution.thread_state import ThreadState, why_not_together
from fdp._placement.peers import PeerCall
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.types import Tree


class Task(NamedTuple):
    """A function of a tree: what a shard runs, and the tensors that its graph begins with."""

    run: Callable[[Tree], Any]
    tree: Tree

    def __call__(self) -> Any:
        return self.run(self.tree)


def run_together(
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    *,
    side_by_side: bool,
    seed: Seed | None,
    here: bool = False,
    peers: PeerCall,
) -> tuple[list[Any], Failures]:
    """Run one task per slot, or several one after the other, with all slots alive: results in order, and failures.

    `here`: the first slot in the calling thread, and the others when it meets them.
    """
    reason = why_not_together()
    if reason is not None:
        raise RuntimeError(f"collectives need a thread for each slot, which cannot see {reason}")
    peers.meet()
    install()
    call = _Call(slots, _settings(slots, seed, peers, side_by_side=side_by_side), object())
    if call.settings.joint or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return call.run(tasks, here=here)
    trees, ends = zip(*(isolated(task.tree) for task in tasks), strict=True)
    own = [partial(_make, call.token, task.run, tree) for task, tree in zip(tasks, trees, strict=True)]
    results, failures = call.run(own, here=here)
    return (results, failures) if failures else (stitched(results, list[Ends](ends), call.runs()), [])


def _settings(slots: Sequence[Slot], seed: Seed | None, peers: PeerCall, *, side_by_side: bool) -> Settings:
    joint = torch_private.is_transformed() or is_forward_mode()
    count = len({slot.index for slot in slots})
    on_cpu = all(slot.device.type in ("cpu", "meta") for slot in slots)
    side_by_side = side_by_side and seed is None and not joint and torch_private.len_torch_dispatch_stack() == 0
    limit = (cores() if on_cpu else count) if side_by_side else 1
    state = ThreadState.of_caller([slot.device for slot in slots])
    share = cores() // min(limit, count) if on_cpu else state.threads
    return Settings(limit, seed, state.with_threads(share), joint, depth(), peers)


def _make(token: object, run: Callable[[Tree], Any], tree: Tree) -> Made:
    return made(lambda: run(tree), token)


class _Call(NamedTuple):
    """The slots of a call, several of which may be one after the other, and how they run: forward, and backward."""

    slots: Sequence[Slot]
    settings: Settings
    token: object

    def groups(self) -> list[list[int]]:
        """Which tasks are of one slot."""
        indices = dict.fromkeys(slot.index for slot in self.slots)
        return [[i for i, slot in enumerate(self.slots) if slot.index == index] for index in indices]

    def run(self, tasks: Sequence[Callable[[], Any]], *, here: bool = False) -> tuple[list[Any], Failures]:
        """One task for each of the slots: results in order, and failures."""
        before = torch.get_num_threads()
        groups = self.groups()
        try:
            outcome = (run_slots_here if here else run_slots)(
                [[tasks[i] for i in group] for group in groups],
                [[self.slots[i] for i in group] for group in groups],
                self.settings,
                self.token,
            )
        finally:
            if self.settings.state.threads != before:  # what a slot sets is also that of threads to come
                torch.set_num_threads(before)
        if outcome.failures:
            return [], outcome.failures
        found = dict(zip(itertools.chain(*groups), itertools.chain(*outcome.results), strict=True))
        return [found[i] for i in range(len(found))], []

    def runs(self) -> Runs:
        """How its slots run again."""
        rounds = [[i for i in each if i is not None] for each in itertools.zip_longest(*self.groups())]
        return Runs(self._run_again, rounds, self.token, lambda: not self.settings.peers.has_met)

    def _run_again(self, backwards: Sequence[Callable[[], Any]]) -> list[Any]:
        state = ThreadState.of_caller([slot.device for slot in self.slots]).with_threads(self.settings.state.threads)
        with self.settings.peers.again("the end of a backward"):
            found, failed = self._replace(settings=self.settings._replace(state=state, seed=None)).run(backwards)
            if failed:
                try:
                    raise failed[0][1]
                finally:
                    failed.clear()  # the traceback holds this frame: no cycle
        return found
