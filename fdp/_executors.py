"""Running the shards of a call. An executor runs tasks and hands on their results in order."""

import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fdp._context import Slot, run_in_slot
from fdp._dims import Plan
from fdp._typing import Executor

Task = Callable[[], Any]


def slots_of(plan: Plan, axis_name: str) -> list[Slot]:
    """The place of every shard of a plan."""
    ranks = {slot: rank for rank, slot in enumerate(dict.fromkeys(plan.slots))}
    several = len(ranks) < len(plan.slots)
    places = []
    for i, (slot, device) in enumerate(zip(plan.slots, plan.devices, strict=True)):
        piece = i - plan.slots.index(slot) if several else None
        places.append(Slot(ranks[slot], len(ranks), plan.rows(i), device, axis_name, piece))
    return places


def check_options(executor: Executor, seed: int | None, where: str) -> None:
    """The executor is `"auto"` or `"sequential"`, the seed an int."""
    if executor not in ("auto", "sequential"):
        raise ValueError(f"{where}: there is no executor {executor!r}; expected 'auto' or 'sequential'")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        raise TypeError(f"{where}: seed must be an int, got {seed!r}")


def run(tasks: Iterable[Task], slots: Sequence[Slot], seed: int | None, take: Callable[[int, Any], None]) -> None:
    """Run one task a slot, one after the other in the caller's thread, and let `take` have what each returns.

    Kernels on accelerators are asynchronous, so shards on different devices overlap all the same. If a shard fails the
    others still run, as they would side by side, and the first failure is raised with a note that names all of them.
    """
    if torch.compiler.is_compiling():
        for i, (slot, task) in enumerate(zip(slots, tasks, strict=True)):
            take(i, run_in_slot(slot, seed, task))
        return
    failures: list[tuple[Slot, Exception]] = []
    for i, (slot, task) in enumerate(zip(slots, tasks, strict=True)):
        try:
            result = run_in_slot(slot, seed, task)
        except Exception as error:
            failures.append((slot, error))
        else:
            take(i, result)
    if failures:
        try:
            raise _noted(failures)
        finally:
            failures.clear()  # the traceback holds this frame: no cycle


def run_all(tasks: Iterable[Task], slots: Sequence[Slot], seed: int | None) -> list[Any]:
    """`run`, with all results in a list."""
    results: list[Any] = []
    run(tasks, slots, seed, lambda _, result: results.append(result))
    return results


def _noted(failures: Sequence[tuple[Slot, Exception]]) -> Exception:
    slot, first = failures[0]
    notes = [str(slot)] + [f"also {other}: {type(error).__name__}: {error}" for other, error in failures[1:]]
    for note in notes:
        if note not in getattr(first, "__notes__", ()):  # one object may be raised again and again
            first.add_note(note)
    return first
