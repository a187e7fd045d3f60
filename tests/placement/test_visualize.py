"""`visualize`: each leaf a line, whole or on which slots; nothing is cut off."""

import re
from typing import Any

import pytest
import torch

import fdp
from tests.common.containers import Batch, Point
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(3)


def lines_of(tree: Any) -> list[str]:
    """The lines of the picture, with a bar between columns, and without the line below the head."""
    title, *lines = str(fdp.visualize(tree)).splitlines()
    return [title, *(re.sub(r" {3,}", " | ", line) for line in lines if not line.startswith("─"))]


# ---- what it says


def of_parallel_apply(fn: Any) -> Any:
    return fdp.parallel_apply(fn, fdp.scatter(numbers(7, 3), SLOTS))


MIXED = Batch(
    Point(fdp.scatter([numbers(4), numbers(4, 2)], SLOTS[:2]), fdp.replicate(numbers(2), SLOTS)), numbers(5), 3
)
SAID: dict[str, tuple[Any, list[str]]] = {
    "sharded": (
        fdp.scatter(
            {"x": numbers(7, 3), "y": numbers(2, 7).float(), "scale": torch.tensor(1.0), "name": "train"},
            SLOTS,
            {"x": 0, "y": -1, "scale": 0, "name": 0},
        ),
        [
            "Sharded: 3 slots, rows 3 + 2 x 2 (cpu: 0, 1, 2)",
            "leaf | tensor | how | rows | on | bytes per slot",
            "['name'] | str | whole",
            "['scale'] | float32[] | whole | 3 x cpu | 3 x 4 B",
            "['x'] | float64[7, 3] | split along dim 0 | 3 + 2 x 2 | 3 x cpu | 72 B + 2 x 48 B",
            "['y'] | float32[2, 7] | split along dim -1 | 3 + 2 x 2 | 3 x cpu | 24 B + 2 x 16 B",
        ],
    ),
    "replicated": (
        fdp.replicate({"w": numbers(3, 2), "n": 4}, SLOTS),
        [
            "Replicated: 3 slots (cpu: 0, 1, 2)",
            "leaf | tensor | how | on | bytes per slot",
            "['n'] | int | whole",
            "['w'] | float64[3, 2] | whole | 3 x cpu | 3 x 48 B",
        ],
    ),
    "on several devices": (
        fdp.replicate(numbers(3), ["cpu", "meta", "cpu"]),
        [
            "Replicated: 3 slots (cpu: 0, 2; meta: 1)",
            "leaf | tensor | how | on | bytes per slot",
            "(all) | float64[3] | whole | cpu + meta + cpu | 3 x 24 B",
        ],
    ),
    "both, and what is not on slots": (
        MIXED,
        [
            "Batch of 5 leaves",
            "leaf | tensor | how | rows | on | bytes per slot",
            "tree.x.x[0] | float64[4] | split along dim 0 | 2 x 2 | 2 x cpu | 2 x 16 B",
            "tree.x.x[1] | float64[4, 2] | split along dim 0 | 2 x 2 | 2 x cpu | 2 x 32 B",
            "tree.x.y | float64[2] | whole | 3 x cpu | 3 x 16 B",
            "tree.y | float64[5] | cpu | 40 B",
            "tree.tag | int",
        ],
    ),
    "0-dim": (
        torch.tensor(2.0),
        ["Tensor of 1 leaf", "leaf | tensor | on | bytes per slot", "tree | float32[] | cpu | 4 B"],
    ),
    "int": (3, ["int of 1 leaf", "leaf | tensor", "tree | int"]),
    "empty": ({}, ["dict of 0 leaves"]),
    "items": (
        fdp.scatter(
            {"images": [numbers(i, 2) for i in range(4)], "names": list("abcd")},
            SLOTS,
            {"images": "items", "names": "items"},
        ),
        [
            "Sharded: 3 slots, rows 2 + 2 x 1 (cpu: 0, 1, 2)",
            "leaf | tensor | how | rows | on | bytes per slot",
            "['images'] | list | split by items | 2 + 2 x 1 | 3 x cpu | 16 B + 32 B + 48 B",
            "['names'] | list | split by items | 2 + 2 x 1 | 3 x cpu",
        ],
    ),
    "results": (
        of_parallel_apply(lambda x: {"sum": x.sum(), "rows": x, "n": len(x)}),
        [
            "Sharded: 3 slots (cpu: 0, 1, 2)",
            "leaf | tensor | how | on | bytes per slot",
            "['n'] | int | each its own",
            "['rows'] | float64[3, 3] + [2, 3] | each its own | 3 x cpu | 72 B + 2 x 48 B",
            "['sum'] | float64[] | each its own | 3 x cpu | 3 x 8 B",
        ],
    ),
    "no rows": (
        fdp.scatter(numbers(0), SLOTS),
        [
            "Sharded: 1 slot, rows 0 (cpu: 0)",
            "leaf | tensor | how | rows | on | bytes per slot",
            "(all) | float64[0] | split along dim 0 | 0 | cpu | 0 B",
        ],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_it_says(name: str):
    tree, want = SAID[name]
    assert lines_of(tree) == want


def test_results_of_other_structure_on_each_slot():
    lines = lines_of(of_parallel_apply(lambda x: {"a": x} if fdp.axis_index() else [x, 2]))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["[0][0]", "[0][1]", "[1]['a']", "[2]['a']"]


# ---- room


@pytest.mark.parametrize("count", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize("rows", [5, 37, 1000])
def test_many_slots(rows: int, keep_empty: bool, count: int):
    batch = fdp.scatter(
        {"x": numbers(rows, 2), "s": torch.tensor(1)}, fdp.virtual_devices(count), keep_empty=keep_empty
    )
    (line,) = [line for line in lines_of(batch) if line.startswith("['x']")]
    counted = [run.rpartition(" x ") for run in line.split(" | ")[3].split(" + ")]
    assert tuple(int(size) for count, _, size in counted for _ in range(int(count or 1))) == batch.sizes


def test_long_paths_and_uneven_slots_are_not_cut():
    name = "encoder.layers.11.self_attention.output_projection.weight"
    batch = fdp.scatter({name: numbers(37, 2, 3)}, fdp.virtual_devices(8), weights=[1, 9, 2, 8, 3, 7, 4, 6])
    _, head, rule, line = str(fdp.visualize(batch)).splitlines()
    assert line.startswith(f"['{name}']")
    assert len(line) == len(head) == len(rule)
    assert line.count(" B") == 8


def test_notebooks_show_slots_as_pictures():
    batch = fdp.scatter(numbers(7), SLOTS)
    assert batch._repr_html_() == fdp.visualize(batch)._repr_html_()
