"""The example with one import changed: both runs agree, and a disagreement is an error."""

from typing import Any

import pytest

from tests.common.depth import deep

EXAMPLE = "digits_data_parallel"


@pytest.mark.parametrize("devices", deep(["1", "3", "gpu"], ["1"]))
def test_both_runs_agree(example: Any, devices: str, capsys: pytest.CaptureFixture[str]):
    assert example.main(["--epochs", "1", "--devices", devices]) == 0
    lines = capsys.readouterr().out.splitlines()
    if devices == "3":
        assert lines[0].startswith("1 device: ")
        assert lines[1].startswith("3 devices: ")
    assert float(lines[2].removeprefix("Largest difference between the parameters: ")) < 1e-12


def test_a_disagreement_is_an_error(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(example, "TOLERANCE", -1.0)
    assert example.main(["--epochs", "1", "--devices", "2"]) == 1
    assert "they disagree" in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["0", "two", "-1"])
def test_a_slip_is_one_clear_message(example: Any, devices: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--devices", devices])
    assert "expected a whole number from 1 to 1024, or gpu" in capsys.readouterr().err
