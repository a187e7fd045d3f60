"""Notebooks as pages of the site: run by a kernel of Jupyter when the site is built, and shown with what they put out.

An extension of Sphinx. myst-nb does the same for many notebooks, with seven more packages, one of them a database.
"""

import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

# In a process of its own, for what waits there. Sockets that are files need a short path.
RUN = """
import json, sys, nbformat
from nbclient import NotebookClient
from traitlets.config import Config

notebook = nbformat.reads(sys.stdin.read(), as_version=4)
sockets = Config(KernelManager={"transport": "ipc", "ip": "k"})
# What a cell prints slowly comes in pieces, which are one output.
options = {"kernel_name": "python3", "timeout": 120, "startup_timeout": 120, "coalesce_streams": True}
NotebookClient(notebook, **options, config=sockets).execute()
json.dump(notebook, sys.stdout)
"""


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with its outputs: run in an empty folder, without what the user has set up for Jupyter."""
    with tempfile.TemporaryDirectory() as home:
        own = dict.fromkeys(["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"], home)
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            cwd=home,
            input=json.dumps(notebook),
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the notebook does not run\n{done.stderr}")
    return json.loads(done.stdout)


def shown(output: dict[str, Any]) -> str:
    """An output as HTML; of an error its last line."""
    if output["output_type"] == "error":
        text = f"{output['ename']}: {output['evalue']}"
    elif output["output_type"] == "stream":
        text = output["text"]
    elif "text/html" in output["data"]:
        return output["data"]["text/html"]
    else:
        text = output["data"]["text/plain"]
    return f"<pre>{escape(text.rstrip(': '))}</pre>"


def as_markdown(notebook: dict[str, Any]) -> str:
    """A page of MyST: the cells in order, each with its outputs."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```ipython3\n{source}\n```")
            parts += [f'```{{raw}} html\n<div class="output">{shown(o)}</div>\n```' for o in cell["outputs"]]
    return "\n\n".join(parts)


class NotebookParser(MystParser):
    """Takes a notebook for a page, and runs it."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: Any) -> None:
        file = Path(document.current_source or "").name
        text = as_markdown(executed(json.loads(inputstring)))
        super().parse(f"{text}\n\n{{download}}`This page as a notebook <{file}>`", document)


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls for an extension."""
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
