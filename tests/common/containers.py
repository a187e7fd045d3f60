"""Every kind of container, and what the tests need to know of trees without asking the code under test."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE
from torch.utils import _pytree as torch_pytree


class Point(NamedTuple):
    x: Any
    y: Any


Pixel = namedtuple("Pixel", "u v")


@dataclasses.dataclass
class Batch:
    """What a loader gives, with something that is no tensor."""

    x: Any
    y: Any = None
    tag: Any = "train"


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Inherited(Plain):
    z: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keywords:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Late:
    """A dataclass with a field that the constructor does not take."""

    x: Any
    late: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """A dataclass that is an ordered dict of its fields that are not None, as Hugging Face's outputs are."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass
class Nothing:
    """A dataclass without fields."""


class Two:
    """Two parts, in a class that no pytree library knows by itself."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class KnownToOptree(Two):
    """Registered with optree for everyone."""


class KnownToFdp(Two):
    """Registered with optree in the namespace of fdp."""


class KnownToTorch(Two):
    """Registered with torch, with names for its parts."""


class KnownToTorchBare(Two):
    """Registered with torch, without names."""


def _parts(two: Two) -> tuple[list[Any], None]:
    return [two.left, two.right], None


def _named_parts(two: Two) -> Any:
    return [(torch_pytree.GetAttrKey("left"), two.left), (torch_pytree.GetAttrKey("right"), two.right)], None


register: Any = optree.register_pytree_node  # its types ask for collections, which it does not need
register(KnownToOptree, _parts, lambda _, parts: KnownToOptree(*parts), namespace=EVERYWHERE)
register(KnownToFdp, _parts, lambda _, parts: KnownToFdp(*parts), namespace="fdp")
torch_pytree.register_pytree_node(
    KnownToTorch, _parts, lambda parts, _: KnownToTorch(*parts), flatten_with_keys_fn=_named_parts
)
torch_pytree.register_pytree_node(KnownToTorchBare, _parts, lambda parts, _: KnownToTorchBare(*parts))


# ---- taking apart and putting together

KEYS = ("b", "a", 3, ("t", 1))
"""Keys of dicts: of several types, and not in sorted order."""


class Kind(NamedTuple):
    """How many children a container may have, how it is made from them, and the other ways to write a spec for it."""

    arities: Sequence[int]
    make: Callable[[Sequence[Any]], Any]
    names: tuple[str, ...] = ()


def _keyed(children: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(KEYS, children, strict=False))


def _late(children: Sequence[Any]) -> Late:
    obj = Late(children[0])
    obj.late = children[1]
    return obj


KINDS = {
    tuple: Kind((1, 2, 3, 0), tuple),
    list: Kind((1, 2, 3, 0), list),
    dict: Kind((1, 2, 4, 0), _keyed),
    OrderedDict: Kind((1, 2, 4, 0), lambda children: OrderedDict(_keyed(children))),
    defaultdict: Kind((1, 2, 0), lambda children: defaultdict(list, _keyed(children))),
    deque: Kind((1, 2, 0), lambda children: deque(children, maxlen=5)),
    Point: Kind((2,), lambda children: Point(*children), ("x", "y")),
    Pixel: Kind((2,), lambda children: Pixel(*children), ("u", "v")),
    torch.return_types.max: Kind((2,), lambda children: torch.return_types.max(tuple(children))),
    Batch: Kind((3,), lambda children: Batch(*children), ("x", "y", "tag")),
    Plain: Kind((2,), lambda children: Plain(*children), ("x", "y")),
    Inherited: Kind((3,), lambda children: Inherited(*children), ("x", "y", "z")),
    Frozen: Kind((2,), lambda children: Frozen(*children), ("x", "y")),
    Slotted: Kind((2,), lambda children: Slotted(*children), ("x", "y")),
    Keywords: Kind((2,), lambda children: Keywords(x=children[0], y=children[1]), ("x", "y")),
    Late: Kind((2,), _late, ("x", "late")),
    Output: Kind((3,), lambda children: Output(*children), ("loss", "logits", "hidden")),
    Nothing: Kind((0,), lambda _: Nothing()),
    KnownToOptree: Kind((2,), lambda children: KnownToOptree(*children)),
    KnownToFdp: Kind((2,), lambda children: KnownToFdp(*children)),
    KnownToTorch: Kind((2,), lambda children: KnownToTorch(*children)),
    KnownToTorchBare: Kind((2,), lambda children: KnownToTorchBare(*children)),
}


def children_of(node: Any) -> list[Any] | None:
    """The parts of a container in the order they were given, None for a leaf; asks neither optree nor fdp."""
    if node is None:
        return []
    if isinstance(node, Two):
        return [node.left, node.right]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple | deque) and type(node) is not torch.Size else None


def leaves_of(tree: Any) -> Iterator[Any]:
    """All leaves, depth first."""
    children = children_of(tree)
    if children is None:
        yield tree
    else:
        for child in children:
            yield from leaves_of(child)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors, depth first."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf replaced."""
    children = children_of(tree)
    if children is None:
        return fn(tree)
    if tree is None:
        return None
    values = [mapped(fn, child) for child in children]
    if isinstance(tree, dict) and not dataclasses.is_dataclass(tree):
        copy = tree.copy()
        copy.update(zip(tree, values, strict=True))
        return copy
    return KINDS[type(tree)].make(values) if type(tree) in KINDS else type(tree)(*values)


def with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The tree with other tensors, depth first."""
    return mapped(lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf, tree)
