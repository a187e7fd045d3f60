"""Of many cases few in the fast suite, and all of them in `make test-deep`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]


def few(rounds: int = 1) -> pytest.MarkDecorator:
    """For a test of several `parametrize`: the fast suite takes each entry of the longest table so many times.

    Beside it come the entries of the others in turn, so that each of them comes too.
    """
    return pytest.mark.few(rounds)


def deep(names: Collection[str], rare: Collection[str]) -> list[Any]:
    """All names; those of rare cases are for `make test-deep`."""
    assert set(rare) <= set(names)
    return [pytest.param(name, marks=[pytest.mark.deep] if name in rare else []) for name in names]


def diagonal(sizes: Sequence[int], rounds: int) -> set[Case]:
    """Of the product of tables of these sizes, cases with each entry of each table."""
    longest = max(range(len(sizes)), key=lambda column: sizes[column])
    length = sizes[longest]

    def case(row: int, turn: int) -> Case:
        found, beside = [], 1
        for column, size in enumerate(sizes):
            if column == longest:
                found.append(row)
                continue
            step = row // beside if beside * size <= length else row
            found.append((step + turn) % size)
            beside *= size
        return tuple(found)

    return {case(row, turn) for row in range(length) for turn in range(rounds)}


def leave_most_to_deep(items: Iterable[pytest.Item]) -> None:
    """Mark as `deep` what `few` does not take."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("deep"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        _leave(group, *group[0].get_closest_marker("few").args)


def _leave(items: list[Any], rounds: int) -> None:
    tables = [_entries(items, marker.args[0]) for marker in items[0].iter_markers("parametrize")]
    kept = diagonal([1 + max(table) for table in tables], rounds)
    for item, *case in zip(items, *tables, strict=True):
        if tuple(case) not in kept:
            item.add_marker("deep")


def _entries(items: list[Any], names: str | Sequence[str]) -> list[int]:
    """For each test the number of its entry in the table with these names."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    seen: dict[Case, int] = {}
    found = (tuple(id(item.callspec.params[name]) for name in names) for item in items)
    return [seen.setdefault(entry, len(seen)) for entry in found]
