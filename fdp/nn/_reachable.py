"""Whether what a clone shares with its module leads back to the module."""

import contextvars
import dis
import functools
import gc
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Container, Iterable
from enum import Enum
from typing import Any

import torch.fx
from torch import Tensor

from fdp.nn._values import ATOMS, BOXES, has_atoms_only, is_constant

LruCache = type(functools.lru_cache(len))
# Either nothing is behind these, or nothing that a forward comes to.
_ENDS = (type, types.ModuleType, types.CodeType, Tensor, Enum, logging.Filterer, io.IOBase)
_ENDS += (torch.fx.Graph, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor).__bases__[0])  # operators
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "fdp"}  # what their functions know is no user's module
_MOST = 20_000
"""Objects that are looked at. With more the module is called in place."""


def way_back(shared: Iterable[tuple[str, Any]], targets: Container[int]) -> str | None:
    """The path of the first value from which one of the objects with these ids may be reached."""
    seen: dict[int, Any] = {}
    return next((path for path, value in shared if _leads(value, targets, seen)), None)


def is_settled(value: Any) -> bool:
    """Whether nothing that a forward comes to is behind it, such as a function of a library."""
    if type(value) is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | type | None)
    library = type(value) is types.FunctionType and of_library(value.__module__) and not vars(value)
    return isinstance(value, _ENDS) or (library and not value.__closure__ and is_constant(value.__defaults__ or ()))


def _leads(start: Any, targets: Container[int], seen: dict[int, Any]) -> bool:
    todo = [start]
    while todo:
        value = todo.pop()
        if id(value) in targets:
            return True
        if type(value) in ATOMS or id(value) in seen or isinstance(value, _ENDS):
            continue
        seen[id(value)] = value
        parts = _parts(value)
        if parts is None or len(seen) > _MOST:
            return True
        todo += parts
    return False


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value leads to, None if that is not known."""
    kind = type(value)
    if kind is types.FunctionType:
        return _of_function(value)
    if isinstance(value, weakref.ref):
        return (value(),)
    if kind is contextvars.ContextVar:
        return (value.get(None),)
    if kind in (tuple, *BOXES) and has_atoms_only(value):
        return ()
    hides = kind.__module__.partition(".")[0] == "numpy" and value.dtype.hasobject
    # A class written in C by somebody else may not say what it holds.
    if hides or kind is threading.local or kind in weakref.ProxyTypes or not _is_plain(kind):
        return None
    return [*gc.get_referents(value), *members(kind)]


def _of_function(function: types.FunctionType) -> Iterable[Any] | None:
    """What a function closes over, its defaults, and what it reads by a global name; of functions those of its file."""
    if hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False):
        return None  # what is compiled knows the module that it was compiled for
    scope = function.__globals__
    read = () if of_library(scope.get("__name__")) else _global_names(function.__code__)
    names = [scope[name] for name in read if name in scope]
    names = [value for value in names if getattr(value, "__globals__", scope) is scope]
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, vars(function), *names]


@functools.lru_cache(4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads: not `co_names`, where the attribute of `self.model` is a name too."""
    inside = [_global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    return frozenset(own).union(*inside)


def _is_plain(kind: type) -> bool:
    """Whether instances have nothing but attributes beyond those of a class of a library."""
    base = next(cls for cls in kind.__mro__ if of_library(cls.__module__))
    own = kind.__mro__[: kind.__mro__.index(base)]
    slots = [made for cls in own if vars(cls).get("__slots__") for made in vars(cls).values()]
    words = sum(isinstance(made, types.MemberDescriptorType) for made in slots)
    words += not base.__dictoffset__ and (kind.__dictoffset__ > 0 or bool(kind.__dictoffset__ and kind.__itemsize__))
    words += not base.__weakrefoffset__ and kind.__weakrefoffset__ > 0
    return kind.__basicsize__ == base.__basicsize__ + words * tuple.__itemsize__


def members(kind: type) -> list[Any]:
    """What a forward may come to by way of a class of the user's."""
    return [
        member
        for cls in kind.__mro__
        if not of_library(cls.__module__)
        for name, member in vars(cls).items()
        if (isinstance(member, types.FunctionType) and name not in ("__init__", "__new__")) or not _is_special(name)
    ]


def _is_special(name: str) -> bool:
    return name.startswith("__") or name == "_abc_impl"


def of_library(name: object) -> bool:
    """Whether a module of Python with this name is one of torch's, numpy's, Python's or ours."""
    return str(name).partition(".")[0] in _LIBRARIES
