"""The main example: it learns, its runs agree, and a slip at the command line is one clear message."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from tests.common.depth import deep

EXAMPLE = "digits"
QUICK = ("--epochs", "1", "--batch-size", "400")  # batches of 400, 400, 400 and 237


def test_it_learns_the_same_on_one_slot_and_on_four(example: Any):
    (images, labels), _ = example.digits(torch.float64, seed=0)
    torch.manual_seed(0)
    apply, state = fdp.functional(example.network().double())

    def trained(slots: int) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
        batches = example.shuffled(images[:203], labels[:203], size=25, epochs=1, seed=0)  # the last has 3 rows
        return example.train(apply, state, batches, fdp.virtual_devices(slots))

    one, history = trained(1)
    four, others = trained(4)
    torch.testing.assert_close(four, one, rtol=0, atol=1e-9)
    torch.testing.assert_close(others, history, rtol=0, atol=1e-9)
    assert len(history) == 9
    assert history[-1][0] < 0.7 * history[0][0]


def test_the_last_batch_has_37_rows(example: Any):
    (images, labels), (test_images, _) = example.digits(torch.float64, seed=0)
    sizes = [len(y) for _, y in example.shuffled(images, labels, size=100, epochs=1, seed=0)]
    assert sizes == [100] * 14 + [37]
    assert len(images) + len(test_images) == 1797


@pytest.mark.parametrize("dtype", deep(["float32", "float64"], ["float32"]))
def test_main_shows_both_runs(example: Any, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "loss [1].png"
    assert example.main([*QUICK, "--devices", "3", "--dtype", dtype, "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "134+133+133" in out
    assert "last batch 79+79+79" in out
    assert f"Loss curves: {picture}\n" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_main_fails_if_the_runs_disagree_in_a_single_step(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(example, "TOLERANCE", -1.0)
    assert example.main(["--epochs", "1", "--batch-size", "1437", "--output", str(tmp_path / "demo.png")]) == 1
    assert "digits.py: they disagree" in capsys.readouterr().err


def test_an_interrupt_is_one_line(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "sgd", interrupted)
    assert example.main(["--output", str(tmp_path / "demo.png")]) == 130
    assert capsys.readouterr().err == "digits.py: stopped\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--devices", "0", "a whole number from 1 to 1024, got '0'"),
        ("--devices", "-1", "a whole number from 1 to 1024, got '-1'"),
        ("--devices", "two", "a whole number from 1 to 1024, got 'two'"),
        ("--devices", "1.5", "a whole number from 1 to 1024, got '1.5'"),
        ("--devices", "9" * 5000, "a whole number from 1 to 1024, got '999"),
        ("--epochs", "0", "a whole number from 1 to 10000, got '0'"),
        ("--epochs", "", "a whole number from 1 to 10000, got ''"),
        ("--batch-size", "0", "a whole number from 1 to 1437"),
        ("--batch-size", "1438", "from 1 to 1437 (all training images), got '1438'"),
        ("--dtype", "int8", "invalid choice: 'int8'"),
        ("--seed", "-1", "a whole number from 0 to"),
        ("--output", "no/such/folder/demo.png", "cannot write 'no/such/folder/demo.png': No such file or directory"),
        ("--output", "demo.pdf", "a name that ends in .png, got 'demo.pdf'"),
        ("--output", f"{'a' * 300}.png", "File name too long"),
        ("--slots", "4", "unrecognized arguments: --slots 4"),
    ],
)
def test_a_bad_option_is_one_message(
    example: Any, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main([option, value])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: digits.py [options]"
    assert message in error


def test_a_folder_is_no_picture(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main(["--output", str(tmp_path)])
    (tmp_path / "demo.png").mkdir()
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main(["--output", str(tmp_path / "demo.png")])
    assert "Is a directory" in capsys.readouterr().err


def test_the_check_leaves_files_alone(example: Any, tmp_path: Path):
    path = tmp_path / "demo.png"
    example.picture(str(path))
    assert not path.exists()
    path.write_text("before")
    example.picture(str(path))
    assert path.read_text() == "before"


def test_a_missing_package_is_named(example: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(SystemExit, match=r'rich.*pip install "\.\[demo\]"'):
        importlib.reload(example)
