"""The stages of a call, as ranges in the traces of torch.profiler."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")


NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def is_profiling() -> bool:
    """Whether ranges are wanted. The flag is one for all threads: a profiler may watch those in which shards run."""
    return profiler._is_profiler_enabled and not torch.compiler.is_dynamo_compiling()


def stage(name: str, number: int | None = None) -> contextlib.AbstractContextManager[object]:
    """A range called `fdp.` and the name, with a number if there is one; nothing where no profiler runs."""
    if not is_profiling():
        return NOTHING
    return profiler.record_function(f"fdp.{name}" if number is None else f"fdp.{name} {number}")


def staged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a stage."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:
                return fn(*args, **kwargs)
            with stage(name):
                return fn(*args, **kwargs)

        return wrapped

    return decorate
