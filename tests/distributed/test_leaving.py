"""Processes that end: without having closed the mesh, by an exception, or while an operation is underway."""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdp
from fdp.distributed import init, launch
from tests.distributed.pool import prepared

LIMIT = 60.0  # seconds after which a process is killed
FOREVER = 600.0  # that processes wait for each other: longer than anybody waits here


def exits(work: Callable[[], None], count: int = 2) -> list[int | None]:
    """How processes end that run a function, and then all that Python does at the end of a program."""
    context = prepared()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_program, args=(work, rank, count, port)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _program(work: Callable[[], None], rank: int, count: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status = 0
    try:
        work()
    except BaseException as error:
        status = 3 if isinstance(error, KeyboardInterrupt) else 1
    ctypes.pythonapi.Py_Exit(status)  # a child of multiprocessing would end without it


def total(_: None, x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def apply_total(mesh: Any) -> Any:
    return fdp.dp_apply(total, None, torch.ones(4), mesh, out_dims="sum")


def ten_steps() -> None:
    sys.setswitchinterval(0.2)  # other threads come late to the end of the program
    mesh = init(timeout=30)
    for _ in range(10):
        apply_total(mesh)


def gradient(mesh: Any) -> Any:
    return fdp.grad(lambda p, x: (p * x).sum(), devices=mesh)(torch.ones(4), torch.ones(2, 4))


def ten_gradient_steps() -> None:
    sys.setswitchinterval(0.2)
    mesh = init(timeout=30)
    for _ in range(10):
        gradient(mesh)


def forks() -> None:
    """What a fork does with the mesh is an error, and nothing to its parent."""
    with init(timeout=30) as mesh:
        gradient(mesh)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                for call in (apply_total, gradient, lambda mesh: init()):
                    with pytest.raises(RuntimeError, match="this process was forked"):
                        call(mesh)
                mesh.close()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        gradient(mesh)


@pytest.mark.parametrize("steps", [ten_steps, ten_gradient_steps])
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.deep)])
def test_a_program_that_does_not_close_the_mesh_ends_well(times: int, steps: Callable[[], None]):
    for _ in range(times):
        assert exits(steps) == [0, 0]


def test_a_fork_leaves_the_mesh_to_its_parent():
    assert exits(forks) == [0, 0]


def goes_on_after_an_interrupt() -> None:
    with init(timeout=30) as mesh:
        before = gradient(mesh)
        if mesh.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt, match=r"^$"):
                gradient(mesh)
        else:
            time.sleep(0.5)
            with contextlib.suppress(RuntimeError):  # process 0 may have sent its part
                gradient(mesh)
                gradient(mesh)
                raise AssertionError("it has not noticed")
        assert torch.equal(gradient(mesh), before)
        apply_total(mesh)


def test_the_call_after_an_interrupt_works():
    assert exits(goes_on_after_an_interrupt) == [0, 0]


def is_left_by_process_1() -> None:
    mesh = init(timeout=FOREVER)
    apply_total(mesh)
    if mesh.rank == 1:
        raise ValueError("outside of a call")
    with pytest.raises(RuntimeError, match="One has ended"):
        apply_total(mesh)


def is_left_in_a_gradient_step() -> None:
    mesh = init(timeout=FOREVER)
    for _ in range(3):
        gradient(mesh)
    if mesh.rank == 1:
        raise ValueError("outside of a call")
    with pytest.raises(RuntimeError, match=r"grad: process 0 could not reach all of the others .*ended"):
        gradient(mesh)


@pytest.mark.parametrize("left", [is_left_by_process_1, is_left_in_a_gradient_step])
def test_a_process_that_ends_is_missed_at_once_though_it_has_not_closed_the_mesh(left: Callable[[], None]):
    assert exits(left) == [0, 1]


def joins_nobody() -> None:
    if os.environ["RANK"] == "1":
        with pytest.raises(RuntimeError, match="init: process 1 of 2 did not meet the others"):
            init(timeout=1.0)


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.deep)])
def test_a_process_that_has_met_nobody_ends_well(times: int):
    for _ in range(times):
        assert exits(joins_nobody) == [0, 0]


def large_gradients(mesh: Any) -> Any:
    """Its gradients are sent one by one."""
    params = [torch.ones(400, 400), torch.ones(400, 400)]
    return fdp.grad(lambda p, x: (x @ p[0] @ p[1]).mean(), devices=mesh)(params, torch.ones(2, 400))


def is_interrupted(call: Callable[[Any], Any]) -> None:
    """Process 0 waits for process 1, which does not come before process 0 has ended."""
    with init(timeout=FOREVER) as mesh:
        own = torch.tensor([os.getpid() if mesh.rank == 0 else 0], dtype=torch.float64)
        first = int(fdp.dp_apply(total, None, own, mesh, out_dims="sum"))
        for _ in range(2):
            call(mesh)
        if mesh.rank == 0:
            threading.Timer(0.5, lambda: os.kill(first, signal.SIGINT)).start()
            call(mesh)
        while is_there(first):
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="One has ended"):
            call(mesh)


def is_there(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.mark.parametrize("call", [apply_total, gradient, large_gradients])
def test_an_interrupt_ends_a_process_that_waits_for_the_others(call: Callable[[Any], Any]):
    assert exits(functools.partial(is_interrupted, call)) == [3, 0]


def is_interrupted_while_it_leaves() -> None:
    destroy, patch = dist.destroy_process_group, pytest.MonkeyPatch()

    def interrupted() -> None:
        patch.setattr(dist, "destroy_process_group", destroy)
        raise KeyboardInterrupt

    mesh = init(timeout=FOREVER)
    gradient(mesh)
    patch.setattr(dist, "destroy_process_group", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        mesh.close()
    assert dist.is_initialized()
    if mesh.rank:  # the end of the program leaves it, too
        mesh.close()
        assert not dist.is_initialized()


def test_what_an_interrupt_has_not_left_is_left_later():
    assert exits(is_interrupted_while_it_leaves) == [0, 0]


def stops(folder: Path) -> None:
    with init(timeout=2.0) as mesh:
        apply_total(mesh)
        if mesh.rank == 2:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        with pytest.raises(RuntimeError, match="process 2 had not come") as caught:
            apply_total(mesh)
        (folder / str(mesh.rank)).write_text(str(caught.value))
    while mesh.rank == 0 and not (folder / "1").exists():
        time.sleep(0.01)
    if mesh.rank == 0:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)


def test_the_one_among_three_that_does_not_come_is_named(tmp_path: Path):
    launch(stops, 3, tmp_path, timeout=LIMIT, start_method="fork")
    for rank, other in ((0, 1), (1, 0)):
        message = (tmp_path / str(rank)).read_text()
        assert message.startswith(
            f"dp_apply: process {rank} could not reach all of the others ({other}, 2): process 2 had not come, process "
            f"{other} had. One has ended, or did not come within the 2 seconds of fdp.distributed.init(timeout=...)"
        )
