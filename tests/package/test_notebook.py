"""What a notebook shows, in a kernel of Jupyter: each cell one output, and all of it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from html import unescape
from typing import Any, NamedTuple

import pytest

SETUP = """
import os, fdp, rich, torch
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
    "plan by rich": "rich.print(plan)",
    "sharded by rich": "rich.print(batch)",
}
SILENT = {"texts": "a = str(picture), repr(plan), f'{plan}', plan._repr_html_(), batch._repr_html_()"}
CELLS = VALUES | PRINTED | SILENT
PARTS = {
    "plan": ["Plan: 5 rows on 2 slots", "params", "inputs", "Copies between devices: 0 (0 B)"],
    "picture": ["Sharded: 2 slots, rows 3 + 2", "['scale']", "['x']", "float32[5, 2]"],
    "sharded": ["Sharded: 2 slots, rows 3 + 2", "['scale']", "['x']", "float32[5, 2]"],
    "replicated": ["Replicated: 2 slots", "['w']", "float32[2]"],
}


RUN = """
import json, sys, nbformat
from nbclient import NotebookClient
from traitlets.config import Config

home, sources = sys.argv[1], json.load(sys.stdin)
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
sockets = Config(KernelManager={"transport": "ipc", "ip": f"{home}/k"})
NotebookClient(notebook, kernel_name="python3", timeout=120, startup_timeout=120, config=sockets).execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""


class Shown(NamedTuple):
    """The outputs of each cell, and the process of the kernel."""

    outputs: dict[str, list[Any]]
    pid: int


@pytest.fixture(scope="module")
def shown() -> Shown:
    """All cells, run by one kernel, without what the user has set up for Jupyter."""
    # In a process of its own, for what waits there. Sockets that are files need a short path.
    with tempfile.TemporaryDirectory() as home:
        own = dict.fromkeys(["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"], home)
        done = subprocess.run(
            [sys.executable, "-c", RUN, home],
            input=json.dumps([SETUP, *CELLS.values()]),
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    first, *rest = json.loads(done.stdout)
    return Shown(dict(zip(CELLS, rest, strict=True)), int(first[0]["text"]))


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
