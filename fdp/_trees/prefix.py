"""Prefix trees of specs: which spec holds for what part of a tree."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import optree

from fdp._trees.containers import NAMESPACE
from fdp._trees.describe import MAPPINGS, describe
from fdp._trees.message_lists import names
from fdp._trees.registry import HOLDERS, TreeValueError, is_leaf
from fdp._trees.types import Auto, Dims, Tree

_SEQUENCES = (list, tuple, deque)


def is_spec_leaf(spec: Any) -> bool:
    """Whether a node of a spec tree is a spec, rather than a container of specs."""
    return spec is None or isinstance(spec, int | str) or is_leaf(spec)


def signature_of_dims(dims: Dims) -> tuple[Any, ...] | None:
    """What equals that of the same specs, and of no others; None if there are functions among them."""
    if dims is None or type(dims) is int:
        return (dims,)
    try:
        specs, structure = optree.tree_flatten(dims, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError:  # `flatten` says where
        return None
    kinds = tuple(map(type, specs))
    return (structure, kinds, *specs) if _SPECS.issuperset(kinds) else None


_SPECS = frozenset({int, str, bool, type(None), Auto})


def named_spec(structure: optree.PyTreeSpec, specs: Sequence[Any]) -> Dims:
    """Put resolved specs in the shape of a tree: one spec where all agree, dicts for nodes with named fields."""
    if structure.is_leaf() or (len(set(map(repr, specs))) <= 1 and "items" not in specs):
        return specs[0] if specs else None  # "items" is about one list, and would not stand for what holds it
    children, start = [], 0
    for child in structure.children():
        children.append(named_spec(child, specs[start : start + child.num_leaves]))
        start += child.num_leaves
    if structure.type in MAPPINGS:
        return dict(zip(structure.entries(), children, strict=True))
    if names := _field_names(structure.type, structure.entries()):
        return dict(zip(names, children, strict=True))
    return structure.type(children) if structure.type in _SEQUENCES else tuple(children)


def is_items(spec: Any) -> bool:
    return isinstance(spec, str) and spec == "items"


def matched(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> list[tuple[Tree, Any]]:
    """Go down both trees together: the places where the prefix tree ends, with the spec it has there."""
    if is_spec_leaf(spec) or type(tree) in HOLDERS:
        return [(tree, spec)]
    if is_leaf(tree) or tree is None:
        raise _not_a_prefix(spec, tree, path, choices)
    places = []
    for i, (child_spec, child) in enumerate(zip(_child_specs(spec, tree, path, choices), _children(tree), strict=True)):
        places += matched(child_spec, child, lambda i=i: _child_path(tree, i, path()), choices)
    return places


def structure_with_items(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> optree.PyTreeSpec:
    """The structure of a tree in which the lists under "items" are leaves."""
    if is_items(spec):
        return optree.treespec_leaf(namespace=NAMESPACE)
    if is_spec_leaf(spec) or type(tree) in HOLDERS:
        return optree.tree_structure(tree, namespace=NAMESPACE)
    children, node = _one_level(tree)
    specs = _child_specs(spec, tree, path, choices)
    structures = iter([structure_with_items(s, child, path, choices) for s, child in zip(specs, children, strict=True)])
    return optree.treespec_transform(node, None, lambda _: next(structures))


def _child_specs(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> list[Dims]:
    """The specs for the children of a node, from a spec of the same type, a dict of names, or a tuple."""
    keys, given = _entries(tree), _children(spec)
    if type(tree) in MAPPINGS:
        if type(spec) in MAPPINGS and spec.keys() == set(keys):
            return [spec[key] for key in keys]
    elif type(spec) in MAPPINGS and (fields := _field_names(type(tree), keys)) is not None:
        if unknown := [name for name in spec if name not in fields]:
            raise TreeValueError(
                f"{choices} names {names(unknown)}, but {path()} is a {type(tree).__name__} with fields {names(fields)}"
            )
        return [spec.get(name, 0) for name in fields]
    elif type(spec) is type(tree) and all(isinstance(key, str) for key in keys):
        by_name = dict(zip(_entries(spec), given, strict=True))  # a Hugging Face output leaves out what is None
        return [by_name.get(key) for key in keys]
    elif len(keys) == len(given) and type(spec) in (type(tree), *(() if type(tree) in _SEQUENCES else (tuple,))):
        return given
    raise _not_a_prefix(spec, tree, path, choices)


def _not_a_prefix(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> "TreeValueError":
    nodes = _one_level(tree)[1], _one_level(spec)[1]
    each = zip((tree, spec), (describe(*nodes), describe(*nodes[::-1])), strict=True)
    there, here = (f"a leaf ({type(t).__name__})" if is_leaf(t) else described for t, described in each)
    text = f"{path()} is {there}, but {choices} has {here} there: not a prefix of it"
    if {type(tree), type(spec)} == {list, tuple} and len(tree) == len(spec):
        text += f". Write {type(tree)(spec)!r} there"
    return TreeValueError(text)


def _one_level(tree: Tree) -> tuple[list[Tree], optree.PyTreeSpec]:
    """The children of a node, and the structure that puts them together."""
    return optree.tree_flatten(tree, lambda node: node is not tree, namespace=NAMESPACE)


def _children(tree: Tree) -> list[Tree]:
    # For dynamo a tuple is not itself, and the way below would take the whole for a leaf.
    return list(tree) if isinstance(tree, tuple | list) else _one_level(tree)[0]


def _entries(tree: Tree) -> Sequence[Any]:
    return range(len(tree)) if isinstance(tree, tuple | list) else _one_level(tree)[1].entries()


def _child_path(tree: Tree, index: int, path: str) -> str:
    return optree.treespec_accessors(_one_level(tree)[1])[index].codify(path)


def _field_names(cls: Any, entries: Sequence[Any]) -> list[str] | None:
    if optree.is_namedtuple_class(cls):
        return list(optree.namedtuple_fields(cls))
    return list(entries) if all(isinstance(entry, str) for entry in entries) else None
