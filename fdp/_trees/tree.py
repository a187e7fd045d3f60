"""All contact with optree: flattening, prefix specs, structure checks, paths.

Two things are added to optree. Types that it does not know are registered under the namespace `"fdp"` when they are
first met: dataclasses, and what is registered with `torch_private.pytree`. And an opaque object that visibly holds
tensors is refused, because its tensors would silently be neither split nor moved.
"""

import itertools
import sys
import threading
import warnings
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from fdp._trees.containers import NAMESPACE, Packed, Refusal, node_functions, refusal
from fdp._trees.inside import find_inside
from fdp._trees.listing import MOST, around_difference, listed, names
from fdp._trees.types import Dims, Tree
from fdp._trees.untraced import constant_while_compiling

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_PLAIN_LEAVES: set[type] = {torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, torch.Size}
_HOLDERS: set[type] = set()
_REGISTERING = threading.Lock()
# Classes that a function defines each time it is called. optree would keep all of them for ever.
_PASSING: deque[type] = deque()
_MOST_PASSING = 256


class _TreeValueError(ValueError):
    """A tree without an end, or a spec tree that is not a prefix of its tree."""


class _TreeTypeError(TypeError):
    """A leaf that may not be one."""


class Flat(NamedTuple):
    """A flattened tree: its leaves, the spec that holds for each, and how to put it together again."""

    name: str
    leaves: list[Any]
    specs: list[Any]
    structure: optree.PyTreeSpec
    accessors: list[optree.PyTreeAccessor]  # none, until they are asked for

    def path(self, index: int) -> str:
        """Where a leaf stands, as the user would write it: `inputs[0]['x']`."""
        return self._accessor(index).codify(self.name)

    def entry(self, index: int) -> Any:
        """The last step to a leaf: a key, the name of a field or a position; None if it is the whole tree."""
        path = self._accessor(index).path
        return path[-1] if path else None

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
    except _TreeTypeError as error:
        raise TypeError(f"{where}: {error}") from None
    except _TreeValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _flatten_prefix(tree: Tree, name: str, dims: Dims, choices: str) -> Flat:
    leaves, structure = _flatten(tree, name)
    if dims is None or type(dims) is int:
        return Flat(name, leaves, [dims] * len(leaves), structure, [])
    if not isinstance(dims, str):
        _register_nodes(dims, choices)
    if is_spec_leaf(dims) and not _is_items(dims):
        return Flat(name, leaves, [dims] * len(leaves), structure, [])
    places = _walk(dims, tree, lambda: name, choices)
    if any(_is_items(spec) for _, spec in places):
        structure = _structure_with_items(dims, tree, lambda: name, choices)
    leaves, specs = [], []
    for node, spec in places:
        below = [node] if _is_items(spec) else optree.tree_leaves(node, namespace=NAMESPACE)
        leaves += below
        specs += [spec] * len(below)
    return Flat(name, leaves, specs, structure, [])


def digest_of(flat: Flat) -> int:
    """A number that trees with the same paths have, in every process."""
    if flat.structure not in _DIGESTS:
        if len(_DIGESTS) > 1000:
            _DIGESTS.clear()
        _DIGESTS[flat.structure] = zlib.crc32(repr(flat.structure.paths()).encode())
    return _DIGESTS[flat.structure]


_DIGESTS: dict[optree.PyTreeSpec, int] = {}


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Tree:
    """Inverse of `flatten`."""
    return optree.tree_unflatten(structure, leaves)


def tree_map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Apply `fn` leaf by leaf; the trees have equal structures."""
    leaves, structure = _flatten(tree, "tree")
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
    _register_nodes(tree)
    leaves, structure = _taken_apart(tree)
    return optree.tree_unflatten(structure, list(map(fn, leaves)))


def tensors_in(tree: Tree) -> list[torch.Tensor]:
    """All tensors of a tree."""
    return [leaf for leaf in _taken_apart(tree, by=optree.tree_leaves) if isinstance(leaf, torch.Tensor)]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a numpy array of at least one dimension, which may well have rows."""
    array = getattr(sys.modules.get("numpy"), "ndarray", None)  # which another thread may be about to import
    return array is not None and isinstance(leaf, array) and leaf.ndim > 0


