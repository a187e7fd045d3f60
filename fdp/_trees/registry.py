"""Which types are containers and which are leaves, and taking trees apart with optree.

Two things are added to optree. Types that it does not know are registered under the namespace `"fdp"` when they are
first met: dataclasses, and what is registered with `torch_private.pytree`. And an opaque object that visibly holds
tensors is refused, because its tensors would silently be neither split nor moved.
"""

import dataclasses
import functools
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from fdp._trees import torch_private
from fdp._trees.containers import NAMESPACE, Packed, node_functions
from fdp._trees.message_lists import listed
from fdp._trees.not_compiled import constant_while_compiling
from fdp._trees.opaque import Refusal, refusal
from fdp._trees.types import Tree

PLAIN_LEAVES: set[type] = {torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, torch.Size}
HOLDERS: set[type] = set()
_REGISTERING = threading.Lock()


class TreeValueError(ValueError):
    """A tree without an end, or a spec tree that is not a prefix of its tree."""


class TreeTypeError(TypeError):
    """A leaf that may not be one."""


_LEAF = optree.treespec_leaf(namespace=NAMESPACE)


def is_plain_structure(structure: optree.PyTreeSpec) -> bool:
    """Whether a structure holds nothing but strings, numbers and classes: no key or metadata that may be large."""
    if structure.is_leaf():
        return True
    kind: Any = structure.type
    if not (kind in _PLAIN_NODES or optree.is_namedtuple_class(kind) or dataclasses.is_dataclass(kind)):
        return False
    keys = structure.entries()
    return all(type(key) in _PLAIN_KEYS for key in keys) and all(map(is_plain_structure, structure.children()))


_PLAIN_NODES = frozenset({dict, OrderedDict, list, tuple, deque, type(None)})
_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, type(None)})


def register_leaf(cls: type) -> None:
    """Let trees hold a type as a leaf although it holds tensors. It takes any spec, also a tree of specs."""
    PLAIN_LEAVES.add(cls)
    HOLDERS.add(cls)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is of a kind that need not be looked into, and of a class that stays."""
    return type(leaf) in PLAIN_LEAVES


def is_leaf(tree: Tree) -> bool:
    return optree.tree_is_leaf(tree, namespace=NAMESPACE)


def flattened(tree: Tree, name: str) -> tuple[list[Any], optree.PyTreeSpec]:
    if type(tree) is torch.Tensor and not torch.compiler.is_dynamo_compiling():  # which has structures of its own
        return [tree], _LEAF
    leaves, structure = by_optree(tree, name)
    unknown = set(map(type, leaves)) - PLAIN_LEAVES
    if not unknown:
        return leaves, structure
    register_nodes(tree, name)
    leaves, structure = by_optree(tree, name)
    refused = [(i, leaf, refusal(leaf)) for i, leaf in enumerate(leaves) if type(leaf) in unknown]
    if any(problem for *_, problem in refused):
        raise _refused([(i, leaf, problem) for i, leaf, problem in refused if problem], structure, name)
    return leaves, structure


def _refused(refused: Sequence[tuple[int, Any, Refusal]], structure: optree.PyTreeSpec, name: str) -> TreeTypeError:
    accessors = optree.treespec_accessors(structure)

    def say(each: tuple[int, Any, Refusal]) -> str:
        i, leaf, problem = each
        accessor = accessors[i][:-1] if isinstance(leaf, Packed) else accessors[i]
        return f"{accessor.codify(name)} is {problem.why}"

    ways = dict.fromkeys(problem.way_out for *_, problem in refused)
    return TreeTypeError(f"{listed(refused, say, '; ')}. {'. '.join(ways)}")


flatten_plainly: Any = functools.partial(optree.tree_flatten, namespace=NAMESPACE)
"""What optree makes of a tree, without a look at its leaves."""


def by_optree(tree: Tree, name: str | None = None, by: Callable[..., Any] = optree.tree_flatten) -> Any:
    """What optree makes of a tree, or an error that says where it has no end."""
    if torch.compiler.is_dynamo_compiling():
        _trace_dicts()
    try:
        return by(tree, namespace=NAMESPACE)
    except RecursionError:
        problem = f"{name or 'a tree'} has no end: a container in it contains itself, or containers are nested too deep"
    raise ValueError(problem) if name is None else TreeValueError(problem)


@constant_while_compiling
def _trace_dicts() -> None:
    torch_private.trace_dicts()


def register_nodes(tree: Tree, name: str | None = None) -> None:
    """Register the containers in disguise among the leaves, and then those inside them."""
    unknown = {type(leaf) for leaf in by_optree(tree, name, optree.tree_leaves)} - PLAIN_LEAVES
    found = [cls.__name__ for cls in unknown if _register(cls)]
    if found and torch.compiler.is_dynamo_compiling():  # what is being traced does not see it
        raise TreeTypeError(
            f"{', '.join(found)} was met for the first time, while compiling. Call once without compile"
        )
    if found:
        register_nodes(tree, name)


@constant_while_compiling
def _register(cls: type) -> bool:
    """Register a type of leaf with optree if it is a container in disguise; whether it was."""
    if issubclass(cls, torch.Tensor):
        PLAIN_LEAVES.add(cls)
        return False
    functions = node_functions(cls)
    if functions is None:
        return False
    with _REGISTERING:
        if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
            optree.register_pytree_node(cls, *functions, path_entry_type=_Entry, namespace=NAMESPACE)
    return True


class _Entry(optree.PyTreeEntry):
    """A step into a registered type: a field by its name, or a key or position."""

    def codify(self, node: str = "") -> str:
        by_name = isinstance(self.entry, str) and not issubclass(self.type, dict) and self.entry.isidentifier()
        return f"{node}.{self.entry}" if by_name else f"{node}[{self.entry!r}]"


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # optree warns that this overrides its rule for namedtuples
    packed: Any = PackedSequence
    optree.register_pytree_node(
        packed, lambda obj: ((Packed(obj),), None), lambda _, children: next(iter(children)), namespace=NAMESPACE
    )
