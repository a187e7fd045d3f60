"""Containers that optree does not know, and objects that look like leaves but hold tensors."""

import dataclasses
from collections.abc import Callable, Iterable, MappingView
from types import GeneratorType
from typing import Any, NamedTuple

import torch

from fdp._trees import torch_private
from fdp._trees.inside import MOST_OBJECTS, TooManyError, find_inside
from fdp._trees.untraced import constant_while_compiling

NAMESPACE = "fdp"
_LAZY = (
    GeneratorType,
    map,
    filter,
    zip,
    type(iter([])),
    type(iter(())),
    MappingView,
)  # what people write for a list or dict of tensors

_NO_CACHE = "A model of transformers returns no cache with use_cache=False"
_WAYS = (
    f"Make it a dataclass, or register it with optree.register_pytree_node(..., namespace={NAMESPACE!r}). What all "
    "slots are to share as it is, the function can close over"
)

NodeFunctions = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


class Packed:
    """Stands for a PackedSequence, whose rows are interleaved: as the namedtuple it is, it would be split wrongly."""

    def __init__(self, value: object) -> None:
        self.value = value


def node_functions(cls: Any) -> NodeFunctions | None:
    """How to take apart and rebuild a type that torch's pytrees know, or a dataclass; None for any other."""
    if cls in torch_private.pytree.SUPPORTED_NODES:
        return _torch_node(torch_private.pytree.SUPPORTED_NODES[cls])
    return _dataclass_node(cls) if dataclasses.is_dataclass(cls) else None


def _torch_node(node: Any) -> NodeFunctions:
    def flatten(obj: Any) -> tuple[Any, Any, Any]:
        children, context = node.flatten_fn(obj)
        if node.flatten_with_keys_fn is None:
            return children, context, tuple(range(len(children)))
        keys = [key for key, _ in node.flatten_with_keys_fn(obj)[0]]
        return children, context, tuple(map(_entry, keys))

    return flatten, lambda context, children: node.unflatten_fn(list(children), context)


def _entry(key: Any) -> Any:
    match key:
        case torch_private.pytree.MappingKey():
            return key.key
        case torch_private.pytree.GetAttrKey():
            return key.name
        case torch_private.pytree.SequenceKey():
            return key.idx
    return str(key)


def _dataclass_node(cls: Any) -> NodeFunctions:
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)

    def unflatten(_: None, children: Iterable[Any]) -> Any:
        values = dict(zip(names, children, strict=True))
        try:
            # The constructor, not __new__: a dataclass that is also a dict fills itself in __post_init__.
            obj = cls(**{field.name: values[field.name] for field in fields if field.init})
        except Exception as error:
            raise TypeError(
                f"cannot rebuild the dataclass {cls.__qualname__} from its fields ({error}); register it with "
                f"optree.register_pytree_node(..., namespace={NAMESPACE!r})"
            ) from error
        for name, value in values.items():
            if getattr(obj, name, None) is not value:  # not given to the constructor, or changed by __post_init__
                object.__setattr__(obj, name, value)
                if isinstance(obj, dict) and name in obj:
                    dict.__setitem__(obj, name, value)
        return obj

    return lambda obj: ([getattr(obj, name) for name in names], None, names), unflatten


class Refusal(NamedTuple):
    """Why a value may not be a leaf, the path of a tensor inside it if that is why, and the way out."""

    why: str
    inside: str
    way_out: str

    def text(self, path: str) -> str:
        """What is wrong with the leaf that stands at a path."""
        return f"{path} is {self.why}" + f": {path}{self.inside} is one" * (self.inside != "")


def refusal(obj: Any) -> Refusal | None:
    """Why a value may not be a leaf: its tensors would be neither split nor moved."""
    if isinstance(obj, torch.Tensor):  # of a class that is met for the first time
        return None
    if isinstance(obj, Packed):
        return Refusal(
            "a PackedSequence, which cannot be split by rows",
            "",
            "Pass the padded tensor and the lengths, and pack inside the function",
        )
    name = type(obj).__qualname__
    if isinstance(obj, _LAZY):  # it may hold tensors, and to look inside would use it up
        return Refusal(
            f"a {name}, which one slot would use up",
            "",
            "Pass a list or a dict; for the parameters of a module fdp.functional(module)",
        )
    try:
        found = _tensor_inside(obj)
    except TooManyError:
        return Refusal(
            f"a {name} with more than {MOST_OBJECTS:,} objects inside, too many to look for tensors", "", _WAYS
        )
    if found is None and torch.compiler.is_compiling():
        found = _tensor_in_traced(obj)
    if found is None:
        return None
    if isinstance(obj, torch.nn.Module):
        way_out = "Pass its tensors instead: apply, (params, buffers) = fdp.functional(module)"
        return Refusal(f"the nn.Module {name}", "", way_out)
    ways = f"{_WAYS}. {_NO_CACHE}" if name.endswith("Cache") else _WAYS
    return Refusal(f"a {name}, which holds tensors but is no tree that fdp knows", found, ways)


@constant_while_compiling
def _tensor_inside(obj: Any) -> str | None:
    """The path of a tensor inside an object."""
    if _is_scripted(obj):
        return ""
    found = find_inside(obj, lambda part: issubclass(type(part), torch.Tensor) or _is_scripted(part))
    return None if found is None else found[0]


def _tensor_in_traced(obj: Any) -> str | None:
    """The same for an object that is made while compiling, and has not really anything inside."""
    parts = vars(obj).items() if hasattr(obj, "__dict__") else ()
    names = [f".{k}" for k, v in parts if any(isinstance(x, torch.Tensor) for x in torch_private.pytree.tree_leaves(v))]
    return names[0] if names else None


def _is_scripted(obj: Any) -> bool:
    """Whether an object is a scripted module with tensors, which are in C++."""
    if not issubclass(type(obj), torch.jit.ScriptModule):
        return False
    return any(True for _ in obj.parameters()) or any(True for _ in obj.buffers())
