"""Containers that optree does not know, and objects that look like leaves but hold tensors."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, MappingView
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

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

NodeFunctions = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


class Packed:
    """Stands for a PackedSequence, whose rows are interleaved: as the namedtuple it is, it would be split wrongly."""

    def __init__(self, value: object) -> None:
        self.value = value


def node_functions(cls: Any) -> NodeFunctions | None:
    """How to take apart and rebuild a type that torch's pytrees know, or a dataclass; None for any other."""
    if cls in torch_pytree.SUPPORTED_NODES:
        return _torch_node(torch_pytree.SUPPORTED_NODES[cls])
    return _dataclass_node(cls) if dataclasses.is_dataclass(cls) else None


def _torch_node(node: torch_pytree.NodeDef) -> NodeFunctions:
    def flatten(obj: Any) -> tuple[Any, Any, Any]:
        children, context = node.flatten_fn(obj)
        if node.flatten_with_keys_fn is None:
            return children, context, tuple(range(len(children)))
        keys = [key for key, _ in node.flatten_with_keys_fn(obj)[0]]
        return children, context, tuple(map(_entry, keys))

    return flatten, lambda context, children: node.unflatten_fn(list(children), context)


def _entry(key: Any) -> Any:
    match key:
        case torch_pytree.MappingKey():
            return key.key
        case torch_pytree.GetAttrKey():
            return key.name
        case torch_pytree.SequenceKey():
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


def holds_tensors(obj: Any) -> bool:
    """Whether a leaf visibly holds tensors, which would then be neither split nor moved."""
    if isinstance(obj, Packed):
        return True
    if isinstance(obj, torch.nn.Module):
        return any(True for _ in obj.parameters()) or any(True for _ in obj.buffers())
    if isinstance(obj, _LAZY):
        return True  # may be, and to look inside would use it up
    if isinstance(obj, torch.Tensor | type | FunctionType | ModuleType):
        return False
    inside = [getattr(obj, "__dict__", None)]
    inside += [getattr(obj, name, None) for cls in type(obj).__mro__ for name in getattr(cls, "__slots__", ())]
    if isinstance(obj, Mapping):
        inside.append(list(obj.values()))
    elif isinstance(obj, list | tuple | set | frozenset):
        inside.append(list(obj))
    elif isinstance(obj, functools.partial):
        inside.append([*obj.args, *obj.keywords.values()])
    return any(isinstance(leaf, torch.Tensor) for leaf in torch_pytree.tree_leaves(inside))


def refusal(obj: Any, path: str) -> str:
    """What is wrong with such a leaf, and the way out."""
    if isinstance(obj, Packed):
        return (
            f"{path} is a PackedSequence, which cannot be split by rows. Pass the padded tensor and the lengths, and "
            "pack inside the function"
        )
    if isinstance(obj, _LAZY):
        return (
            f"{path} is a {type(obj).__name__}, which one slot would use up. Pass a list or a dict; for the parameters "
            "of a module fdp.functional(module)"
        )
    if isinstance(obj, torch.nn.Module):
        return (
            f"{path} is the nn.Module {type(obj).__name__}. Pass its tensors instead: "
            "apply, (params, buffers) = fdp.functional(module)"
        )
    return (
        f"{path} is a {type(obj).__qualname__}, which holds tensors but is no tree that fdp knows. Make it a "
        f"dataclass, or register it with optree.register_pytree_node(..., namespace={NAMESPACE!r})"
    )
