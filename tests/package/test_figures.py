"""What the captions of the figures in docs/ claim, found again by the code that draws them."""

import json
from pathlib import Path

import pytest
import torch

from tests.common.programs import load, run_script

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
SCRIPTS = sorted(path for path in FIGURES.glob("*.py") if not path.stem.startswith("_"))


def test_splits():
    found = load(FIGURES / "splits.py").splits()
    assert list(found.values()) == [[10, 9, 9, 9], [15, 8, 7, 7], [10, 10, 10, 7]]
    assert found["fdp.nn.scatter, as torch.chunk"] == [len(chunk) for chunk in torch.arange(37).chunk(4)]


def test_token_mean():
    """By tokens the error is rounding; in the other ways it is between 4 and 25 percent, on every split."""
    figure = load(FIGURES / "token_mean.py")
    found = figure.errors()
    assert len(found) == 5
    for off in found.values():
        assert off["by tokens"] < 1e-15
        assert 0.04 < off["by rows"] < off["plainly"] < 0.25
    _, _, y = figure.problem()
    lengths = (y != -1).sum(1)
    assert (lengths.min(), lengths.max()) == (1, 24)


def test_trap():
    """Times the number of slots if the summed loss is differentiated, once in the other two ways."""
    found = load(FIGURES / "trap.py").factors()
    assert found["psum"] == pytest.approx(list(range(1, 9)), rel=1e-12)
    assert found["own"] == pytest.approx([1.0] * 8, rel=1e-12)
    assert found["pmean"] == pytest.approx([1.0] * 8, rel=1e-12)


def test_call():
    shards, joined = load(FIGURES / "call.py").call()
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 10), (10, 19), (19, 28), (28, 37)]
    assert [shard.out for shard in shards] == [[10, 10], [9, 10], [9, 10], [9, 10]]
    assert all(shard.params == [64, 10] for shard in shards)
    assert joined == [37, 10]


@pytest.mark.deep
def test_moved():
    """A step moves as many bytes in each way; a forward moves no parameters if state stays on its devices."""
    # An accelerator that is installed stays for the life of a process.
    done = run_script(FIGURES / "moved.py", "--json", timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for place, devices in enumerate([2, 4, 8]):
        others = devices - 1
        step = {way: each[place] for way, each in found["a training step"].items()}
        alone = {way: each[place] for way, each in found["a forward alone"].items()}
        assert step["nn.DataParallel"][:2] == step["fdp, parameters passed"][:2] == [others, others]
        assert step["fdp, state on its devices"][:2] == [0, 2 * others]
        assert alone["nn.DataParallel"][:2] == alone["fdp, parameters passed"][:2] == [others, 0]
        assert alone["fdp, state on its devices"][:2] == [0, 0]
        assert all(other < 0.005 for _, _, other, _ in [*step.values(), *alone.values()])
        assert [step[way][3] for way in step] == [4 * others, 7 * others, 6 * others]
        assert [alone[way][3] for way in alone] == [2 * others, 4 * others, others]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_figure_is_there(script: Path):
    """Drawn on white, so that it can be read on a dark page, and without the date on which it was drawn."""
    svg = script.with_suffix(".svg").read_text(encoding="utf-8")
    assert "fill: #ffffff" in svg
    assert "<dc:date>" not in svg
