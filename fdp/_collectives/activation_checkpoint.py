"""Activation checkpointing around collectives: what they returned is kept, and given again where torch recomputes.

A checkpoint recomputes for the values that a backward needs, and throws the new graph away. So the recomputation needs
what a collective returned, and no other slot. What others drew meanwhile is not drawn again: the generators are put to
where they were after it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

import torch

from fdp._execution.generators import generators_of, put_states, states_of
from fdp._execution.guards import BESIDE
from fdp._placement.slot import AXES, Axis
from fdp._trees.tree import map_tensors
from fdp._trees.types import Tree


class _Returned(NamedTuple):
    where: str
    result: Tree
    states: list[torch.Generator]


@final
class _Log:
    """What collectives returned in a block, and in those in it: written in the forward, read when it is recomputed."""

    def __init__(self, around: "_Log | None") -> None:
        self.around, self._axes = around, len(AXES.get())
        self.kept: list[_Returned] = []
        self.reading: Iterator[_Returned] | None = None

    def check(self, where: str) -> None:
        """Slots that take turns inside of the block save tensors in turn; torch knows them by their order."""
        if any(axis.run.count > 1 for axis in AXES.get()[self._axes :]):
            raise RuntimeError(
                f"{where}: in a call inside of a block under activation checkpointing. Its slots take turns now, and "
                "would not when the block is computed again. Write the checkpoint inside of the function of that call"
            )


_LOG: contextvars.ContextVar[_Log | None] = contextvars.ContextVar("fdp_log", default=None)


def replayed(call: Callable[[], Tree], where: str, device: torch.device) -> Tree:
    """What a collective returns, or what it returned in the forward."""
    log, writing = _LOG.get(), list[_Log]()
    if log is None:
        return call()
    while log is not None:
        log.check(where)
        if log.reading is not None:
            break
        writing.append(log)
        log = log.around
    generators = [] if BESIDE.get() else generators_of(device)
    if log is None or log.reading is None:
        result = call()
        kept = _Returned(where, _detached(result), states_of(generators))
    else:
        found = next(log.reading, None)
        if found is None or found.where != where:
            raise RuntimeError(
                f"{where}: a block under activation checkpointing calls other collectives when it is computed again. "
                "It must do the same each time"
            )
        kept = found
        if kept.states:  # none are kept beside other shards
            put_states(generators, kept.states)
        result = _detached(kept.result)
    for each in writing:
        each.kept.append(kept)
    return result


def _detached(tree: Tree) -> Tree:
    return map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), tree)


def checkpoint_context() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """For activation checkpointing of a block with collectives: pass it as `context_fn`.

    The numbers are those without the checkpoint. What collectives returned is kept until the backward: they are called
    once, and do not meet again when torch computes the block again.

    >>> import fdp, torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> def block(x):
    ...     return (x - fdp.pmean(x.mean(), weight="rows")).tanh()
    >>> def loss(w, x):
    ...     return checkpoint(block, w * x, use_reentrant=False, context_fn=fdp.checkpoint_context).square().mean()
    >>> fdp.grad(loss, devices=fdp.virtual_devices(2))(torch.tensor(1.0), torch.tensor([0.0, 2.0]))
    tensor(0.6397)

    Returns:
        Two contexts: for the forward, and for when it is computed again, as `torch.utils.checkpoint.checkpoint` wants
        them with `use_reentrant=False`.

    Raises:
        RuntimeError: In the backward, if the block calls other collectives than before; at once, if it makes a call of
            its own whose slots meet.
    """
    log = _Log(_LOG.get())
    return _writing(log), _Reading(log, AXES.get())


@contextlib.contextmanager
def _writing(log: _Log) -> Iterator[None]:
    token = _LOG.set(log)
    try:
        yield
    finally:
        _LOG.reset(token)


@final
class _Reading(contextlib.AbstractContextManager[None]):
    """As a context, which may be entered again: a backward may come more than once."""

    def __init__(self, log: _Log, axes: tuple[Axis, ...]) -> None:
        self._log, self._axes = log, axes

    def __enter__(self) -> None:
        axes = self._axes
        self._generators = generators_of(axes[-1].slot.device) if axes and not BESIDE.get() else []
        self._log.reading = iter(self._log.kept)
        self._states = states_of(self._generators)
        self._tokens = _LOG.set(self._log), AXES.set(axes)

    def __exit__(self, *exception: object) -> None:
        put_states(self._generators, self._states)
        self._log.reading = None
        log, axes = self._tokens
        _LOG.reset(log)
        AXES.reset(axes)
