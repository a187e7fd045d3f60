"""Private names of torch: they exist, and no other file uses one."""

import ast
from pathlib import Path

import pytest

from fdp._trees import torch_private

ROOT = Path(__file__).parents[2]
ON_OBJECTS = {"_version", "_sequence_nr", "_set_sequence_nr", "_use_count", "_base", "_cdata", "_backward_hooks"}


@pytest.mark.parametrize("private", torch_private.USED, ids=lambda private: private.path)
def test_it_is_there(private: torch_private.Private):
    torch_private.find(private.path)
    assert private.why
    assert private.seen


def test_one_that_is_gone_is_named_with_what_it_was_for(monkeypatch: pytest.MonkeyPatch):
    gone = torch_private.Private("torch._C._gone", "to see it go", "none")
    monkeypatch.setattr(torch_private, "USED", [gone])
    with pytest.raises(ImportError, match=r"torch \S+ has no torch\._C\._gone, which fdp needs: to see it go"):
        torch_private.find(gone.path)


def test_nobody_else_asks_tensors_and_nodes():
    """What belongs to objects, which ruff does not see."""
    for path in ROOT.glob("fdp/**/*.py"):
        if path.name == "torch_private.py" or "testing" in path.parts:
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & ON_OBJECTS
        assert not found, path
