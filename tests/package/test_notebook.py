"""What a notebook shows, in a kernel of Jupyter: each cell one output, and all of it."""

import json
import os
import re
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.common.programs import load

DOCS = Path(__file__).parents[2] / "docs"

SETUP = """
import os, fdp, torch
devices = fdp.virtual_devices(2)
batch = fdp.scatter({"x": torch.ones(5, 2), "scale": torch.tensor(1.0)}, devices)
params = fdp.replicate({"w": torch.ones(2)}, devices)
plan = fdp.explain(lambda w, x: x @ w, torch.ones(2), torch.ones(5, 2), devices)
picture = fdp.visualize(batch)
print(os.getpid())
"""
VALUES = {
    "plan": "fdp.explain(lambda w, x: x @ w, torch.ones(2), torch.ones(5, 2), devices)",
    "picture": "fdp.visualize(batch)",
    "sharded": "batch",
    "replicated": "params",
}
PRINTED = {
    "printed plan": "print(plan)",
    "printed picture": "print(picture)",
}
SILENT = {"texts": "a = str(picture), repr(plan), f'{plan}', plan._repr_html_(), batch._repr_html_()"}
CELLS = VALUES | PRINTED | SILENT
PARTS = {
    "plan": ["Plan: 5 rows on 2 slots", "params", "inputs", "Copies between devices: 0 (0 B)"],
    "picture": ["Sharded: 2 slots, rows 3 + 2", "['scale']", "['x']", "float32[5, 2]"],
    "sharded": ["Sharded: 2 slots, rows 3 + 2", "['scale']", "['x']", "float32[5, 2]"],
    "replicated": ["Replicated: 2 slots", "['w']", "float32[2]"],
}


class Shown(NamedTuple):
    """The outputs of each cell, the process of the kernel, and the page."""

    outputs: dict[str, list[Any]]
    pid: int
    page: dict[str, Any]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return json.loads((DOCS / "how_to" / "notebook.ipynb").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """What makes the site's pages of notebooks."""
    return load(DOCS / "_notebook.py")


@pytest.fixture(scope="module")
def shown(pages: ModuleType, page: dict[str, Any]) -> Shown:
    """The page and all cells of this file, run by one kernel."""
    cells = page["cells"] + [cell(source) for source in (SETUP, *CELLS.values())]
    done = pages.executed(page | {"cells": cells})["cells"]
    own = [each["outputs"] for each in done[len(page["cells"]) :]]
    outputs = dict(zip(CELLS, own[1:], strict=True))
    return Shown(outputs, int(own[0][0]["text"]), page | {"cells": done[: len(page["cells"])]})


def cell(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": source}


def text_of(output: Any) -> str:
    """What a reader sees of an output."""
    if output["output_type"] == "stream":
        return output["text"]
    return unescape(re.sub("<[^>]*>", "", output["data"]["text/html"]))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_shown_once_and_whole(shown: Shown, name: str):
    (output,) = shown.outputs[name]
    assert output["output_type"] == "execute_result"
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert [part for part in PARTS[name] if part not in text_of(output)] == []


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_shown_once_and_whole(shown: Shown, name: str):
    (output,) = shown.outputs[name]
    of = next(value for value in PARTS if value in name)
    assert [part for part in PARTS[of] if part not in text_of(output)] == []


def test_nothing_is_shown_unasked(shown: Shown):
    assert shown.outputs["texts"] == []


def test_the_kernel_is_gone(shown: Shown):
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(shown.pid, 0)


def test_the_page_shows_what_its_cells_put_out(pages: ModuleType, shown: Shown):
    """Tables whole, what processes print, and the cell that is interrupted; the cells after it compare numbers."""
    text = unescape(pages.as_markdown(shown.page))
    outputs = [output for cell in shown.page["cells"] for output in cell.get("outputs", [])]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    assert [output["ename"] for output in outputs if output["output_type"] == "error"] == ["KeyboardInterrupt"]
    whole = ["Plan: 37 rows on 2 slots", "Sharded: 2 slots, rows 19 + 18", "Replicated: 2 slots"]
    printed = ["[rank 0] rows of this process: 19", "[rank 1] rows of this process: 18", "<pre>KeyboardInterrupt</pre>"]
    assert [part for part in whole + printed if part not in text] == []
    assert text.count('<div class="output">') == len(outputs) == 9
    before, after = map(float, re.findall(r"loss before: (\d\S+), after 40 steps: (\d\S+)", text)[0])
    assert after < before / 2


def test_the_page_is_saved_without_outputs(page: dict[str, Any]):
    """They are made anew for each site."""
    code = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert [cell["source"] for cell in code if cell["outputs"] or cell["execution_count"]] == []
