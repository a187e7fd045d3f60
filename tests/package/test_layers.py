"""What docs/explanation/layers.md counts, counted again."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/layers.md"
# In a process of its own: another test may have replaced functions of torch.
REPLACED = """
import sys, types, torch, fdp
from fdp._execution import guards
from fdp._trees import torch_private

guards.install()
found = {}
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "torch":
        for value in list(vars(module).values()):
            if isinstance(value, types.FunctionType) and value.__code__.co_filename == guards.__file__:
                found[id(value)] = value.__name__
acting = [name for name in found.values() if name == "_functional_call"]
print(len(torch_private.USED), len(acting), len(found) - len(acting))
"""


def nodes() -> Iterator[ast.AST]:
    for path in ROOT.glob("fdp/**/*.py"):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def counts() -> str:
    run = [sys.executable, "-c", REPLACED]
    private, acting, raising = subprocess.run(run, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()
    calls = [ast.unparse(node.func) for node in nodes() if isinstance(node, ast.Call)]
    variables = sum(call.endswith("ContextVar") for call in calls)
    bases = {
        node.name: [ast.unparse(base) for base in node.bases] for node in nodes() if isinstance(node, ast.ClassDef)
    }
    control = sorted(name for name, each in bases.items() if {"BaseException", "Exception"} & set(each))
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| private names of torch, outside of `testing` | {private} |",
            f"| functions of torch that are replaced by ones that act | {acting} |",
            f"| functions of torch that are replaced by ones that raise beside other shards | {raising} |",
            f"| context variables | {variables} |",
            f"| exceptions for control flow | {len(control)}: {', '.join(f'`{name}`' for name in control)} |",
        ]
    )


def test_the_page_on_layers_counts_right():
    assert counts() in PAGE.read_text(encoding="utf-8"), counts()
