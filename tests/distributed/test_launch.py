import itertools
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdp.distributed import launch


def _rank():
    return int(os.environ["RANK"])


def _joined():
    dist.init_process_group("gloo")


def test_ranks_join_print_and_return_in_order(capfd):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    offset = 10  # seen through the closure

    def work(scale):
        _joined()
        total = torch.tensor([_rank() + 1.0], requires_grad=True) * scale
        dist.all_reduce(total.detach(), group=None)
        print("out", _rank())
        print("err", _rank(), file=sys.stderr)
        os.write(1, b"raw\n")
        dist.destroy_process_group()
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MORE")
        return total, offset + _rank(), [os.environ[name] for name in names], torch.get_num_threads(), b"x" * 2**20

    found = launch(work, 3, 2.0, env={"MORE": "yes"}, timeout=60, start_method="fork")
    assert [total.item() for total, *_ in found] == [12.0] * 3
    assert [(number, threads, len(blob)) for _, number, _, threads, blob in found] == [
        (10 + rank, 1, 2**20) for rank in range(3)
    ]
    assert [names for _, _, names, *_ in found] == [[str(rank), "3", "3", "127.0.0.1", "yes"] for rank in range(3)]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"[rank {rank}] {text}" for rank in range(3) for text in (f"out {rank}", "raw")
    )
    assert sorted(err.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]
    assert before == (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert not children()


def children() -> list[Any]:
    """The processes of this one, but for those that other tests keep."""
    return [child for child in multiprocessing.active_children() if not child.name.startswith("ForkServer")]


def test_an_exception_arrives_with_rank_and_traceback_and_ends_the_others():
    def work():
        _joined()
        if _rank() == 1:
            raise KeyError("this one")
        dist.barrier() if _rank() == 0 else time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"launch: rank 1 raised KeyError: 'this one'") as caught:
        launch(work, 3, start_method="fork")
    assert "In rank 1 of 3:\nTraceback" in str(caught.value)
    assert 'raise KeyError("this one")' in str(caught.value)
    assert "_rank.py" not in str(caught.value)
    assert time.monotonic() - start < 20
    assert not children()


class _Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: os._exit(0) if _rank() == 0 else time.sleep(60), "rank 0 of 2 has ended by itself without returning"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL) if _rank() == 1 else 1, "rank 1 of 2 has ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), 40) if _rank() == 1 else 1, "rank 1 of 2 has ended by signal 40"),
        (lambda: sys.exit(3) if _rank() == 1 else time.sleep(60), "rank 1 raised SystemExit: 3"),
        (
            lambda: (lambda: 1) if _rank() == 1 else time.sleep(60),
            "rank 1 raised TypeError: the result cannot be pickled",
        ),
        (lambda: torch.ones(2)[5] if _rank() == 0 else 1, "rank 0 raised IndexError: index 5"),
    ],
)
def test_other_ways_to_end(work, message):
    with pytest.raises(RuntimeError, match=f"launch: {message}"):
        launch(work, 2, start_method="fork")
    assert not children()


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_rank_that_is_ended_by_a_signal_comes_before_those_that_miss_it(name):
    def work():
        if _rank() == 0:
            raise RuntimeError("the other is not there")
        folder = Path(os.readlink("/proc/self/fd/1")).parent
        while not (folder / "error-0").exists():  # it stays for a moment after it has said that
            time.sleep(0.001)
        os.kill(os.getpid(), signal.Signals[name])

    message = rf"launch: rank 1 of 2 has ended by {name}; then rank 0 raised RuntimeError: the other is not there\n"
    with pytest.raises(RuntimeError, match=message):
        launch(work, 2, start_method="fork")
    assert not children()


def test_an_exception_that_cannot_be_pickled_and_an_exit_without_an_error():
    def work():
        if _rank() == 0:
            sys.exit()
        raise _Unpicklable(1, 2)

    with pytest.raises(RuntimeError, match="rank 1 raised _Unpicklable: 1 and 2"):
        launch(work, 2, start_method="fork")
    assert launch(sys.exit, 1, start_method="fork") == [None]


def test_a_function_may_close_its_streams():
    def work():
        print("before")
        sys.stdout.close() if _rank() == 0 else setattr(sys, "stdout", None)
        return _rank()

    assert launch(work, 2, start_method="fork") == [0, 1]


def test_a_time_limit_names_the_late_ranks_and_shows_where_they_are(capfd):
    def deep_in_it():
        time.sleep(60)

    with pytest.raises(RuntimeError, match=r"launch: rank 1, 2 of 3 had not returned after 0\.3 s"):
        launch(lambda: deep_in_it() if _rank() else 5, 3, timeout=0.3, start_method="fork")
    assert "in deep_in_it" in capfd.readouterr().err
    assert not children()


