"""`visualize`: each leaf a line, whole or on which slots; nothing is cut off."""

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fdp
from tests.common.containers import Batch, Point
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(3)


def text(tree: Any) -> list[str]:
    return str(fdp.visualize(tree)).splitlines()


def in_terminal(drawn: Any, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(drawn)
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


def letters(drawn: str) -> str:
    """What is drawn, without the places at which it is folded."""
    return "".join(sorted(drawn.replace("─", "").replace("\n", "").replace(" ", "")))


# ---- what it says


def test_sharded():
    tree = {"x": numbers(7, 3), "y": numbers(2, 7).float(), "scale": torch.tensor(1.0), "name": "train"}
    assert text(fdp.scatter(tree, SLOTS, {"x": 0, "y": -1, "scale": 0, "name": 0})) == [
        "Sharded: 3 slots, rows 3 + 2 x 2 (cpu: 0, 1, 2)",
        "leaf        tensor          where                            bytes",
        "──────────────────────────────────────────────────────────────────",
        "['name']    str             whole",
        "['scale']   float32[]       whole on cpu x 3               3 x 4 B",
        "['x']       float64[7, 3]   │   0   │  1  │  2  │ dim 0      168 B",
        "['y']       float32[2, 7]   │   0   │  1  │  2  │ dim -1      56 B",
    ]


def test_replicated():
    assert text(fdp.replicate({"w": numbers(3, 2), "n": 4}, SLOTS)) == [
        "Replicated: 3 slots (cpu: 0, 1, 2)",
        "leaf    tensor          where                 bytes",
        "───────────────────────────────────────────────────",
        "['n']   int             whole",
        "['w']   float64[3, 2]   whole on cpu x 3   3 x 48 B",
    ]


def test_a_tree_that_has_both_and_what_is_not_on_slots():
    tree = Batch(
        Point(fdp.scatter([numbers(4), numbers(4, 2)], SLOTS[:2]), fdp.replicate(numbers(2), SLOTS)), numbers(5), 3
    )
    assert text(tree) == [
        "Batch of 5 leaves",
        "leaf          tensor          where                          bytes",
        "──────────────────────────────────────────────────────────────────",
        "tree.x.x[0]   float64[4]      │   0    │   1    │ dim 0       32 B",
        "tree.x.x[1]   float64[4, 2]   │   0    │   1    │ dim 0       64 B",
        "tree.x.y      float64[2]      whole on cpu x 3            3 x 16 B",
        "tree.y        float64[5]      cpu                             40 B",
        "tree.tag      int",
    ]


@pytest.mark.parametrize(
    ("tree", "title", "line"),
    [
        (torch.tensor(2.0), "Tensor of 1 leaf", "tree   float32[]   cpu       4 B"),
        (3, "int of 1 leaf", "tree   int"),
        ({}, "dict of 0 leaves", None),
        (nn.Linear(3, 2).state_dict(), "OrderedDict of 2 leaves", "tree['weight']   float32[2, 3]   cpu      24 B"),
    ],
    ids=["0-dim", "int", "empty", "state"],
)
def test_trees_in_one_piece(tree: Any, title: str, line: str | None):
    lines = text(tree)
    assert lines[0] == title
    assert line is None or line in lines


def test_a_whole_tree_that_is_one_tensor():
    assert "(all)   float64[7]   │   0   │  1  │  2  │ dim 0    56 B" in text(fdp.scatter(numbers(7), SLOTS))


def test_lists_by_items():
    tree = {"images": [numbers(i, 2) for i in range(4)], "names": list("abcd")}
    lines = text(fdp.scatter(tree, SLOTS, {"images": "items", "names": "items"}))
    assert lines[3:] == [
        "['images']   list     │   0    │ 1  │ 2  │ items    96 B",
        "['names']    list     │   0    │ 1  │ 2  │ items",
    ]


def test_results_of_parallel_apply():
    batch = fdp.scatter(numbers(7, 3), SLOTS)
    result = fdp.parallel_apply(lambda x: {"sum": x.sum(), "rows": x, "n": len(x)}, batch)
    assert text(result) == [
        "Sharded: 3 slots (cpu: 0, 1, 2)",
        "leaf       tensor                   where                               bytes",
        "─────────────────────────────────────────────────────────────────────────────",
        "['n']      int                      each its own",
        "['rows']   float64[3, 3] + [2, 3]   each its own on cpu x 3   72 B + 2 x 48 B",
        "['sum']    float64[]                each its own on cpu x 3           3 x 8 B",
    ]


def test_results_of_other_structure_on_each_slot():
    batch = fdp.scatter(numbers(7, 3), SLOTS)
    lines = text(fdp.parallel_apply(lambda x: {"a": x} if fdp.axis_index() else [x, 2], batch))
    assert [line.split("  ")[0] for line in lines[3:]] == ["[0][0]", "[0][1]", "[1]['a']", "[2]['a']"]


def test_slots_without_rows_and_no_rows():
    assert "│     0      │ 1  │2│ dim 0" in str(
        fdp.visualize(fdp.scatter(numbers(4), SLOTS, weights=[3, 1, 0], keep_empty=True))
    )
    assert "│0│ dim 0" in str(fdp.visualize(fdp.scatter(numbers(0), SLOTS)))


def test_devices_that_differ():
    lines = text(fdp.replicate(numbers(3), ["cpu", "meta", "cpu"]))
    assert lines[0] == "Replicated: 3 slots (cpu: 0, 2; meta: 1)"
    assert "whole on cpu x 2, meta" in lines[3]


# ---- room


@pytest.mark.parametrize("count", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize("rows", [5, 37, 1000])
def test_many_slots(rows: int, keep_empty: bool, count: int):
    batch = fdp.scatter(
        {"x": numbers(rows, 2), "s": torch.tensor(1)}, fdp.virtual_devices(count), keep_empty=keep_empty
    )
    picture = fdp.visualize(batch)
    plain = str(picture)
    assert all(f"float64[{rows}, 2]" in line for line in plain.splitlines() if line.startswith("['x']"))
    assert letters(in_terminal(picture)) == letters(plain)
    if len(batch) > 8:
        (runs,) = re.findall(r"rows ([0-9x +]+) along dim 0", plain)
        counted = [run.rpartition(" x ") for run in runs.split(" + ")]
        assert tuple(int(size) for count, _, size in counted for _ in range(int(count or 1))) == batch.sizes
    else:
        assert "│ dim 0" in plain


@pytest.mark.parametrize("width", [80, 120, 200])
def test_long_paths_and_uneven_slots_are_folded_and_not_cut(width: int):
    name = "encoder.layers.11.self_attention.output_projection.weight"
    slots = fdp.virtual_devices(8)
    tree = {
        name: fdp.scatter(numbers(37, 2, 3, 4, 5, 6), slots, weights=[1, 9, 2, 8, 3, 7, 4, 6]),
        "deep": {"er": [{"and": {"deeper": numbers(2)}}]},
        "results": fdp.parallel_apply(
            lambda x: x, fdp.scatter(numbers(37, 3), slots, weights=[1, 9, 2, 8, 3, 7, 4, 6])
        ),
    }
    picture = fdp.visualize(tree)
    assert name in str(picture)
    assert letters(in_terminal(picture, width)) == letters(str(picture))


def test_rich_prints_slots_as_pictures():
    batch = fdp.scatter(numbers(7), SLOTS)
    assert in_terminal(batch) == in_terminal(fdp.visualize(batch))
    assert batch._repr_html_() == fdp.visualize(batch)._repr_html_()


def test_colours_are_for_terminals_alone():
    picture = fdp.visualize(fdp.scatter(numbers(7), SLOTS))
    assert "\x1b" not in str(picture)
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="truecolor").print(picture)
    assert "\x1b" in file.getvalue()
