"""What users see of an error: their own lines. Those of fdp between them are shown where FDP_TRACEBACK is "full"."""

from __future__ import annotations  # the compiler would guard on what stands for P.args, which is new each time

import contextlib
import functools
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_OF_JAX = {
    "in_axes": "in_dims",
    "out_axes": "out_dims",
    "in_specs": "in_dims",
    "out_specs": "out_dims",
    "mesh": "devices",
}
OF_JAX = {jax: f"What JAX calls {jax} is {own} here" for jax, own in _OF_JAX.items()}
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""That of fdp's own files."""


def api_boundary(names: Mapping[str, str] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As a decorator of a public function: hide fdp's own frames in what it raises.

    `names` are keyword arguments that it does not have, and what to write instead; "" for all others, "*" for
    positional ones that are too many.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not torch.compiler.is_dynamo_compiling():
                    _advise(error, names)
                    hide_frames(error)
                raise

        return call

    return decorate


_CALL = api_boundary()(len).__code__


def inside_boundary(function: Any) -> Any:
    """A function that `api_boundary` has made, as it was: they all have one code."""
    return function.__wrapped__ if function.__code__ is _CALL else function


def hide_frames(error: BaseException) -> None:
    """Take fdp's frames out of the tracebacks of an exception and of those that led to it."""
    if os.environ.get("FDP_TRACEBACK") == "full":
        return
    todo, seen = [error], set[int]()
    for each in todo:
        if id(each) in seen:
            continue
        seen.add(id(each))
        with contextlib.suppress(Exception):  # a class of the user's may not let it be set: it arrives all the same
            each.__traceback__ = _without_own(each.__traceback__)
        todo += [other for other in (each.__cause__, each.__context__) if other is not None]


def text_of(error: BaseException) -> str:
    """What an exception says, if it can say something."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its text raises {type(broken).__name__})"


def warn(text: str, category: type[Warning] = UserWarning, *, once_a_line: bool = True) -> None:
    """Warn at the line of the user's that has led here; Python shows what one line says once, unless told otherwise."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    said = frame.f_globals.setdefault("__warningregistry__", {}) if once_a_line else None
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, registry=said)


def _without_own(traceback: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_FOLDER):
            kept.append(traceback)
        traceback = traceback.tb_next
    found = None
    for each in reversed(kept):
        found = types.TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _advise(error: BaseException, names: Mapping[str, str] | None) -> None:
    """Say what to write instead of a keyword argument that the function itself does not have."""
    if not names or type(error) is not TypeError or error.__traceback__ is None or error.__traceback__.tb_next:
        return
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is not None:
        way_out = names.get(unknown[1], names.get("", "")).format(unknown[1])
    else:
        way_out = names.get("*", "") if re.search(r"positional arguments? but|multiple values for", str(error)) else ""
    error.args = (f"{error}. {way_out}",) if way_out else error.args
