"""What torch keeps for the whole process although threads may use it: guarded once shards run side by side.

Three things: the tensors that `functional_call` puts into a module, the state of the default generators, and the level
of forward mode. `install` puts stand-ins in their place at the first call with threads or with slots that meet, and
they stay. What holds from then on:

- Outside of shards, and in shards that run one after the other because somebody has said so, a stand-in calls torch's
  own and does nothing else. While something is compiled, so do those for modules and generators.
- In a shard beside others, what looks at the state of generators or enters forward mode asks for being alone first
  (`alone.be_alone`): the call begins anew in order, or the shard goes on when no other of its call runs.
- Between an enter and its exit a thread holds `slot.EXCLUSIVE`, because other callers have shards too. It may enter
  again inside, and so may threads that it waits for: they have its `_OWNER` in their context.
- A thread that is inside cannot let others in, so its slots do not wait for each other there: `firm` says so.
- Shards that have refused to run beside others run in order from then on (`IN_TURNS`). Those of other callers may do so
  at the same time, so they hold `EXCLUSIVE` too.

Any thread may call anything here. `_INSTALLING` is held while stand-ins are put in place, once, and no other lock of
fdp is taken inside of it. `EXCLUSIVE` is taken after `be_alone` has returned: who waits to be alone holds nothing.

What was refused: to guard forward mode in code that has nothing to do with shards. A program may wait inside of it for
a thread of its own that uses it too.
"""

import contextvars
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fdp._execution.alone import be_alone, is_beside_others
from fdp._placement.slot import EXCLUSIVE, IN_PLACE
from fdp._trees import torch_private

IN_TURNS = contextvars.ContextVar("fdp_in_turns", default=False)
"""Shards here have refused to run beside others. They run in order, and those of other callers do at the same time."""

_INSTALLING = threading.Lock()
_installed = False
_functional_call: Callable[..., Any] | None = None


def stand_in_for_functional_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator: call this instead of `torch.func.functional_call` in shards that run side by side."""
    global _functional_call
    _functional_call = function
    return function


def install() -> None:
    """Guard functional_call, random state and forward mode, from the first call with threads on."""
    global _installed
    if _installed:
        return
    with _INSTALLING:
        if not _installed:
            _guard_functional_call()
            for name in ("manual_seed", "seed", "get_rng_state", "set_rng_state"):
                _guard_random_state(name)
            _FORWARD.guard(torch_private.eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting", leaves_always=True)
            _FORWARD.guard(forward_ad, "enter_dual_level", "exit_dual_level")
            _installed = True


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way here; its level is one for all threads."""
    return torch_private.forward_level() >= 0 and not _FORWARD.is_elsewhere()


def firm() -> int:
    """How much this thread has to itself that it cannot give back while it waits for others."""
    return _FORWARD.depth + IN_PLACE.get()


def _guard_functional_call() -> None:
    """Make `torch.func.functional_call` safe in shards that run side by side.

    It puts its tensors into the module and takes them out again: two threads on one module compute with each other's
    parameters, and nothing tells. It finds the function that does so by its name at each call, so a stand-in reaches
    every caller; refusing instead would need the same, and break working code. Other threads, and code that is being
    compiled, get torch's own.
    """
    theirs = torch_private.functional_call

    @functools.wraps(theirs)
    def guarded(
        module: torch.nn.Module, parameters_and_buffers: Any, args: Any = None, kwargs: Any = None, **options: bool
    ) -> Any:
        ours = None if torch.compiler.is_compiling() or not is_beside_others() else _functional_call
        return (ours or theirs)(module, parameters_and_buffers, args, kwargs, **options)

    torch_private.replace("torch.nn.utils.stateless._functional_call", guarded)


def _guard_random_state(name: str) -> None:
    """Have shards run in order that look at the state of torch's generator, from which others draw meanwhile.

    Activation checkpointing does: else dropout in it would draw another mask when it recomputes.
    """
    guards: dict[Any, Any] = {}  # the two are one function until the compiler is imported
    for owner in (torch.random, torch):
        theirs = getattr(owner, name)
        setattr(owner, name, guards.setdefault(theirs, _alone(theirs)))
    if name == "manual_seed":
        torch_private.register_builtin(torch.manual_seed, "aten::manual_seed")


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            be_alone()
        return function(*args, **kwargs)

    return guarded


class _OneAtATime:
    """Lets one shard at a time be between an enter and its exit, and threads that it waits for.

    Forward mode has one level for the process: a thread that leaves it takes the tangents of the others along, without
    an error. The counter of nested jvps has the same flaw.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._local = threading.local()
        self._owner: object | None = None

    def guard(self, owner: Any, enter: str, leave: str, *, leaves_always: bool = False) -> None:
        """Guard a pair of functions; `leaves_always` if torch calls the second also where the first has raised."""
        setattr(owner, enter, self._entering(getattr(owner, enter), leaves_always))
        setattr(owner, leave, self._leaving(getattr(owner, leave)))

    def is_elsewhere(self) -> bool:
        return self._owner not in (None, _OWNER.get())

    def _entering(self, enter: Callable[..., Any], leaves_always: bool) -> Callable[..., Any]:
        @functools.wraps(enter)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not (is_beside_others() or IN_TURNS.get()):
                # As without fdp: code may wait here for another thread that does the same.
                return enter(*args, **kwargs)
            if not self.depth:
                if self._owner is not None and self._owner is _OWNER.get():  # a thread that waits for this one
                    return enter(*args, **kwargs)
                self._local.is_refused = leaves_always
                be_alone()
                self._local.is_refused = False
            EXCLUSIVE.acquire()
            self.depth += 1
            if self.depth == 1:
                self._owner = object()
                _OWNER.set(self._owner)
            try:
                return enter(*args, **kwargs)
            except BaseException:
                self._release()
                raise

        return guarded

    def _leaving(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "is_refused", False):  # else it would leave a transform around the call
                self._local.is_refused = False
                return None
            try:
                return leave(*args, **kwargs)
            finally:
                if self.depth:  # else it was entered before the guard was there
                    self._release()

        return guarded

    def _release(self) -> None:
        self.depth -= 1
        self._owner = self._owner if self.depth else None
        EXCLUSIVE.release()

    @property
    def depth(self) -> int:
        """How often this thread has entered."""
        return getattr(self._local, "depth", 0)

    @depth.setter
    def depth(self, depth: int) -> None:
        self._local.depth = depth


_OWNER: "contextvars.ContextVar[object]" = contextvars.ContextVar("fdp_forward", default=None)  # this code is inside
_FORWARD = _OneAtATime()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_FORWARD.renew)  # the thread that had its turn may be gone
