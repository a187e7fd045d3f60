"""`save(..., wait=False)`: what is saved is a copy, the file is written beside the program, and no failure is lost."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.distributed import Checkpoints, init, launch
from tests.common.programs import run_program
from tests.distributed.pool import Failure

FULL = "Checkpoints.save: of step 1, which was saved with wait=False, no file was written"


def test_what_is_saved_is_the_state_of_that_moment(tmp_path: Path):
    checkpoints, state = Checkpoints(tmp_path), {"w": torch.zeros(100_000), "n": [torch.zeros(()), 1]}
    for step in range(1, 4):
        state["w"].fill_(step)
        checkpoints.save(step, state, wait=False)
        state["w"].fill_(-1)
        assert torch.equal((checkpoints.restore() or (0, state))[1]["w"], torch.full((100_000,), float(step)))


def trees() -> list[Any]:
    x = torch.arange(12.0)
    with torch.inference_mode():
        inference = torch.ones(2, 3)
    return [
        {"a": x.view(3, 4), "b": [x.view(3, 4)]},
        {"a": x.view(4, 3), "b": [x.view(3, 4)]},
        {"a": x.view(4, 3).t(), "b": [x.view(3, 4).double()]},
        {"a": x.view(3, 4)[:, 1:3], "b": [torch.zeros(0, 3), x[0]]},
        [inference, torch.view_as_complex(x.view(6, 2)).conj(), x.view(3, 4).to_sparse()],
        [inference + 1, torch.view_as_complex(x.view(6, 2)), x.view(3, 4).to_sparse(), x.requires_grad_()],
        7,
        [],
    ]


def test_a_state_may_change_its_structure_between_saves(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    for wait in (False, True):
        for step, tree in enumerate(trees()):
            checkpoints.save(step, tree, wait=wait)
            found, restored = checkpoints.restore() or (-1, None)
            assert found == step
            torch.testing.assert_close(restored, tree, rtol=0, atol=0)
    checkpoints.save(9, {"a": torch.ones(2)}, wait=False)
    with pytest.raises(ValueError, match=r"the checkpoint has tree\['a'\] where like has tree\['b'\]"):
        checkpoints.restore(like={"b": torch.ones(2)})


def test_tensors_that_share_memory_are_restored_without_ties(tmp_path: Path):
    w = torch.ones(3)
    for wait in (True, False):
        Checkpoints(tmp_path).save(1, [w, w, w.view(3), w[:2]], wait=wait)
        _, (first, *others) = Checkpoints(tmp_path).restore() or (0, [w])
        first.zero_()
        assert [x.tolist() for x in others] == [[1.0] * 3, [1.0] * 3, [1.0] * 2]


@pytest.mark.parametrize("next_call", ["save", "restore", "wait"])
def test_a_failure_is_raised_once_by_the_next_call(tmp_path: Path, next_call: str):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, 1)
    (tmp_path / "checkpoint.partial").mkdir()  # nobody can remove it, so nothing can be written
    checkpoints.save(2, 2, wait=False)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoints.save(3, 3),
        "restore": Checkpoints(tmp_path).restore,  # another object, of the same directory
        "wait": checkpoints.wait,
    }
    with pytest.raises(OSError, match=r"checkpoint\.partial") as caught:
        calls[next_call]()
    assert caught.value.__notes__ == [
        "Checkpoints.save: of step 2, which was saved with wait=False, no file was written",
        f"Checkpoints.{next_call}: in {tmp_path}",
    ]
    assert checkpoints.restore() == (1, 1)
    (tmp_path / "checkpoint.partial").rmdir()
    checkpoints.save(4, 4, wait=False)
    assert checkpoints.restore() == (4, 4)


def test_a_change_of_the_current_folder_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    checkpoints = Checkpoints("run")
    checkpoints.save(1, 1, wait=False)
    monkeypatch.chdir(tmp_path / "b")
    assert checkpoints.restore() == (1, 1)


PROGRAM = """
import multiprocessing, resource, sys, torch
from fdp.distributed import Checkpoints

def work():
    {limit}
    Checkpoints({directory!r}).save(1, [torch.ones(300_000), 5], wait=False)

{run}
"""
HERE, CHILD = (
    "work()",
    """
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
""",
)
LIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"


@pytest.mark.parametrize("run", [HERE, CHILD], ids=["a program", "a process of multiprocessing"])
def test_the_end_of_a_program_waits(tmp_path: Path, run: str):
    ended = run_program(PROGRAM.format(limit="", directory=str(tmp_path), run=run))
    assert (ended.returncode, ended.stderr) == (0, "")
    found = Checkpoints(tmp_path).restore()
    assert found is not None
    assert found[1][1] == 5


@pytest.mark.parametrize("run", [HERE, CHILD], ids=["a program", "a process of multiprocessing"])
def test_a_failure_that_nobody_has_waited_for_is_said_at_once(tmp_path: Path, run: str):
    ended = run_program(PROGRAM.format(limit=LIMITED, directory=str(tmp_path), run=run))
    assert ended.stderr.count("OSError: [Errno 27] File too large. Make room, or save to another directory") == 1
    assert ended.stderr.rstrip().endswith(FULL)
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import os, random, signal, sys, threading, torch
from fdp.distributed import Checkpoints

signal.signal(signal.SIGINT, signal.default_int_handler)
checkpoints, state = Checkpoints({directory!r}), [torch.zeros(50_000), 0]
threading.Timer(random.Random({seed}).uniform(0.02, 0.2), os.kill, (os.getpid(), signal.SIGINT)).start()
for step in range(10**6):
    checkpoints.save(step, [torch.full((50_000,), float(step)), step], wait=step % 3 == 0)
    if step % 5 == 0:
        checkpoints.restore()
"""


