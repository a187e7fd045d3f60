"""A function in several new processes of this machine, with the environment that torchrun would give them."""

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fdp._trees.tracebacks import text_of
from fdp.distributed._rank import Output, failed, failure, returned, run_rank

StartMethod = Literal["auto", "fork", "spawn"]
_PERIOD = 0.02  # seconds between two looks at the processes


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    /,
    *args: Any,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    start_method: StartMethod = "auto",
) -> list[Any]:
    """Run `fn(*args)` in several new processes of this machine, as torchrun would, and return what each returns.

    For notebooks and tests; programs are started by torchrun. In `fn`, `fdp.distributed.init()` joins the processes.

    >>> import fdp, math
    >>> fdp.distributed.launch(math.hypot, 2, 3.0, 4.0)
    [5.0, 5.0]

    `"fork"` starts at once, and takes any function: a lambda, or one of a notebook. No accelerator may have been used
    before, where there is one no gradient taken, and no process group be open. A forked rank computes with one thread,
    as under torchrun, and must keep to it: `torch.set_num_threads(2)` hangs there once this process has computed with
    two. Nothing else should be running in this process meanwhile. `"spawn"` has no such limits, but imports torch and
    the program's main module again (which needs `if __name__ == "__main__":`), and `fn` and `args` must be importable
    and picklable. `"auto"` forks if there is no accelerator. Otherwise it spawns what can be spawned and forks what
    cannot, if that is safe.

    Args:
        fn: Any function. What it prints is shown line by line, as `[rank 1] ...`.
        nprocs: How many processes.
        args: Its arguments; each process has its own copies.
        timeout: Seconds after which all are ended. By default there is no limit.
        env: More environment variables for all processes.
        start_method: `"fork"`, `"spawn"` or `"auto"`.

    Returns:
        What each process returned, by rank, pickled on the way; tensors arrive on the CPU.

    Raises:
        ValueError, TypeError: A bad argument; `fn` can be neither spawned nor forked.
        RuntimeError: A rank failed, with its traceback, or some had not returned in time. All processes have ended.
    """
    _check(fn, nprocs, timeout, start_method)
    method, work = _plan(fn, args, start_method)
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory(prefix="fdp-launch-") as name, _store() as port:
        folder = Path(name)
        output = Output(folder, nprocs)
        ranks: list[Any] = []
        try:
            with _uninterrupted(), warnings.catch_warnings():  # or some would be started that nobody knows of
                warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
                for rank in range(nprocs):
                    args = work, folder, _environment(rank, nprocs, port, env)
                    ranks.append(context.Process(target=run_rank, args=args))
                    ranks[-1].start()
            _wait(ranks, folder, output, timeout)
        finally:
            with _uninterrupted():
                for process in ranks:
                    if process.pid is not None:
                        process.kill()
                        process.join()
                output.show(rest=True)
        return [returned(folder, rank) for rank in range(nprocs)]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end, when whoever handles it is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    # Blocking is not enough: any other thread takes the signal, and Python raises in the main one all the same.
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _wait(ranks: Sequence[Any], folder: Path, output: Output, timeout: float | None) -> None:
    """Until all have returned and ended, or one has failed."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    while late := [rank for rank, process in enumerate(ranks) if process.exitcode is None]:
        wait([ranks[rank].sentinel for rank in late], _PERIOD)
        output.show()
        if failed(ranks, folder):
            break
        if time.monotonic() > end:
            for rank in late:
                os.kill(ranks[rank].pid, signal.SIGUSR1)  # say where you are: see `run_rank`
            time.sleep(10 * _PERIOD)
            raise RuntimeError(
                f"launch: rank {', '.join(map(str, late))} of {len(ranks)} had not returned after "
                f"{timeout:g} s. All have been ended; where they were is in their output"
            )
    if codes := failed(ranks, folder):
        raise failure(folder, len(ranks), codes)


def _check(fn: Any, nprocs: Any, timeout: Any, start_method: Any) -> None:
    if sys.platform == "win32":
        raise RuntimeError("launch: not on Windows; start the program by torchrun")
    if not callable(fn):
        raise TypeError(f"launch: fn must be a function, got {type(fn).__name__}: launch(fn, nprocs, *args)")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"launch: nprocs must be an int, got {nprocs!r}: launch(fn, nprocs, *args)")
    if nprocs < 1:
        raise ValueError(f"launch: nprocs must be at least 1, got {nprocs}")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise ValueError(f"launch: timeout must be a positive number of seconds or None, got {timeout!r}")
    if start_method not in ("auto", "fork", "spawn"):
        raise ValueError(f"launch: start_method must be 'auto', 'fork' or 'spawn', got {start_method!r}")


def _plan(fn: Any, args: tuple[Any, ...], asked: StartMethod) -> tuple[str, Any]:
    """How to start, and what to hand over: pickled where it is spawned, so that ranks share no memory either way."""
    accelerator = _accelerator()
    hindrance = _no_fork(accelerator)
    if asked == "fork" or (asked == "auto" and hindrance is None and accelerator is None):
        if hindrance is not None:
            raise ValueError(f"launch: cannot fork, as {hindrance}. Use start_method='spawn'")
        return "fork", (fn, args)
    try:
        main: Any = sys.modules.get("__main__")
        if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
            raise pickle.PicklingError("it is defined interactively")
        return "spawn", pickle.dumps((fn, args))
    except Exception as error:
        if asked == "auto" and hindrance is None:
            return "fork", (fn, args)
        what = getattr(fn, "__qualname__", repr(fn))
        why = f", and cannot fork, as {hindrance}" if hindrance and asked == "auto" else ""
        raise ValueError(
            f"launch: cannot spawn {what}: {text_of(error)}{why}. Define the function at the top level of a file and "
            "import it, or launch before anything has used an accelerator or taken a gradient (in a notebook: restart "
            "the kernel)"
        ) from error


def _accelerator() -> torch.device | None:
    """That of this machine. To ask CUDA itself would leave it unusable in what is forked afterwards."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.accelerator.current_accelerator(check_available=True)
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def _no_fork(accelerator: torch.device | None) -> str | None:
    """Why this process must not be forked, if so."""
    if sys.platform != "linux":
        return f"that is not safe on {sys.platform}"
    if dist.is_initialized():
        return "this process is in a process group"
    # What an initialised runtime holds does not survive: "Cannot re-initialize CUDA in forked subprocess".
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        return f"{accelerator.type} has been used in this process"
    if any(name.read_text().startswith("pt_autograd") for name in Path("/proc/self/task").glob("*/comm")):
        return "torch has threads for gradients in this process"  # where it knows an accelerator, from the first on
    return None


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The place where the ranks meet. This process has it, so that its port is free: nobody has to guess one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        # By itself a TCPStore would listen to the whole network.
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    yield port
    del store


def _environment(rank: int, nprocs: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), nprocs)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    run = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "launch"}
    name = None if "GLOO_SOCKET_IFNAME" in os.environ else {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    lo = {} if name is None else {"GLOO_SOCKET_IFNAME": name}
    return {name: str(value) for name, value in {**own, **sizes, **meeting, **run, **lo, **(env or {})}.items()}
