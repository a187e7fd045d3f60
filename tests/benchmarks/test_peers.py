"""The comparison with peers: its command line, what it writes, and that a wrong contender ends it."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import compare, report
from benchmarks.peers.process import Job


def only_torch(rendezvous: str) -> dict[str, list[Job]]:
    return {name: compare.jobs(rendezvous)[name] for name in (report.PLAIN,)}


@pytest.mark.deep  # half a minute of imports and drawing
def test_figures_are_written_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "measure", functools.partial(compare.measure, jobs_of=only_torch))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)  # as without matplotlib
    assert peers.main(["--rounds", "2", "--models", "small MLP", "--out", "there", "--json"]) == 0
    said = capsys.readouterr()
    measured = json.loads(said.out)
    assert len(measured["models"]["small MLP"][report.PLAIN]) == 2
    assert measured["command"] == "python -m benchmarks.peers --rounds 2 --models 'small MLP'"
    assert 'pip install -e ".[bench]"' in said.err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["there/peers.json"]
    assert json.loads(Path("there/peers.json").read_text()) == measured

    assert peers.main(["--show", "there/peers.json", "--out", "there"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^small MLP  torch, all cores \*  +\d+\.\d{3}", table, re.MULTILINE)
    assert "not measured" in table


def test_a_contender_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def wrong(models: Sequence[str], rounds: int, command: str) -> Any:
        raise RuntimeError("JAX shard_map, CNN: wrong: loss 3, not 2")

    monkeypatch.setattr(compare, "measure", wrong)
    assert peers.main(["--out", str(tmp_path)]) == 1
    assert "wrong: loss 3, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "1"], "at least 2"),
        (["--models", "GPT"], "invalid choice"),
        (["--show", "nothing.json"], "--show nothing.json"),
        (["--profile", "CNN", "--json"], "has no --json"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        peers.main(arguments)
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""


def test_where_the_time_of_a_call_goes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    for name in ("CALLS", "TRACED"):
        monkeypatch.setattr(peers.stages, name, 2)
    assert peers.main(["--profile", "small MLP"]) == 0
    table = capfd.readouterr().out
    for who, name in (
        ("caller", "whole call"),
        ("caller", "fdp.scatter"),
        ("worker", "fdp.shard 0"),
        ("caller", "fdp.reduce"),
    ):
        assert re.search(rf"^{who}  {name} +\d+\.\d{{3}} +\d+\.\d{{3}} +100%$", table, re.MULTILINE), table
