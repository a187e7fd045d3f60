"""Whether what a clone shares with its module leads back to the module."""

import builtins
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
from typing import Any, final

import torch.fx
from torch import Tensor, nn

from fdp.nn._values import ATOMS, BOXES, has_atoms_only, is_constant

OF_CLONE = "_is_clone_of_fdp"
LruCache = type(functools.lru_cache(len))
# Either nothing is behind these, or nothing that a forward comes to.
_ENDS = (type, types.ModuleType, types.CodeType, Tensor, Enum, logging.Filterer, io.IOBase)
_ENDS += (torch.fx.Graph, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor).__bases__[0])  # operators
_DEFINED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "fdp"}  # what their functions know is no user's module
_MOST = 20_000
"""Objects that are looked at. With more the module is called in place."""


def way_back(
    shared: Iterable[tuple[str, Any]], targets: Container[int], seen: dict[int, Any], *, refuses_clones: bool
) -> str | None:
    """The path of the first value from which one of the objects with these ids may be reached. All are `seen` then."""
    found = (path for path, value in shared if _leads(value, targets, seen, path if refuses_clones else None))
    return next(found, None)


def is_settled(value: Any) -> bool:
    """Whether nothing that a forward comes to is behind it, such as a function of a library."""
    if type(value) is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | type | None)
    library = type(value) is types.FunctionType and of_library(value.__module__) and not vars(value)
    return isinstance(value, _ENDS) or (library and not value.__closure__ and is_constant(value.__defaults__ or ()))


def refuse_clone(module: nn.Module, path: str) -> None:
    """Raise for a module that is no part of the one that has it, but of a clone of an earlier call."""
    if is_clone(module):
        raise RuntimeError(
            f"The module's {path!r} leads to a {type(module).__name__} of a clone, which forward has put there in an "
            "earlier call, and which computes with the tensors of that call. Keep numbers and tensors, not modules"
        )


def is_clone(module: nn.Module) -> bool:
    """Whether a module is one that shares containers with the user's."""
    return OF_CLONE in vars(module)


def _leads(start: Any, targets: Container[int], seen: dict[int, Any], refusing: str | None) -> bool:
    todo = [start]
    while todo:
        value = todo.pop()
        if id(value) in targets:
            return True
        if type(value) in ATOMS or id(value) in seen or isinstance(value, _ENDS):
            continue
        if refusing is not None and issubclass(type(value), nn.Module):
            refuse_clone(value, refusing)
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


@final
class Outside:
    """What classes and functions have under names: their values may be others at the next call."""

    def __init__(self, kinds: Iterable[type], functions: Iterable[types.FunctionType]) -> None:
        of_users = {cls for kind in kinds for cls in kind.__mro__ if not of_library(cls.__module__)}
        self._classes = list(map(weakref.ref, of_users))
        read = [(function, _read_by(function)) for function in functions]
        self._functions = [(weakref.ref(each), names) for each, names in read if names or each.__closure__]
        self._before = self._now()

    def are_others(self) -> bool:
        """Whether a name has another value than at first. Of numbers and the like, any will do."""
        return self._now() != self._before

    def _now(self) -> list[int]:
        values = [value for ref in self._classes for value in vars(ref()).values()]
        for ref, names in self._functions:
            if (function := ref()) is not None:
                values += map(function.__globals__.get, names)
                values += gc.get_referents(*(function.__closure__ or ()))
        return [0 if type(value) in ATOMS or issubclass(type(value), Tensor) else id(value) for value in values]


def _read_by(function: types.FunctionType) -> list[str]:
    """The global names of a function of the user's: not what is imported or defined in its file as a rule."""
    scope = function.__globals__
    names = () if of_library(scope.get("__name__")) else _global_names(function.__code__).difference(vars(builtins))
    return [name for name in names if not isinstance(scope.get(name), _DEFINED)]


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
