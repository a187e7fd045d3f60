"""What a function is known by: plans are kept by it, and processes compare it."""

import functools
import types
import weakref
from typing import Any

from fdp._trees.tracebacks import inside_boundary


def known_by(fn: Any) -> tuple[Any, Any]:
    """Its identity, and what says beside it which arguments it takes."""
    if type(fn) is types.FunctionType and not fn.__dict__ and fn.__module__ != _FUNCTIONAL:  # as most
        return fn.__code__, types.FunctionType
    return identity(fn), _how_called(fn)


def _how_called(fn: Any) -> Any:
    given = []
    while isinstance(fn, functools.partial):
        given.append((len(fn.args), tuple(fn.keywords)))
        fn = fn.func
    return type(fn), *given


def identity(fn: Any) -> Any:
    """What stays the same where a function is defined anew for each call; compiled ones share their wrapper's code."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if type(fn) is types.FunctionType:
        fn = inside_boundary(fn)
    # What `functional` makes has the same code for every module.
    own = hasattr(fn, "_torchdynamo_orig_callable") or getattr(fn, "__module__", None) == _FUNCTIONAL
    key = fn if own else getattr(fn, "__code__", fn)
    if isinstance(type(key).__eq__, types.FunctionType):  # one of the user's, which may raise
        return type(key)
    try:
        hash(weakref.ref(key))
    except TypeError:  # an object without a hash, or that nothing can refer to weakly
        return type(key)
    return key


_FUNCTIONAL = "fdp.nn._functional"