def test_an_interrupt_ends_a_program_that_saves_and_restores(tmp_path: Path):
    for seed in range(4):
        ended = run_program(INTERRUPTED.format(directory=str(tmp_path), seed=seed), timeout=30)
        assert ended.returncode in (1, -signal.SIGINT)
        assert ended.stderr.count("Traceback") == 1
        assert ended.stderr.rstrip().splitlines()[-1].startswith(("KeyboardInterrupt", "Checkpoints."))
        found = Checkpoints(tmp_path).restore()
        assert found is None or found[1][0].eq(found[0]).all()


def meets_a_failure(mesh: Any, directory: Path, next_call: str) -> tuple[str, Any]:
    checkpoints = Checkpoints(directory, mesh=mesh)
    checkpoints.save(1, 1)
    if mesh.rank == 0:
        (directory / "checkpoint.partial").mkdir()
    checkpoints.save(2, 2, wait=False)
    try:
        {"save": lambda: checkpoints.save(3, 3), "wait": checkpoints.wait, "restore": checkpoints.restore}[next_call]()
    except Exception as error:
        return f"{type(error).__name__}: {error}", checkpoints.restore()
    return "nothing", None


@pytest.mark.parametrize("next_call", ["save", "restore", "wait"])
def test_all_processes_learn_of_a_failure_in_the_next_call(two: Any, tmp_path: Path, next_call: str):
    first, second = two(meets_a_failure, 1, tmp_path, next_call)
    assert first[0].startswith("IsADirectoryError: ")
    assert f"Checkpoints.{next_call} in process 1 fails: process 0 has raised IsADirectoryError: " in second[0]
    assert first[1] == second[1] == (1, 1)


def goes_on(mesh: Any, directory: Path) -> tuple[Any, Any]:
    checkpoints = Checkpoints(directory, mesh=mesh)
    state = {
        "w": torch.full((70_000,), float(mesh.rank)),
        "t": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.ones(0),
    }
    checkpoints.save(1, [state, torch.eye(2).to_sparse(), "text"], wait=False)
    state["w"].fill_(9)
    step, (state, sparse, text) = checkpoints.restore() or (0, (state, state, ""))
    strides = [x.stride() for x in state.values()]
    return (step, text, state["w"].sum().item(), state["t"].tolist(), strides), sparse.to_dense().tolist()


def test_all_processes_have_the_state_of_process_0(two: Any, tmp_path: Path):
    first, second = two(goes_on, 1, tmp_path)
    assert first == second
    assert first[0] == (1, "text", 0.0, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [(1,), (1, 3), (1,)])
    assert first[1] == [[1.0, 0.0], [0.0, 1.0]]


def expects_another(mesh: Any, directory: Path) -> Any:
    checkpoints = Checkpoints(directory, mesh=mesh)
    checkpoints.save(1, {"w": torch.ones(3)})
    return checkpoints.restore(like={"w": torch.ones(3 + mesh.rank)})


def test_a_process_that_expects_another_tree_fails_in_all(two: Any, tmp_path: Path):
    first, second = two.outcomes(expects_another, 1, tmp_path)
    assert isinstance(first, Failure)
    assert isinstance(second, Failure)
    assert (first.kind, second.kind) == ("RuntimeError", "ValueError")
    assert (
        "process 1 has raised ValueError: Checkpoints.restore: in the checkpoint tree['w'] is a tensor of shape (3,)"
        in (first.message)
    )
    step, *_ = two(goes_on, 1, tmp_path / "next")[0][0]
    assert step == 1  # they are in step


def saves_for_ever(directory: Path, who: int, seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with init(timeout=600) as mesh:
        checkpoints = Checkpoints(directory, mesh=mesh)
        if mesh.rank == who:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        for step in range(10**6):
            checkpoints.save(step, [torch.full((50_000,), float(step)), step], wait=step % 2 == 0)
            if step % 3 == 0:
                checkpoints.restore()


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_of_one_process_ends_all(tmp_path: Path, who: int):
    for seconds in (0.1, 0.17):
        # Whose error comes first, and whether both come before the launcher ends them, is a matter of milliseconds.
        with pytest.raises(
            RuntimeError, match=r"^launch: rank \d raised (KeyboardInterrupt|RuntimeError: (the end of )?Checkpoints)"
        ):
            launch(saves_for_ever, 2, tmp_path, who, seconds, timeout=60, start_method="fork")
        found = Checkpoints(tmp_path).restore()
        assert found is None or found[1][0].eq(found[0]).all()
