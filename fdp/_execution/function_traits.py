"""What is known of functions: marks, and what their runs have shown.

A function that compiles something when it runs should run alone: torch.compile is not made for other threads beside it.
"""

import contextlib
import functools
import sys
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fdp._placement.slot import AXES, CALLS, Slot
from fdp._trees.tracebacks import inside_boundary

P = ParamSpec("P")
T = TypeVar("T")
_WARM: "weakref.WeakKeyDictionary[Any, set[Any]]" = weakref.WeakKeyDictionary()  # on what each compiles nothing
_most = 0
_TOGETHER: "weakref.WeakSet[Any]" = weakref.WeakSet()  # those whose shards meet
_ORDERED: "weakref.WeakKeyDictionary[Any, set[int]]" = weakref.WeakKeyDictionary()  # with what they close over
_SAFE: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Safe:
    """A base for callable objects that are safe in threads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def mark(fn: Any) -> None:
    """Mark a function object as safe in threads. Not by an attribute: `functools.wraps` would copy it to wrappers."""
    _SAFE.add(fn)


def thread_safe(fn: Callable[P, T]) -> Callable[P, T]:
    """Mark a function as safe to run from several threads at once, so that `executor="auto"` lets it.

    `thread_safe(fn)(*args) == fn(*args)`.

    >>> import fdp, torch
    >>> @fdp.thread_safe
    ... def loss(w, x):
    ...     return (x @ w).square().mean()
    >>> fdp.grad(loss, devices=fdp.virtual_devices(2))(torch.ones(2), torch.eye(2))
    tensor([1., 1.])

    Functions of tensors are, and so is what `functional` returns. Not safe is what writes to objects that the calls
    share: a counter, a list of activations, the buffers of a module that is called as it is.

    Args:
        fn: Any callable.

    Returns:
        A function of Python and what `functional` returns, itself; any other callable, wrapped in a
        `functools.partial`. The mark is on this object: a wrapper of it needs one of its own.

    Raises:
        TypeError: Not callable.
    """
    if not callable(fn):
        raise TypeError(f"thread_safe: expected a function, got {type(fn).__name__}")
    if isinstance(fn, Safe):
        return fn
    if not isinstance(fn, types.FunctionType):
        fn = functools.partial(fn)
    mark(fn)
    return fn


def is_marked(fn: Any) -> bool:
    """Whether a function is marked, or one that it is a partial or a compiled form of."""
    while fn is not None:
        if isinstance(fn, Safe) or (isinstance(fn, types.FunctionType | functools.partial) and fn in _SAFE):
            return True
        fn = fn.func if isinstance(fn, functools.partial) else _before_compile(fn)
    return False


def _before_compile(fn: Any) -> Any:
    """What a function is the compiled form of, None if it is none."""
    found = getattr(fn, "_torchdynamo_orig_callable", None)
    if getattr(found, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils":
        return getattr(found, "__wrapped__", None)  # an object, around which the compiler has put a function
    return found


def compilations() -> int:
    """How often this process has compiled a frame."""
    counter = _of_compiler("convert_frame", "FRAME_COMPILE_COUNTER")
    return sum(list(counter.values())) if counter is not None else 0  # at once: other threads may compile


def may_compile() -> bool:
    """Whether something was made by torch.compile."""
    global _most
    if compilations() < _most:  # after `torch._dynamo.reset` everything is compiled anew
        _WARM.clear()
    _most = compilations()
    backends = _of_compiler("eval_frame", "cached_backends")
    # None stands for `torch.compiler.disable`, which optimizers use.
    return backends is not None and any(backend is not None for backend in list(backends.values()))


def _of_compiler(module: str, name: str) -> Any:
    """What a module of the compiler holds; None if it is not there yet: another thread may be importing it."""
    return getattr(sys.modules.get(f"torch._dynamo.{module}"), name, None)


def is_cold(fn: Any, slot: Slot) -> bool:
    """Whether `fn` has yet to show that it compiles nothing anew on a shard of this size."""
    return _kind(slot) not in _WARM.get(identity(fn), ())


def note(fn: Any, slot: Slot, compiled: bool) -> None:
    """Remember whether `fn` has compiled something on a shard."""
    if compiled:
        _WARM.pop(identity(fn), None)
    else:
        _WARM.setdefault(identity(fn), set()).add(_kind(slot))


def must_run_in_order(fn: Any) -> bool:
    """Whether `fn` has refused to run beside others."""
    return len(_ORDERED) > 0 and _closed_over(fn) in _ORDERED.get(identity(fn), ())


def remember_order(fn: Any) -> None:
    """Keep in mind that `fn` refuses to run beside others."""
    _ORDERED.setdefault(identity(fn), set()).add(_closed_over(fn))


def has_met(fn: Any) -> bool:
    """Whether shards of `fn` have met in collectives, as far as is known now."""
    return len(_TOGETHER) > 0 and identity(fn) in _TOGETHER


def meets(fn: Any) -> bool:
    """Whether shards of `fn` have met in collectives, with one answer for all slots that come to this call.

    One that learns it meanwhile would run the call once, where the others run it twice: in collectives of axes around
    the call they would meet in other runs than their own.
    """
    known, calls = has_met(fn), CALLS.get()
    if calls is None:
        return known
    rendezvous = next((axis.rendezvous for axis in AXES.get() if axis.rendezvous is not None), None)
    if rendezvous is None:
        return known
    calls.count += 1
    return rendezvous.known.setdefault((*calls.path, calls.count), known)


def remember_together(fn: Any) -> None:
    """Keep in mind that shards of `fn` meet in collectives."""
    _TOGETHER.add(identity(fn))


def begin_anew() -> None:
    """What is called inside from here on is not what was called inside before."""
    calls = CALLS.get()
    if calls is not None:
        calls.count += 1


def how_called(fn: Any) -> Any:
    """What says, beside its identity, which arguments a function takes."""
    given = []
    while isinstance(fn, functools.partial):
        given.append((len(fn.args), tuple(fn.keywords)))
        fn = fn.func
    return type(fn), *given


def identity(fn: Any) -> Any:
    """What stays the same where a function is defined anew for each call; compiled ones share their wrapper's code."""
    if type(fn) is types.FunctionType and not fn.__dict__ and fn.__module__ != _FUNCTIONAL:  # as of most
        return fn.__code__
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


def name_of(fn: Any) -> str:
    """What a function is called in every run of a program."""
    key = identity(fn)
    code = key if isinstance(key, types.CodeType) else getattr(key, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {zlib.crc32(code.co_code)}"
    kind = key if isinstance(key, type) else type(key)
    return f"{kind.__module__}.{kind.__qualname__}"


def _closed_over(fn: Any) -> int:
    """Which functions `fn` closes over, by their code: a wrapper is another function for each that it wraps."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    codes = []
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty still
            if isinstance(cell.cell_contents, types.FunctionType):
                codes.append(id(cell.cell_contents.__code__))
    return hash(tuple(codes))


def _kind(slot: Slot) -> Any:
    """What, of all that torch.compile makes code for, differs between calls in a usual program."""
    return None if slot.rows is None else len(slot.rows), slot.device.type, torch.is_grad_enabled()