def test_an_interrupt_ends_all():
    timer = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        launch(time.sleep, 2, 60, start_method="fork")
    timer.join()
    assert not children()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupt_while_ranks_are_started_ends_all(method):
    """Another thread takes the signal, as any may that torch has started."""

    def interrupt():
        while not children():
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            launch(time.sleep, 6, 60, start_method=method)
        assert not children()
    finally:
        timer.join()
        for child in children():  # or they are waited for at the end
            child.kill()
    assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_ranks_that_cannot_all_be_started_are_ended():
    forks = itertools.count(1)

    def refuse(event, args):
        if event == "os.fork" and refuses and next(forks) > 3:
            raise OSError("no more")

    refuses = True
    sys.addaudithook(refuse)  # for ever: there is no way to remove one
    try:
        with pytest.raises(OSError, match="no more"):
            launch(time.sleep, 6, 60, start_method="fork")
        assert not children()
    finally:
        refuses = False
        for child in children():
            child.kill()


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path):
    folder, seen = tmp_path / "folder", tmp_path / "seen"
    folder.mkdir()
    seen.mkdir()

    def inner():
        (seen / str(os.getpid())).touch()
        time.sleep(60)

    def outer():
        tempfile.tempdir = str(folder)  # nobody is left to remove it
        killer = threading.Thread(target=kill_when_both_run, daemon=True)
        killer.start()
        launch(inner, 2, start_method="fork")

    def kill_when_both_run():
        while len(list(seen.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="rank 0 of 1 has ended by SIGKILL"):
        launch(outer, 1, timeout=30, start_method="fork")
    pids = [int(path.name) for path in seen.iterdir()]
    end = time.monotonic() + 5
    while any(map(_is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(_is_running, pids))


def test_a_function_that_can_be_imported_can_be_spawned():
    assert launch(math.hypot, 1, 3.0, 4.0, start_method="spawn") == [5.0]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"launch: fn must be a function, got int: launch\(fn, nprocs, \*args\)"):
        launch(2, math.hypot)  # pyright: ignore[reportArgumentType]
    for bad in (True, "2", 2.0, None):
        with pytest.raises(TypeError, match="launch: nprocs must be an int"):
            launch(math.hypot, bad)  # pyright: ignore[reportArgumentType]
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"launch: nprocs must be at least 1, got {bad}"):
            launch(math.hypot, bad)
    for bad in (0, -1.0, True, "5", math.nan):
        with pytest.raises(ValueError, match="launch: timeout must be a positive number of seconds or None"):
            launch(math.hypot, 1, timeout=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="launch: start_method must be 'auto', 'fork' or 'spawn', got 'thread'"):
        launch(math.hypot, 1, start_method="thread")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"launch: cannot spawn .*<lambda>.*: .*top level of a file"):
        launch(lambda: 1, 1, start_method="spawn")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_no_fork_once_gradients_have_threads():
    """Torch starts them where it knows an accelerator, and then takes no gradients in a fork."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text("pt_autograd_0")
        with pytest.raises(ValueError, match="cannot fork, as torch has threads for gradients in this process"):
            launch(math.hypot, 1, 3.0, 4.0, start_method="fork")
        with pytest.raises(ValueError, match=r"cannot fork, as torch has threads.* or taken a gradient"):
            launch(lambda: 1, 1)
    finally:
        end.set()
        thread.join()


def test_no_fork_inside_a_process_group():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="cannot fork, as this process is in a process group"):
            launch(math.hypot, 1, 3.0, 4.0, start_method="fork")
        with pytest.raises(ValueError, match=r"launch: cannot spawn .*and cannot fork"):
            launch(lambda: 1, 1)
    finally:
        dist.destroy_process_group()


def test_to_ask_for_accelerators_leaves_cuda_usable_in_a_fork(monkeypatch):
    """Without the variable, CUDA initialises its driver, and refuses to work in what is forked later."""
    name, seen, ask = "PYTORCH_NVML_BASED_CUDA_CHECK", [], torch.accelerator.current_accelerator
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **how: (seen.append(os.environ.get(name)), ask(**how))[1]
    )
    for before in ("0", None):
        monkeypatch.setenv(name, before) if before else monkeypatch.delenv(name)
        assert launch(os.environ.get, 1, name, start_method="fork") == [before]
    assert seen == ["1", "1"]
