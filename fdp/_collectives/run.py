"""Running the shards of a call: tasks, one per slot, whose results are handed on in order.

Which way they take:

- Compiled: traced, one after the other.
- Each by itself (`_run_apart`): side by side in threads, or in order in the caller's thread; `why_in_order` decides.
- All alive (`_run_together`), so that they can meet in collectives: if the function is known to meet, or has effects.

Nobody knows beforehand that a function meets. If a shard that runs by itself comes to a collective, `Together` ends
it, the generators go back to where they were, and all begin anew with all slots alive. If the caller has to prepare for
that (`Mode.apart`), it is the caller that begins anew: `Again`. What a function was found to need is remembered in
`function_traits`. None of these exceptions is ever in a traceback of the user's.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fdp._collectives.lockstep import Task, run_together
from fdp._collectives.slot_threads import Failures
from fdp._execution.executor import Mode, timings_of, why_in_order
from fdp._execution.function_traits import (
    begin_anew,
    compilations,
    is_cold,
    is_marked,
    may_compile,
    meets,
    must_run_in_order,
    note,
    remember_together,
)
from fdp._execution.patches import IN_TURNS
from fdp._execution.random import bookmark, stay
from fdp._execution.restart import Again, Together, forget_restarts
from fdp._execution.seeds import seeded
from fdp._execution.thread_state import why_not_together
from fdp._execution.threads import inner_threads, run_side_by_side
from fdp._placement.slot import IN_PLACE, WANTED, Slot, run_in_slot, text_of
from fdp._trees import torch_private
from fdp._trees.tree import map_tensors, needing_gradients
from fdp._trees.untraced import leave_alone

Take = Callable[[int, Any], Any]


def run(tasks: Sequence[Task], slots: Sequence[Slot], mode: Mode, take: Take) -> None:
    """Run one task per slot and let `take` have what each returns, in order.

    If a shard fails the others still run, and the first failure is raised with a note that names all of them.
    """
    if not tasks:  # other processes have them
        return
    if torch.compiler.is_compiling():
        if mode.seed is not None:
            raise RuntimeError("seed= cannot be used inside torch.compile: generators are not traced")
        for i, (slot, task) in enumerate(zip(slots, tasks, strict=True)):
            take(i, run_in_slot(slot, task))
        return
    taken: list[int] = []
    name, failures = _run_apart(tasks, slots, mode, lambda i, result: (taken.append(i), take(i, result)), taken)
    if name is not None:
        if not mode.effects:
            remember_together(mode.fn)
        begin_anew()
        if mode.apart and not (mode.stays and name == ""):  # no shard has run, and so none has had effects
            raise Again(name)
        failures = _run_together(tasks, slots, mode, (lambda i, result: None) if taken else take)
        if taken and not failures:
            raise RuntimeError(
                f"{name} is called in some shards, but not always in all of them. All shards must call the same "
                "collectives in the same order"
            )
    if failures:
        try:
            raise _noted(failures)
        finally:
            failures.clear()  # the traceback holds this frame: no cycle


def _is_known_to_meet(mode: Mode) -> bool:
    return mode.effects or (meets(mode.fn) and not IN_PLACE.get())  # where collectives are refused


def _run_apart(
    tasks: Sequence[Task], slots: Sequence[Slot], mode: Mode, take: Take, taken: Sequence[int]
) -> tuple[str | None, Failures]:
    """Run shards each by itself: the collective for which all have to be alive, or None and the failures.

    From here on it is a name and no exception, which would be the context of what the user sees.
    """
    if _is_known_to_meet(mode) and slots[0].count > 1 and why_not_together() is None:
        return "", []
    wanted: list[str] = []
    repeats = mode.seed is None and slots[0].count > 1
    go_back = bookmark({slot.device for slot in slots}) if repeats else stay
    before = WANTED.set(wanted)
    try:
        failures = _run_each(tasks, slots, mode, take, taken, go_back)
    except Together as need:
        if need.wanted is not wanted:  # a collective of an axis around this one
            raise
        need.__traceback__ = None  # before torch 2.13 a checkpoint that it came through ends with its frame only
        failures = None
    except BaseException as error:
        forget_restarts(error)  # an interrupt may have come on its way
        raise
    finally:
        WANTED.reset(before)
    if not wanted:
        return None, failures or []
    if failures == []:
        raise RuntimeError(
            f"{wanted[0]}: the function catches what is no Exception around its first collective, by a bare "
            "`except:` or a `return` in `finally`, and fdp cannot begin anew there. Catch Exception"
        )
    go_back()  # those that failed did so in a `finally` or `except` around the collective, perhaps
    return wanted[0], []


def _run_each(
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    mode: Mode,
    take: Take,
    taken: Sequence[int],
    go_back: Callable[[], None],
) -> Failures:
    """Side by side if they can, and in order what is left."""
    if why_in_order(mode, len(tasks)) is not None:
        return _run_in_order(tasks, slots, mode, take, 0)
    timings = timings_of(mode, slots)
    in_order, start = timings is not None and timings.begin(), time.perf_counter()
    tasks = _in_a_chain(tasks)
    if in_order:
        with inner_threads(len(tasks)):  # the same bits, whichever way times have chosen
            failures = _run_in_order(tasks, slots, mode, take, 0)
    else:
        failures = run_side_by_side(tasks, slots, mode.fn, take, has_effects=mode.stays)
    if failures is None:
        if not taken:  # else what was taken would be drawn again
            go_back()
        return _run_in_order(tasks, slots, mode, take, len(taken))
    if timings is not None and not failures:
        timings.note(time.perf_counter() - start, in_order=in_order)
    return failures


def _in_a_chain(tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks, in which each shard has an alias of its own of what several have, made of that of the one before.

    So that a gradient is summed in the order of the shards. Else it would be in the order in which a backward comes to
    them, and that depends on how much each thread has recorded before.
    """
    if not torch.is_grad_enabled():
        return tasks
    shared = [x for task in tasks for x in needing_gradients(task.tree) if _has_links(x)]
    counts = Counter(map(id, shared))
    if all(count == 1 for count in counts.values()):
        return tasks
    links = {id(x): x for x in shared if counts[id(x)] > 1}

    def alias(own: dict[int, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if id(x) in links and id(x) not in own:
            links[id(x)] = links[id(x)].expand_as(x)
            own[id(x)] = _like(x, links[id(x)].expand_as(x))  # where its parts within a shard are summed
        return own.get(id(x), x)

    return [Task(task.run, map_tensors(partial(alias, {}), task.tree)) for task in tasks]


def _has_links(x: torch.Tensor) -> bool:
    """Whether a tensor has aliases."""
    return x.layout is torch.strided and not x.is_nested


def _like(x: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """An alias with what a function can see of a tensor: its class, attributes and gradient."""
    if type(x) is not type(alias):
        alias = alias.as_subclass(type(x))
    for name, value in vars(x).items():  # not those that its class has given the alias already
        vars(alias).setdefault(name, value)
    if x.is_leaf and x.grad is not None:
        alias.grad = x.grad
    return alias


def _run_together(tasks: Sequence[Task], slots: Sequence[Slot], mode: Mode, take: Take) -> Failures:
    side_by_side = mode.executor == "threads" or (mode.executor == "auto" and is_marked(mode.fn))
    here = mode.effects and mode.seed is None and not side_by_side
    compiles = may_compile()
    if compiles and any(is_cold(mode.fn, slot) for slot in slots):
        side_by_side = False
    before = compilations()
    results, failures = run_together(
        tasks, slots, side_by_side=side_by_side, seed=mode.seed, here=here, peers=mode.peers
    )
    if compiles:
        for slot in slots:
            note(mode.fn, slot, compiled=compilations() != before)
    for i, result in enumerate(results):
        take(i, result)
    return failures


def run_all(tasks: Sequence[Task], slots: Sequence[Slot], mode: Mode) -> list[Any]:
    """`run`, with all results in a list."""
    results: list[Any] = []
    run(tasks, slots, mode, lambda _, result: results.append(result))
    return results


def _run_in_order(tasks: Sequence[Task], slots: Sequence[Slot], mode: Mode, take: Take, first: int) -> Failures:
    """One after the other in the caller's thread, from the `first` on.

    Kernels on accelerators are asynchronous, so shards on different devices overlap all the same.
    """
    failures: Failures = []
    before = IN_TURNS.set(IN_TURNS.get() or must_run_in_order(mode.fn))
    try:
        for i, (slot, task) in list(enumerate(zip(slots, tasks, strict=True)))[first:]:
            try:
                result = run_in_slot(slot, task if mode.seed is None else partial(seeded, mode.seed, slot, task))
            except torch_private.StopRecomputationError:  # a checkpoint around the call has all that it needs
                raise
            except Exception as error:
                failures.append((slot, error))
            else:
                take(i, result)
    finally:
        IN_TURNS.reset(before)
    return failures


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


leave_alone(globals())
