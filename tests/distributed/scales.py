"""One program at three scales: on a mesh, in one process with as many slots, and on one device."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.distributed.pool import Failure, Pool


class Layout(NamedTuple):
    """Slots and rows of each process."""

    slots: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each slot of all processes."""
        each = zip(self.slots, self.rows, strict=True)
        return tuple(rows // slots + (i < rows % slots) for slots, rows in each for i in range(slots))


def even(slots: Sequence[int], rows: int) -> Layout:
    """As `mesh.local` gives rows to processes."""
    count = sum(slots)
    sizes = [rows // count + (i < rows % count) for i in range(count)]
    starts = [0, *accumulate(slots)]
    return Layout(tuple(slots), tuple(sum(sizes[a : a + n]) for a, n in zip(starts[:-1], slots, strict=True)))


class Seat(NamedTuple):
    """What a program runs on: devices, the rows of a batch that are there, and the rows of each slot where needed."""

    devices: Any
    start: int
    stop: int
    weights: tuple[int, ...] | None

    def own(self, tree: Any, dim: int = 0) -> Any:
        """The rows of this process of the tensors and lists of a batch."""
        if isinstance(tree, dict):
            return {name: self.own(part, dim) for name, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self.own(part, dim) for part in tree)
        return (
            tree.narrow(dim, self.start, self.stop - self.start)
            if isinstance(tree, torch.Tensor)
            else (tree[self.start : self.stop])
        )

    @property
    def on(self) -> dict[str, Any]:
        """Where a call runs, as keyword arguments."""
        return {"devices": self.devices, "weights": self.weights}


Program = Callable[..., dict[str, Any]]
"""Of a seat and more. It returns what is the same everywhere in "whole", and in "rows" and "lists" what is joined."""


def in_process(mesh: Any, program: Program, layout: Layout, *args: Any) -> Any:
    """A program in a process of a mesh."""
    before = sum(layout.rows[: mesh.rank])
    return _sendable(program(Seat(mesh, before, before + layout.rows[mesh.rank], None), *args))


def alone(program: Program, layout: Layout, *args: Any) -> Any:
    """A program in one process that has all slots, each with the rows that it has on the mesh."""
    sizes = layout.sizes
    weights = sizes if any(sizes) else None
    return _sendable(program(Seat(fdp.virtual_devices(len(sizes)), 0, sum(sizes), weights), *args))


def _sendable(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def joined(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all processes have, as one. "whole" is bit by bit the same in each."""
    for each in found[1:]:
        assert_same_tree(each.get("whole"), found[0].get("whole"))
    tree = dict(found[0])
    if "rows" in tree:
        tree["rows"] = tree_map(lambda *parts: torch.cat(parts), *[each["rows"] for each in found])
    if "lists" in tree:
        tree["lists"] = {name: [x for each in found for x in each["lists"][name]] for name in tree["lists"]}
    return tree


def same_at_all_scales(
    pool: Pool,
    layout: Layout,
    program: Program,
    *args: Any,
    one_device: bool = False,
    needs_rows: bool = False,
    meets: bool = False,
) -> Any:
    """Compare a mesh with one process, and if the program is of that kind with one device; what they found.

    None if the program `needs_rows` in every process, or slots meet in it, and some process has none: then that is
    refused in all.
    """
    needs_rows = needs_rows or (meets and sum(size > 0 for size in layout.sizes) > 1)
    if needs_rows and 0 in layout.rows and any(layout.rows):
        outcomes = pool.outcomes(in_process, layout.slots, program, layout, *args)
        for outcome in outcomes:
            assert isinstance(outcome, Failure), outcome
            assert "process without rows" in outcome.message, outcome
            assert "could not reach" not in outcome.message, outcome
        return None
    expected = alone(program, layout, *args)
    found = joined(pool(in_process, layout.slots, program, layout, *args))
    assert_close_tree(found, expected)
    if one_device:
        assert_close_tree(found, alone(program, Layout((1,), (sum(layout.rows),)), *args))
    return found


def agree_on_failure(pool: Pool, layout: Layout, program: Program, *args: Any) -> str | None:
    """As `same_at_all_scales`, but what fails in one process may fail on the mesh, in all of its processes.

    So may what needs rows in every process, where one has none.
    """
    error: Exception | None = None
    expected: Any = None
    try:
        expected = alone(program, layout, *args)
    except Exception as failure:
        error = failure
    outcomes = pool.outcomes(in_process, layout.slots, program, layout, *args)
    if 0 in layout.rows and any(isinstance(x, Failure) and "process without rows" in x.message for x in outcomes):
        assert all(isinstance(outcome, Failure) for outcome in outcomes), outcomes
        assert not any("could not reach" in outcome.message for outcome in outcomes), outcomes
        return "without rows"
    if error is not None:
        assert all(isinstance(outcome, Failure) for outcome in outcomes), f"{error!r}, but {outcomes}"
        assert not any("could not reach" in outcome.message for outcome in outcomes), outcomes
        return str(error)
    assert not any(isinstance(outcome, Failure) for outcome in outcomes), outcomes
    assert_close_tree(joined(outcomes), expected)
    return None
