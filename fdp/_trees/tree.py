"""Trees: flattened into leaves with their specs, put together again, mapped. What is done with a tree is done here."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch

from fdp._trees.containers import NAMESPACE
from fdp._trees.prefix import is_items, is_spec_leaf, matched, structure_with_items
from fdp._trees.registry import TreeTypeError, TreeValueError, by_optree, flattened, register_nodes
from fdp._trees.types import Dims, Tree


class Flat(NamedTuple):
    """A flattened tree: its leaves, the spec that holds for each, and how to put it together again."""

    name: str | tuple[str, ...]  # of a tuple of trees one for each
    leaves: list[Any]
    specs: list[Any]
    structure: optree.PyTreeSpec
    accessors: list[optree.PyTreeAccessor]  # none, until they are asked for

    def path(self, index: int) -> str:
        """Where a leaf stands, as the user would write it: `inputs[0]['x']`."""
        return self._codified(self._accessor(index))

    def each(self) -> "list[Flat]":
        """The trees of a tuple of trees, one by one."""
        found, first = [], 0
        for name, child in zip(self.name, self.structure.children(), strict=True):
            own = slice(first, first + child.num_leaves)
            found.append(Flat(name, self.leaves[own], self.specs[own], child, []))
            first = own.stop
        return found

    def above(self, index: int) -> str:
        """Where the container of a leaf stands."""
        return self._codified(self._accessor(index)[:-1])

    def _codified(self, accessor: optree.PyTreeAccessor) -> str:
        if isinstance(self.name, str):
            return accessor.codify(self.name)
        return accessor[1:].codify(self.name[accessor.path[0]])

    def _accessor(self, index: int) -> optree.PyTreeAccessor:
        if not self.accessors:  # all at once: one alone takes as long
            self.accessors.extend(optree.treespec_accessors(self.structure))
        return self.accessors[index]


def flatten(tree: Tree, name: str, dims: Dims = None, choices: str = "", where: str = "fdp") -> Flat:
    """Flatten a tree and give each leaf the spec that the prefix tree `dims` has for it.

    A list or tuple under the spec `"items"` is one leaf. Messages start with `where`, and call the tree `name` and the
    specs `choices`.
    """
    try:
        return _flatten_prefix(tree, name, dims, choices)
    except TreeTypeError as error:
        raise TypeError(f"{where}: {error}") from None
    except TreeValueError as error:
        raise ValueError(f"{where}: {error}") from None


def flatten_all(
    trees: tuple[Tree, ...], names: tuple[str, ...], dims: Sequence[Dims], choices: Sequence[str], where: str
) -> Flat:
    """`flatten` of several trees, as one tuple of them."""
    flats = [flatten(*each, where) for each in zip(trees, names, dims, choices, strict=True)]
    structure = optree.treespec_tuple([flat.structure for flat in flats], namespace=NAMESPACE)
    leaves, specs = [x for flat in flats for x in flat.leaves], [x for flat in flats for x in flat.specs]
    return Flat(names, leaves, specs, structure, [])


def flattened_all(trees: tuple[Tree, ...], names: tuple[str, ...], where: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a tuple of trees."""
    for tree, name in zip(trees, names, strict=True):  # types are registered, or refused
        flatten(tree, name, where=where)
    return by_optree(trees)


def _flatten_prefix(tree: Tree, name: str, dims: Dims, choices: str) -> Flat:
    leaves, structure = flattened(tree, name)
    if dims is None or type(dims) is int:
        return Flat(name, leaves, [dims] * len(leaves), structure, [])
    if not isinstance(dims, str):
        register_nodes(dims, choices)
    if is_spec_leaf(dims) and not is_items(dims):
        return Flat(name, leaves, [dims] * len(leaves), structure, [])
    places = matched(dims, tree, lambda: name, choices)
    if any(is_items(spec) for _, spec in places):
        structure = structure_with_items(dims, tree, lambda: name, choices)
    leaves, specs = [], []
    for node, spec in places:
        below = [node] if is_items(spec) else optree.tree_leaves(node, namespace=NAMESPACE)
        leaves += below
        specs += [spec] * len(below)
    return Flat(name, leaves, specs, structure, [])


def flatten_any(tree: Tree, name: str) -> Flat:
    """Flatten a tree in which any object may be a leaf, also one that holds tensors."""
    register_nodes(tree, name)
    leaves, structure = by_optree(tree, name)
    return Flat(name, leaves, [None] * len(leaves), structure, [])


def lists_in(flat: Flat) -> Iterator[tuple[int, int, str]]:
    """The lists that hold leaves only: the first leaf, how many there are, and where the list stands."""
    todo = [(flat.structure, 0)]
    while todo:
        node, first = todo.pop()
        children = node.children()
        if node.type is list and children and all(child.is_leaf() for child in children):
            yield first, len(children), flat.above(first)
        for child in children:
            todo.append((child, first))
            first += child.num_leaves


def digest_of(flat: Flat) -> int:
    """A number that trees with the same paths have, in every process."""
    found = _DIGESTS.get(flat.structure)
    if found is None:
        if len(_DIGESTS) > 1000:
            _DIGESTS.clear()
        found = _DIGESTS[flat.structure] = zlib.crc32(repr(flat.structure.paths()).encode())
    return found


_DIGESTS: dict[optree.PyTreeSpec, int] = {}


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Tree:
    """Inverse of `flatten`."""
    return structure.unflatten(leaves)


def tree_map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Apply `fn` leaf by leaf; the trees have equal structures."""
    leaves, structure = flattened(tree, "tree")
    columns = [structure.flatten_up_to(rest) for rest in rests]
    return optree.tree_unflatten(structure, map(fn, leaves, *columns))


def leaves_up_to(structure: optree.PyTreeSpec, tree: Tree) -> list[Tree]:
    """For each leaf of `structure`, what stands there in a tree that may go deeper."""
    return structure.flatten_up_to(tree)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to all tensors of a tree, in the order of `tensors_in`; everything else stays."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `fn` to all leaves of a tree, also to objects that hold tensors."""
    flat = flatten_any(tree, "tree")
    return optree.tree_unflatten(flat.structure, list(map(fn, flat.leaves)))


def tensors_in(tree: Tree) -> list[torch.Tensor]:
    """All tensors of a tree."""
    leaves = by_optree(tree, by=optree.tree_leaves)
    return leaves if set(map(type, leaves)) <= _TENSORS else [x for x in leaves if isinstance(x, torch.Tensor)]


_TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter}
