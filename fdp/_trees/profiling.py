"""The stages of a call, as ranges in the traces of torch.profiler."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")


def stage(name: str) -> contextlib.AbstractContextManager[object]:
    """A range called `fdp.` and the name; nothing, in well under a microsecond, where no profiler runs."""
    # The flag is one for all threads: a profiler may watch those in which shards run.
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return profiler.record_function(f"fdp.{name}")


def staged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a stage."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with stage(name):
                return fn(*args, **kwargs)

        return wrapped

    return decorate
