"""Running the shards of a call: in order or side by side, and what becomes of those that fail."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fdp._execution.baton import HERE
from fdp._execution.guards import BESIDE
from fdp._execution.in_order import InOrder
from fdp._execution.process_lock import is_held_here
from fdp._execution.run import Failures, Take, Task
from fdp._execution.seeds import Seed
from fdp._execution.side_by_side import SideBySide
from fdp._execution.thread_state import why_not_beside
from fdp._placement.peers import ALONE_IN_CALL, PeerCall
from fdp._placement.slot import AXES, Slot
from fdp._trees.tracebacks import text_of
from fdp._trees.types import Executor


def check_executor(executor: Executor, where: str) -> None:
    """It is one of those that there are."""
    if executor not in ("auto", "sequential", "threads"):
        raise ValueError(f"{where}: there is no executor {executor!r}; expected 'auto', 'sequential' or 'threads'")


def how_run(executor: Executor, seed: Seed | None, shards: int) -> str:
    """How shards run, and why."""
    reason = why_in_order(executor, seed, shards)
    return "side by side in threads" if reason is None else f"one shard after the other: {reason}"


def why_in_order(executor: Executor, seed: Seed | None, shards: int) -> str | None:
    """Why shards do not run side by side; None if they do: it is wanted, and threads see what the caller sees."""
    if shards < 2:
        return "there is one"
    if executor != "threads":
        return f"executor={executor!r}"
    if seed is not None:
        return "they are seeded, and take turns with torch's one generator of the CPU"
    if AXES.get() or BESIDE.get() or HERE.states or is_held_here():
        return "the call is inside another one"
    return why_not_beside()


def run(
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    take: Take,
    executor: Executor = "sequential",
    seed: Seed | None = None,
    peers: PeerCall = ALONE_IN_CALL,
    *,
    lacks_slots: bool = False,
) -> None:
    """Run one task per slot and let `take` have what each returns, in order. Not while compiling: see `traced`.

    If a shard fails the others still run, and the first failure is raised with a note that names all of them. It
    `lacks_slots` if these are not the shards of all slots.
    """
    if not tasks:  # other processes have them
        return
    if seed is not None:
        tasks = [partial(seed.run, slot, task) for slot, task in zip(slots, tasks, strict=True)]
    is_beside = executor == "threads" and why_in_order(executor, seed, len(tasks)) is None
    own = (SideBySide if is_beside else InOrder)(tasks, slots, peers)
    own.lacks_slots = lacks_slots
    failures = own.run(take)
    if failures:
        try:
            raise _noted(failures)
        finally:
            failures.clear()  # the traceback holds this frame: no cycle


def traced(tasks: Sequence[Task], seed: Seed | None) -> list[Any]:
    """What tasks return that torch.compile traces."""
    if seed is not None:
        raise RuntimeError("seed= cannot be used inside torch.compile: generators are not traced")
    return [task() for task in tasks]


def run_all(
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    executor: Executor = "sequential",
    seed: Seed | None = None,
    peers: PeerCall = ALONE_IN_CALL,
    *,
    lacks_slots: bool = False,
) -> list[Any]:
    """`run`, with all results in a list; while compiling too."""
    if torch.compiler.is_dynamo_compiling():
        return traced(tasks, seed)
    results: list[Any] = [None] * len(tasks)
    run(tasks, slots, results.__setitem__, executor, seed, peers, lacks_slots=lacks_slots)
    return results


def _noted(failures: Failures) -> Exception:
    slot, first = failures[0]
    texts = [f"{type(error).__name__}: {text_of(error)}" for _, error in failures]
    notes = [str(slot)]  # the first must be seen, also of many slots
    for (other, _), text, before in zip(failures[1:], texts[1:], texts, strict=False):
        notes.append(f"also {other}: {'the same' if text == before else text}")
    with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
        for note in notes:
            if note not in getattr(first, "__notes__", ()):  # one object may be raised again and again
                first.add_note(note)
    return first
