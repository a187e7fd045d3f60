"""The page on Accelerate, Lightning and the Trainer, with those of the three packages that are installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how_to/frameworks.md"
BLOCKS = re.findall(r"^```(python|py)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("package", ["accelerate", "lightning", "transformers"])
def test_example_of_a_framework(package: str, tmp_path: Path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[frameworks]'")
    ((_, begin),) = [block for block in BLOCKS if block[0] == "python"]
    (example,) = [
        code for kind, code in BLOCKS if kind == "py" and re.search(rf"^(from|import) {package}\b", code, re.M)
    ]
    # A process of its own: these packages register trees, and warn of much that is not about fdp.
    run = [sys.executable, "-c", begin + example]
    subprocess.run(run, cwd=tmp_path, check=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})
