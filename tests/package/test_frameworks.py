"""The page on Accelerate, Lightning and the Trainer, with those that are installed: weights are those of a loop."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how_to/frameworks.md"
BLOCKS = re.findall(r"^```(python|py)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

IN_ORDER = """
from transformers import Trainer

Trainer._get_train_sampler = lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset)
"""
CHECK = """
plain = network()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for x, y in DataLoader(dataset, batch_size=16):
    optimizer.zero_grad()
    loss(plain, x, y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
torch.testing.assert_close(found.state_dict(), plain.state_dict())
"""
FOUND = {"accelerate": "model", "lightning": "net.model", "transformers": "classifier.net"}


@pytest.mark.parametrize("package", FOUND)
def test_example_of_a_framework(package: str, tmp_path: Path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[frameworks]'")
    ((_, begin),) = [block for block in BLOCKS if block[0] == "python"]
    (example,) = [
        code for kind, code in BLOCKS if kind == "py" and re.search(rf"^(from|import) {package}\b", code, re.M)
    ]
    # A process of its own: these packages register trees, and warn of much that is not about fdp.
    before = IN_ORDER if package == "transformers" else ""  # the Trainer shuffles, and the others do not
    run = [sys.executable, "-c", f"{begin}{before}{example}\nfound = {FOUND[package]}\n{CHECK}"]
    subprocess.run(run, cwd=tmp_path, check=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})
