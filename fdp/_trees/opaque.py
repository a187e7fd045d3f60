"""Objects that are no trees: every slot gets them as they are, and those with tensors inside are refused.

The search goes to all that the garbage collector sees in an object. The object's class has no say in it.
"""

import contextvars
import gc
import io
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, MappingView
from itertools import chain
from typing import Any, NamedTuple

import torch

from fdp._trees import torch_private
from fdp._trees.containers import NAMESPACE, Packed
from fdp._trees.not_compiled import constant_while_compiling

MOST_OBJECTS = 10_000  # some 20 ms
TOO_MANY = object()
"""What stands for all that is inside an object beyond that."""

# Nothing is inside these, or the state of the whole program. What a function closes over, or a method is bound to, is
# shared on purpose.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_ENDS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ref)
_ENDS += (threading.Thread, logging.Logger, logging.Handler, io.IOBase, types.FrameType, contextvars.Context)
# What people write for a list or dict of tensors.
_USED_UP = (types.GeneratorType, map, filter, zip, type(iter([])), type(iter(())), MappingView)
_ENDS += (*_USED_UP, types.CoroutineType, types.AsyncGeneratorType)

_WAYS = (
    f"Make it a dataclass, or register it with optree.register_pytree_node(..., namespace={NAMESPACE!r}). What all "
    "slots are to share as it is, the function can close over"
)
_NO_CACHE = "A model of transformers returns no cache with use_cache=False"


def inside(obj: Any) -> Iterator[Any]:
    """What is inside an object, the outermost first. `TOO_MANY` comes last."""
    todo, seen = deque([obj]), {id(obj)}
    while todo:
        holder = todo.popleft()
        for part in () if issubclass(type(holder), _ENDS) else gc.get_referents(holder):
            if type(part) in _ATOMS or id(part) in seen:
                continue
            if len(seen) > MOST_OBJECTS:
                yield TOO_MANY
                return
            seen.add(id(part))
            yield part
            todo.append(part)


class Refusal(NamedTuple):
    """Why a value may not be a leaf, and the way out."""

    why: str
    way_out: str


def refusal(obj: Any) -> Refusal | None:
    """Why a value may not be a leaf: its tensors would be neither split nor moved."""
    if isinstance(obj, torch.Tensor):  # of a class that is met for the first time
        return None
    name = type(obj).__qualname__
    if isinstance(obj, Packed):
        way_out = "Pass the padded tensor and the lengths, and pack inside the function"
        return Refusal("a PackedSequence, which cannot be split by rows", way_out)
    if isinstance(obj, _USED_UP):  # to look inside would use it up
        way_out = "Pass a list or a dict; for the parameters of a module fdp.functional(module)"
        return Refusal(f"a {name}, which one slot would use up", way_out)
    found = _tensor_inside(obj)
    if found is TOO_MANY:
        why = f"a {name} with more than {MOST_OBJECTS:,} objects inside, too many to look for tensors"
        return Refusal(why, _WAYS)
    if found is None and not (torch.compiler.is_dynamo_compiling() and _has_traced(obj)):
        return None
    if isinstance(obj, torch.nn.Module):
        way_out = "Pass its tensors instead: apply, (params, buffers) = fdp.functional(module)"
        return Refusal(f"the nn.Module {name}", way_out)
    ways = f"{_WAYS}. {_NO_CACHE}" if name.endswith("Cache") else _WAYS
    return Refusal(f"a {name}, which holds tensors but is no tree that fdp knows", ways)


@constant_while_compiling
def _tensor_inside(obj: Any) -> Any:
    kinds = torch.Tensor, torch.jit.ScriptModule  # the tensors of the latter are in C++
    return next((x for x in chain([obj], inside(obj)) if x is TOO_MANY or issubclass(type(x), kinds)), None)


def _has_traced(obj: Any) -> bool:
    """The same for an object that is made while compiling, and has not really anything inside."""
    parts = vars(obj) if hasattr(obj, "__dict__") else {}
    return any(isinstance(x, torch.Tensor) for x in torch_private.pytree.tree_leaves(dict(parts)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a numpy array of at least one dimension, which may well have rows."""
    array = getattr(sys.modules.get("numpy"), "ndarray", None)  # which another thread may be about to import
    return array is not None and isinstance(leaf, array) and leaf.ndim > 0


@constant_while_compiling
def array_inside(leaf: Any) -> tuple[int, ...] | None:
    """The shape of such an array, which is a leaf or inside one."""
    if type(leaf) in _ATOMS or "numpy" not in sys.modules:
        return None
    return next((x.shape for x in chain([leaf], inside(leaf)) if is_array(x)), None)
