"""What a process of `launch` does, and what it leaves behind in a folder: what it returned, or how it failed."""

import ctypes
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, final

import torch

from fdp._trees.tracebacks import text_of

_STREAMS = ((1, "stdout"), (2, "stderr"))
_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 0.3  # seconds for which a failed rank stays, so that ranks that fail because of it can say so too


def run_rank(work: Any, folder: Path, environment: Mapping[str, str]) -> None:
    """Call the function in this process."""
    os.environ.update(environment)
    rank = os.environ["RANK"]
    _settle(folder, rank)
    try:
        fn, args = pickle.loads(work) if isinstance(work, bytes) else work
        value = _call(fn, args)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()  # torch would wait for it later, where no time limit holds
        _flush()
        _leave(folder / f"value-{rank}", _packed(value))
    except BaseException as error:
        _flush()
        _leave(folder / f"error-{rank}", pickle.dumps(_described(error)))
        time.sleep(_LAST_WORDS)
        sys.exit(1)


def _settle(folder: Path, rank: str) -> None:
    """Undo what a fork has inherited, and be ready to be ended at any time."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)  # a handler in Python would wait for the C code that the rank is stuck in
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed leaves nothing behind
    sys.stdout, sys.stderr = (_stream(descriptor, folder / f"{name}-{rank}") for descriptor, name in _STREAMS)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    # As torchrun does. In a fork it is more than that: libgomp waits for threads that the child does not have.
    torch.set_num_threads(1)


def _stream(descriptor: int, path: Path) -> TextIO:
    """What is written to the descriptor, also by C code, goes to a file."""
    with path.open("ab") as file:
        os.dup2(file.fileno(), descriptor)
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed: a process of multiprocessing ends without it


def _call(fn: Any, args: Any) -> Any:
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _packed(value: Any) -> bytes:
    # Not through torch's queues: memory that a rank shares is gone with the rank.
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        raise TypeError(f"the result cannot be pickled: {text_of(error)}") from error
    return file.getvalue()


def _described(error: BaseException) -> tuple[float, str, str, bytes | None]:
    """When, what, where, and the exception itself if it survives pickling."""
    when, what = time.time(), f"{type(error).__name__}: {text_of(error)}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return when, what, lines, pickled


def _leave(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


@final
class Output:
    """What ranks have written, shown line by line behind their numbers."""

    def __init__(self, folder: Path, nprocs: int) -> None:
        files = [(rank, name, folder / f"{name}-{rank}") for rank in range(nprocs) for _, name in _STREAMS]
        self._shown = dict.fromkeys(files, 0)

    def show(self, *, rest: bool = False) -> None:
        """Print what is new, whole lines only unless it is the `rest`."""
        for (rank, name, path), start in self._shown.items():
            if not path.exists() or path.stat().st_size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            data = data if rest else data[: data.rfind(b"\n") + 1]
            self._shown[rank, name, path] = start + len(data)
            for line in data.decode(errors="replace").splitlines():
                print(f"[rank {rank}] {line}", file=getattr(sys, name))


def has_returned(folder: Path, rank: int) -> bool:
    """Whether the function has returned there."""
    return (folder / f"value-{rank}").exists()


def returned(folder: Path, rank: int) -> Any:
    """What it has returned there."""
    data = io.BytesIO((folder / f"value-{rank}").read_bytes())
    return torch.load(data, map_location="cpu", weights_only=False)  # it comes from our own process


def failure(folder: Path, nprocs: int, codes: Mapping[int, int]) -> RuntimeError:
    """The error for the caller: that of the rank that failed first, and what the others said of it."""
    found = [(rank, folder / f"error-{rank}") for rank in range(nprocs)]
    said: list[tuple[float, str, str, bytes | None, int]]
    said = sorted((*pickle.loads(path.read_bytes()), rank) for rank, path in found if path.exists())
    if not said:
        return RuntimeError(f"launch: {_unsaid(folder, nprocs, codes)}")
    silent = codes.keys() - {rank for *_, rank in said}
    ended = [f"rank {rank} has ended by {_how(codes[rank])}" for rank in sorted(silent)]  # which others then miss
    summary = "; then ".join(ended + [f"rank {rank} raised {what}" for _, what, _, _, rank in said])
    traces = "\n".join(f"In rank {rank} of {nprocs}:\n{lines}" for _, _, lines, _, rank in said)
    error = RuntimeError(f"launch: {summary}\n\n{traces.rstrip()}")
    pickled = said[0][3]
    error.__cause__ = None if pickled is None else pickle.loads(pickled)
    return error


def _how(code: int) -> str:
    if code == 0:
        return "itself without returning (os._exit?)"
    if code > 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}  # the real-time ones between have none
    return names.get(-code, f"signal {-code}")


def _unsaid(folder: Path, nprocs: int, codes: Mapping[int, int]) -> str:
    """About ranks that have ended in some other way than by an exception."""
    texts = []
    for rank, code in codes.items():
        how = _how(code)
        path = folder / f"stderr-{rank}"
        if not path.exists():
            how += " before it had begun: does the program's main module need `if __name__ == '__main__':`?"
        lines = path.read_text(errors="replace").splitlines()[-20:] if path.exists() else []
        texts.append("\n".join([f"rank {rank} of {nprocs} has ended by {how}", *lines]))
    return "\n".join(texts)
