"""What leads where: a list of the objects of which that is known. A clone shares no other with its module."""

import dis
import functools
import logging
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fdp._trees import torch_private
from fdp._trees.inside import attributes

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Either nothing is behind these, or nothing that a forward comes to.
_OPAQUE = (Tensor, Enum, logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock()))
_OF_TORCH = (torch.Generator, torch.jit.ScriptFunction, torch_private.OperatorBase, torch_private.OpOverloadPacket)
_FIELD = type(vars(dis.Positions)["lineno"])  # what a named tuple has for each name
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType, _FIELD)
_ENDS = (*ATOMS, type, types.ModuleType, types.CodeType, *_DESCRIPTORS, *_OPAQUE, *_OF_TORCH)

# What leads where in the types that are written in C; in subclasses of those with elements there may be more.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.BuiltinFunctionType: lambda value: (value.__self__,),
    types.MethodType: lambda value: (value.__self__, value.__func__),
    types.CellType: lambda value: _of_cell(value),
    types.SimpleNamespace: lambda value: (vars(value),),
    functools.partial: lambda value: (value.func, value.args, value.keywords, vars(value)),
    property: lambda value: (value.fget, value.fset, value.fdel),
    staticmethod: lambda value: (value.__func__, vars(value)),
    classmethod: lambda value: (value.__func__, vars(value)),
}
_ELEMENTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    object: lambda value: (),
    dict: lambda value: [*dict.keys(value), *dict.values(value)],
    OrderedDict: lambda value: [*dict.keys(value), *dict.values(value)],
    defaultdict: lambda value: [*dict.keys(value), *dict.values(value), value.default_factory],
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque)},
}
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "fdp"}  # what their functions know is no user's module
_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE
LruCache = type(functools.lru_cache(len))


def may_lead_to(starts: Iterable[Any], targets: Container[int]) -> bool:
    """Whether one of the objects with these ids is behind the values, or something of which that cannot be known."""
    seen: dict[int, Any] = {}
    todo = list(starts)
    while todo:
        value = todo.pop()
        if id(value) in targets:
            return True
        if type(value) in ATOMS or id(value) in seen or isinstance(value, _ENDS):
            continue
        seen[id(value)] = value
        parts = _parts(value)
        if parts is None:
            return True
        todo += parts
    return False


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value leads to, None if that is not known."""
    kind = type(value)
    if kind is types.FunctionType:
        return _of_function(value)
    if kind is weakref.ref:
        return (value(),)
    if kind is LruCache:
        return (vars(value),)
    if kind.__module__.partition(".")[0] == "numpy":
        return None if getattr(getattr(value, "dtype", None), "hasobject", False) else ()
    if kind.__module__ == "torch.return_types":  # named tuples that are written in C
        return value
    if kind in _PARTS:
        return _PARTS[kind](value)
    base = next(cls for cls in kind.__mro__ if cls in _ELEMENTS or not cls.__flags__ & _MADE_BY_CLASS)
    if base not in _ELEMENTS or not _is_plain(kind, base):
        return None
    return [*_ELEMENTS[base](value), *(held for _, held in attributes(value)), *members(kind)]


def _of_cell(cell: types.CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _of_function(function: types.FunctionType) -> Iterable[Any] | None:
    """What a function closes over, its defaults, and what it reads by a global name; of functions those of its file."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return None  # compiling is not safe from several threads
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


def _is_plain(kind: type, base: type) -> bool:
    """Whether instances of a class have nothing but attributes beyond those of its base: no other is written in C."""
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


def content(box: Any) -> list[Any]:
    """The keys and values of a container, at once: other threads may write to it."""
    return [*box, *box.values()] if isinstance(box, dict) else list(box)


def of_library(name: object) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES
