"""Running the shards of a call so that they can meet in collectives."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fdp._collectives.boundary import Ends, Made, Runs, isolated, made, stitched
from fdp._collectives.meeting import depth
from fdp._collectives.rendezvous import Settings
from fdp._collectives.slot_threads import Outcome, run_slots, run_slots_here
from fdp._execution.patches import install, is_forward_mode
from fdp._execution.pool import cores
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
    seed: int | None,
    here: bool = False,
    peers: PeerCall,
) -> tuple[list[Any], list[tuple[Slot, Exception]]]:
    """Run one task a slot, or several one after the other, with all slots alive: results in order, and failures.

    `here`: the first slot in the calling thread, and the others when it meets them.
    """
    reason = why_not_together()
    if reason is not None:
        raise RuntimeError(f"collectives need a thread for each slot, which cannot see {reason}")
    install()
    indices = dict.fromkeys(slot.index for slot in slots)
    groups = [[i for i, slot in enumerate(slots) if slot.index == index] for index in indices]
    joint = torch_private.is_transformed() or is_forward_mode()
    devices = [slot.device for slot in slots]
    on_cpu = all(device.type in ("cpu", "meta") for device in devices)
    side_by_side = side_by_side and seed is None and not joint and torch_private.len_torch_dispatch_stack() == 0
    limit = (cores() if on_cpu else len(groups)) if side_by_side else 1
    threads = torch.get_num_threads()
    share = max(1, min(threads, cores() // min(limit, len(groups)))) if on_cpu else threads
    settings = Settings(limit, share, seed, ThreadState.of_caller(devices), joint, depth(), peers)
    token = object()
    if joint or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _in_order(_run(tasks, slots, groups, settings, token, here=here), groups)
    trees, ends = zip(*(isolated(task.tree) for task in tasks), strict=True)
    own = [functools.partial(_make, token, task.run, tree) for task, tree in zip(tasks, trees, strict=True)]
    results, failures = _in_order(_run(own, slots, groups, settings, token, here=here), groups)
    if failures:
        return results, failures

    def run_all(backwards: Sequence[Callable[[], Any]]) -> list[Any]:
        again = settings._replace(state=ThreadState.of_caller(devices), seed=None)
        with peers.again("the end of a backward"):
            found, failed = _in_order(_run(backwards, slots, groups, again, token), groups)
            if failed:
                try:
                    raise failed[0][1]
                finally:
                    failed.clear()  # the traceback holds this frame: no cycle
        return found

    rounds = [[i for i in each if i is not None] for each in itertools.zip_longest(*groups)]
    runs = Runs(run_all, rounds, token, lambda: not peers.has_met)
    return stitched(results, list[Ends](ends), runs), []


def _make(token: object, run: Callable[[Tree], Any], tree: Tree) -> Made:
    return made(lambda: run(tree), token)


def _run(
    tasks: Sequence[Callable[[], Any]],
    slots: Sequence[Slot],
    groups: Sequence[Sequence[int]],
    settings: Settings,
    token: object,
    *,
    here: bool = False,
) -> Outcome:
    before = torch.get_num_threads()
    try:
        chosen = [[tasks[i] for i in group] for group in groups]
        run = run_slots_here if here else run_slots
        return run(chosen, [[slots[i] for i in group] for group in groups], settings, token)
    finally:
        if settings.threads != before:  # what a slot sets is also that of threads to come
            torch.set_num_threads(before)


def _in_order(outcome: Outcome, groups: Sequence[Sequence[int]]) -> tuple[list[Any], list[tuple[Slot, Exception]]]:
    if outcome.failures:
        return [], outcome.failures
    found: dict[int, Any] = {}
    for group, results in zip(groups, outcome.results, strict=True):
        found |= zip(group, results, strict=True)
    return [found[i] for i in range(len(found))], []
