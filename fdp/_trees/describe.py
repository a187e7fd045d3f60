"""Structures in words: where two trees differ, and what each has there."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence

import optree

from fdp._trees.message_lists import MOST, around_difference, names

MAPPINGS = (dict, OrderedDict, defaultdict)


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
    yield f"{path} is {describe(structure, structure)}"
    for accessor, child in zip(_child_accessors(structure), structure.children(), strict=True):
        yield from _lines_below(child, said, accessor.codify(path))


def _child_accessors(structure: optree.PyTreeSpec) -> list[optree.PyTreeAccessor]:
    return optree.treespec_accessors(structure.one_level() or structure)


def _described_apart(a: optree.PyTreeSpec, b: optree.PyTreeSpec) -> tuple[str, str]:
    """What two nodes are, in words that tell them apart."""
    one, other = describe(a, b), describe(b, a)
    if one == other:  # with what else a node is made of, such as the maxlen of a deque
        more = around_difference([str(node.one_level() or node) for node in (a, b)], 200)
        one, other = f"{one}, {more[0]}", f"{other}, {more[1]}"
    return one, other


def describe(structure: optree.PyTreeSpec, beside: optree.PyTreeSpec) -> str:
    """What a node is; of many keys those that the one `beside` it lacks."""
    if structure.is_leaf() or structure.type is None:
        return "a leaf"
    if structure.type is type(None):
        return "None"
    entries = structure.entries()
    if structure.type in MAPPINGS:
        if len(entries) <= MOST:
            return f"a {structure.type.__name__} with keys {names(entries)}"
        others = set(beside.entries()) if beside.type in MAPPINGS else set()
        odd = [key for key in entries if key not in others]
        among = f", among them {names(odd)}" if odd and others else ""
        return f"a {structure.type.__name__} with {len(entries):,} keys{among}"
    return f"a {structure.type.__name__} of {len(entries)}"
