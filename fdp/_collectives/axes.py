"""Which axis a collective is over, and where in the calls inside of it this code runs."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from fdp._execution.forks import check_process
from fdp._execution.thread_state import why_not_together
from fdp._placement.slot import AXES, IN_PLACE, Axis
from fdp._trees import torch_private

AxisName = str | Sequence[str]


def axis_of(where: str, name: str) -> Axis:
    """The innermost axis of a name."""
    if (
        torch.compiler.is_dynamo_compiling()
    ):  # under fullgraph an error with this text, else the code goes on uncompiled
        torch_private.graph_break("collectives and axis_index cannot be compiled; compile what is between them")
    axes = AXES.get()
    for axis in reversed(axes):
        if axis.slot.axis_name == name:
            return axis
    if torch_private.current_graph_task_id() != -1:
        raise RuntimeError(
            f"{where}: this code runs in a backward, where there are no slots. Activation checkpointing around a "
            "collective needs checkpoint(..., use_reentrant=False, context_fn=fdp.checkpoint_context); in hooks, take "
            "axis_index() before"
        )
    if not axes:
        raise NameError(
            f"{where}: this code runs in no slot. Call it inside the function that dp_apply, shard_map, parallel_apply "
            "or a gradient function runs on each"
        )
    known = ", ".join(repr(axis.slot.axis_name) for axis in axes)
    raise NameError(f"{where}: there is no axis {name!r} here. There is {known}")


def names_of(where: str, axis_name: AxisName) -> Sequence[str]:
    """The axes that a collective is over, one after the other."""
    names = list[Any](axis_name if isinstance(axis_name, tuple | list) else [axis_name])
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{where}: axis_name must be the name of an axis or a tuple of names, got {axis_name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: axis_name names an axis twice: {axis_name!r}")
    return names


def inside(axis: Axis) -> tuple[int, ...]:
    """Where in the calls inside of an axis this code runs: it meets those who are at the same place."""
    axes = AXES.get()
    return tuple([other.slot.index for other in axes[axes.index(axis) + 1 :]])


def check_can_meet(axis: Axis, where: str) -> None:
    """This code can wait for the other slots here."""
    run, axes = axis.run, AXES.get()
    further_in = axes[axes.index(axis) + 1 :]
    check_process(run.process, where)
    if run.is_over:
        raise RuntimeError(f"{where}: the call over axis {axis.slot.axis_name!r} has ended")
    if run.lacks_slots:
        raise RuntimeError(
            f"{where}: {run.count} of {axis.slot.count} slots have rows in this microbatch, and no others will come. "
            "Choose microbatches so that each slot has a row in each"
        )
    callers = [*(other.run.caller for other in further_in), threading.get_ident()]
    if callers != [axis.thread, *(other.thread for other in further_in)]:
        raise RuntimeError(f"{where}: this thread is none of fdp's; call collectives where the function runs")
    if IN_PLACE.get():
        raise RuntimeError(
            f"{where}: in a module that is called in place, because something in it leads back to it (a hook that "
            "closes over the module, a compiled module, ...), slots would wait for each other. Remove what leads back"
        )
    if torch_private.forward_level() > run.level:
        raise RuntimeError(
            f"{where}: inside forward-mode differentiation (jvp, jacfwd, hessian) in a mapped function is not "
            "supported: its state is one for all threads. Differentiate outside, or by vjp, jacrev"
        )
    if run.is_beside and any(other.run.count > 1 for other in further_in):
        raise RuntimeError(
            f"{where}: executor='threads': a collective over axis {axis.slot.axis_name!r}, which is further out. Pass "
            "executor='sequential' there"
        )
    reason = why_not_together()
    if reason is not None:
        raise RuntimeError(f"collectives need a thread for each slot, which cannot see {reason}")
