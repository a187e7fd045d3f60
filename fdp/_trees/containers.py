"""Containers that optree does not know: dataclasses, and what is registered with torch's own pytrees."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from fdp._trees import torch_private

NAMESPACE = "fdp"

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
        return children, context, tuple([_entry(key) for key, _ in node.flatten_with_keys_fn(obj)[0]])

    return flatten, lambda context, children: node.unflatten_fn(list(children), context)


def _entry(key: Any) -> Any:
    """What is in a key of torch, which has one field: a key, a name or a position."""
    return getattr(key, dataclasses.fields(key)[0].name) if dataclasses.is_dataclass(key) else str(key)


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