def array_inside(leaf: Any) -> tuple[str, tuple[int, ...]] | None:
    """The path inside a leaf of such an array, empty if it is one itself, and its shape; None if there is none."""
    if is_array(leaf):
        return "", leaf.shape
    return None if type(leaf) in _PLAIN_LEAVES or "numpy" not in sys.modules else _array_in_object(leaf)


@constant_while_compiling
def _array_in_object(obj: Any) -> tuple[str, tuple[int, ...]] | None:
    found = find_inside(obj, is_array, lambda part: type(part) not in _PLAIN_LEAVES)
    return None if found is None else (found[0], found[1].shape)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is of a kind that need not be looked into."""
    return isinstance(leaf, torch.Tensor) or type(leaf) in _PLAIN_LEAVES


def register_leaf(cls: type) -> None:
    """Let trees hold a type as a leaf although it holds tensors. It takes any spec, also a tree of specs."""
    _PLAIN_LEAVES.add(cls)
    _HOLDERS.add(cls)


def is_spec_leaf(spec: Any) -> bool:
    """Whether a node of a spec tree is a spec, rather than a container of specs."""
    return spec is None or isinstance(spec, int | str) or _is_leaf(spec)


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


_SPECS = frozenset({int, str, bool, type(None)})


def named_spec(structure: optree.PyTreeSpec, specs: Sequence[Any]) -> Dims:
    """Put resolved specs in the shape of a tree: one spec where all agree, dicts for nodes with named fields."""
    if structure.is_leaf() or (len(set(map(repr, specs))) <= 1 and "items" not in specs):
        return specs[0] if specs else None  # "items" is about one list, and would not stand for what holds it
    children, start = [], 0
    for child in structure.children():
        children.append(named_spec(child, specs[start : start + child.num_leaves]))
        start += child.num_leaves
    if structure.type in _MAPPINGS:
        return dict(zip(structure.entries(), children, strict=True))
    if names := _field_names(structure.type, structure.entries()):
        return dict(zip(names, children, strict=True))
    return structure.type(children) if structure.type in _SEQUENCES else tuple(children)


def first_difference(a: optree.PyTreeSpec, b: optree.PyTreeSpec, path: str) -> tuple[str, str, str]:
    """Path of the first node at which two structures differ, and what each has there."""
    if a.type is b.type and a.entries() == b.entries():
        for accessor, left, right in zip(_child_accessors(a), a.children(), b.children(), strict=True):
            if left != right:
                return first_difference(left, right, accessor.codify(path))
    return path, *_described_apart(a, b)


def lines_of(structure: optree.PyTreeSpec, said: Sequence[str], path: str) -> list[str]:
    """A line for each node of a tree, and one for each leaf with what is `said` of it: texts that can be compared.

    A tree that is a leaf has no path.
    """
    return list(said) if structure.is_leaf() else list(_lines_below(structure, iter(said), path))


def _lines_below(structure: optree.PyTreeSpec, said: Iterator[str], path: str) -> Iterator[str]:
    if structure.is_leaf():
        yield f"{path} {next(said)}"
        return
    yield f"{path} is {_describe(structure, structure)}"
    for accessor, child in zip(_child_accessors(structure), structure.children(), strict=True):
        yield from _lines_below(child, said, accessor.codify(path))


def _child_accessors(structure: optree.PyTreeSpec) -> list[optree.PyTreeAccessor]:
    return optree.treespec_accessors(structure.one_level() or structure)


def _is_items(spec: Any) -> bool:
    return isinstance(spec, str) and spec == "items"


def _is_leaf(tree: Tree) -> bool:
    return optree.tree_is_leaf(tree, namespace=NAMESPACE)


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


def _described_apart(a: optree.PyTreeSpec, b: optree.PyTreeSpec) -> tuple[str, str]:
    """What two nodes are, in words that tell them apart."""
    one, other = _describe(a, b), _describe(b, a)
    if one == other:  # with what else a node is made of, such as the maxlen of a deque
        more = around_difference([str(node.one_level() or node) for node in (a, b)], 200)
        one, other = f"{one}, {more[0]}", f"{other}, {more[1]}"
    return one, other


def _describe(structure: optree.PyTreeSpec, beside: optree.PyTreeSpec) -> str:
    """What a node is; of many keys those that the one `beside` it lacks."""
    if structure.is_leaf() or structure.type is None:
        return "a leaf"
    if structure.type is type(None):
        return "None"
    entries = structure.entries()
    if structure.type in _MAPPINGS:
        if len(entries) <= MOST:
            return f"a {structure.type.__name__} with keys {names(entries)}"
        others = set(beside.entries()) if beside.type in _MAPPINGS else set()
        odd = [key for key in entries if key not in others]
        among = f", among them {names(odd)}" if odd and others else ""
        return f"a {structure.type.__name__} with {len(entries):,} keys{among}"
    return f"a {structure.type.__name__} of {len(entries)}"


def _field_names(cls: Any, entries: Sequence[Any]) -> list[str] | None:
    if optree.is_namedtuple_class(cls):
        return list(optree.namedtuple_fields(cls))
    return list(entries) if all(isinstance(entry, str) for entry in entries) else None


def _walk(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> list[tuple[Tree, Any]]:
    """Go down both trees together: the places where the prefix tree ends, with the spec it has there."""
    if is_spec_leaf(spec) or type(tree) in _HOLDERS:
        return [(tree, spec)]
    if _is_leaf(tree) or tree is None:
        raise _not_a_prefix(spec, tree, path, choices)
    places = []
    for i, (child_spec, child) in enumerate(zip(_child_specs(spec, tree, path, choices), _children(tree), strict=True)):
        places += _walk(child_spec, child, lambda i=i: _child_path(tree, i, path()), choices)
    return places


def _structure_with_items(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> optree.PyTreeSpec:
    """The structure of a tree in which the lists under "items" are leaves."""
    if _is_items(spec):
        return optree.treespec_leaf(namespace=NAMESPACE)
    if is_spec_leaf(spec) or type(tree) in _HOLDERS:
        return optree.tree_structure(tree, namespace=NAMESPACE)
    children, node = _one_level(tree)
    specs = _child_specs(spec, tree, path, choices)
    structures = iter(
        [_structure_with_items(s, child, path, choices) for s, child in zip(specs, children, strict=True)]
    )
    return optree.treespec_transform(node, None, lambda _: next(structures))


def _child_specs(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> list[Dims]:
    """The specs for the children of a node, from a spec of the same type, a dict of names, or a tuple."""
    keys, given = _entries(tree), _children(spec)
    if type(tree) in _MAPPINGS:
        if type(spec) in _MAPPINGS and spec.keys() == set(keys):
            return [spec[key] for key in keys]
    elif type(spec) in _MAPPINGS and (fields := _field_names(type(tree), keys)) is not None:
        if unknown := [name for name in spec if name not in fields]:
            raise _TreeValueError(
                f"{choices} names {names(unknown)}, but {path()} is a {type(tree).__name__} with fields {names(fields)}"
            )
        return [spec.get(name, 0) for name in fields]
    elif type(spec) is type(tree) and all(isinstance(key, str) for key in keys):
        by_name = dict(zip(_entries(spec), given, strict=True))  # a Hugging Face output leaves out what is None
        return [by_name.get(key) for key in keys]
    elif len(keys) == len(given) and type(spec) in (type(tree), *(() if type(tree) in _SEQUENCES else (tuple,))):
        return given
    raise _not_a_prefix(spec, tree, path, choices)


def _not_a_prefix(spec: Dims, tree: Tree, path: Callable[[], str], choices: str) -> "_TreeValueError":
    nodes = _one_level(tree)[1], _one_level(spec)[1]
    each = zip((tree, spec), (_describe(*nodes), _describe(*nodes[::-1])), strict=True)
    there, here = (f"a leaf ({type(t).__name__})" if _is_leaf(t) else described for t, described in each)
    return _TreeValueError(f"{path()} is {there}, but {choices} has {here} there: not a prefix of it")


def _taken_apart(tree: Tree, name: str | None = None, by: Callable[..., Any] = optree.tree_flatten) -> Any:
    """What optree makes of a tree, or an error that says where it has no end."""
    try:
        return by(tree, namespace=NAMESPACE)
    except RecursionError:
        place = _inside_itself(tree, name or "tree")
        if place is None:  # it is just deep
            raise
        path, outer, kind = place
        problem = f"{path} is {outer} again, a {kind} that contains itself. A tree must have an end: leave it out"
    raise ValueError(problem) if name is None else _TreeValueError(problem)


def _inside_itself(tree: Tree, name: str) -> tuple[str, str, str] | None:
    """Where a container stands inside itself, its path and its type."""
    above: dict[int, str] = {}
    todo: list[tuple[Tree, str, bool]] = [(tree, name, True)]
    while todo:
        node, path, comes = todo.pop()
        if not comes:
            del above[id(node)]
        elif id(node) in above:
            return path, above[id(node)], type(node).__name__
        elif node is not None and not _is_leaf(node):
            above[id(node)] = path
            todo.append((node, path, False))
            ends = itertools.chain((False,), itertools.repeat(True))  # not the node itself, which may be its own child
            children, structure = optree.tree_flatten(node, lambda _, ends=ends: next(ends), namespace=NAMESPACE)
            pairs = zip(children, optree.treespec_accessors(structure), strict=True)
            todo += [(child, accessor.codify(path), True) for child, accessor in pairs][::-1]
    return None


_LEAF = optree.treespec_leaf(namespace=NAMESPACE)


def _flatten(tree: Tree, name: str) -> tuple[list[Any], optree.PyTreeSpec]:
    if type(tree) is torch.Tensor and not torch.compiler.is_compiling():  # which has structures of its own
        return [tree], _LEAF
    leaves, structure = _taken_apart(tree, name)
    unknown = {type(leaf) for leaf in leaves} - _PLAIN_LEAVES
    if not unknown:
        return leaves, structure
    _register_nodes(tree, name)
    leaves, structure = _taken_apart(tree, name)
    refused = [(i, leaf, refusal(leaf)) for i, leaf in enumerate(leaves) if type(leaf) in unknown]
    if any(problem for *_, problem in refused):
        raise _refused([(i, leaf, problem) for i, leaf, problem in refused if problem], structure, name)
    return leaves, structure


def _refused(refused: Sequence[tuple[int, Any, Refusal]], structure: optree.PyTreeSpec, name: str) -> _TreeTypeError:
    accessors = optree.treespec_accessors(structure)

    def say(each: tuple[int, Any, Refusal]) -> str:
        i, leaf, problem = each
        accessor = accessors[i][:-1] if isinstance(leaf, Packed) else accessors[i]
        return problem.text(accessor.codify(name))

    ways = dict.fromkeys(problem.way_out for *_, problem in refused)
    return _TreeTypeError(f"{listed(refused, say, '; ')}. {'. '.join(ways)}")


def _register_nodes(tree: Tree, name: str | None = None) -> None:
    """Register the containers in disguise among the leaves, and then those inside them."""
    unknown = {type(leaf) for leaf in _taken_apart(tree, name, optree.tree_leaves)} - _PLAIN_LEAVES
    found = [cls.__name__ for cls in unknown if _register(cls)]
    if found and torch.compiler.is_compiling():  # what is being traced does not see it
        raise _TreeTypeError(
            f"{', '.join(found)} was met for the first time, while compiling. Call once without compile"
        )
    if found:
        _register_nodes(tree, name)


@constant_while_compiling
def _register(cls: type) -> bool:
    """Register a type of leaf with optree if it is a container in disguise; whether it was."""
    if issubclass(cls, torch.Tensor):
        _PLAIN_LEAVES.add(cls)
        return False
    functions = node_functions(cls)
    if functions is None:
        return False
    with _REGISTERING:
        if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
            optree.register_pytree_node(cls, *functions, path_entry_type=_Entry, namespace=NAMESPACE)
            if _is_passing(cls):
                _PASSING.append(cls)
            if len(_PASSING) > _MOST_PASSING:  # one that is met again is registered again
                optree.unregister_pytree_node(_PASSING.popleft(), namespace=NAMESPACE)
    return True


def _is_passing(cls: type) -> bool:
    """Whether nobody finds a class under its name, so that it is gone when nobody uses it any more."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not cls


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
