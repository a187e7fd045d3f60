"""What a process of `launch` does, and what it leaves behind in a folder: what it returned, or how it failed."""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
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
        _keep(_call(fn, args), folder / f"value-{rank}")
    except BaseException as error:
        lines = "".join(traceback.format_exception(type(error), error, _own(error.__traceback__)))
        partial = folder / f"partial-{rank}"
        partial.write_bytes(pickle.dumps((f"{type(error).__name__}: {text_of(error)}", lines)))
        partial.replace(folder / f"error-{rank}")
        time.sleep(_LAST_WORDS)
        sys.exit(1)
    finally:
        ctypes.CDLL(None).fflush(None)  # what C code has printed: a process of multiprocessing ends without it


def _settle(folder: Path, rank: str) -> None:
    """Undo what a fork has inherited, and be ready to be ended at any time."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)  # a handler in Python would wait for the C code that the rank is stuck in
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


def _call(fn: Any, args: Any) -> Any:
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _keep(value: Any, path: Path) -> None:
    # Not through torch's queues: memory that a rank shares is gone with the rank.
    try:
        torch.save(value, path)
    except Exception as error:
        path.unlink(missing_ok=True)
        raise TypeError(f"the result cannot be pickled: {text_of(error)}") from error


def _own(trace: Any) -> Any:
    """Without what is ours."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found or trace


@final
class Output:
    """What ranks have written, shown line by line behind their numbers."""

    def __init__(self, folder: Path, nprocs: int) -> None:
        files = [(rank, name, folder / f"{name}-{rank}") for rank in range(nprocs) for _, name in _STREAMS]
        self._files = [(rank, name, path.open("wb+")) for rank, name, path in files]

    def show(self, *, rest: bool = False) -> None:
        """Print what is new, whole lines only unless it is the `rest`."""
        for rank, name, file in self._files:
            for line in file:
                if not line.endswith(b"\n") and not rest:
                    file.seek(-len(line), os.SEEK_CUR)
                    break
                print(f"[rank {rank}] {line.decode(errors='replace').rstrip(chr(10))}", file=getattr(sys, name))
            if rest:
                file.close()


def failed(ranks: Sequence[Any], folder: Path) -> dict[int, int]:
    """Which have ended without having returned, or not well, and their exit codes."""
    codes = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode is not None}
    return {rank: code for rank, code in codes.items() if code or not (folder / f"value-{rank}").exists()}


def returned(folder: Path, rank: int) -> Any:
    """What the function has returned there."""
    # It comes from our own process.
    return torch.load(folder / f"value-{rank}", map_location="cpu", weights_only=False)


def failure(folder: Path, nprocs: int, codes: Mapping[int, int]) -> RuntimeError:
    """The error for the caller: what ended, then what ranks have raised, the first before the others."""
    paths = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    said = [(path.name.removeprefix("error-"), *pickle.loads(path.read_bytes())) for path in paths]
    silent = codes.keys() - {int(rank) for rank, *_ in said}
    each = [f"rank {rank} of {nprocs} has ended by {_how(codes[rank])}" for rank in sorted(silent)]
    each += [f"rank {rank} raised {what}" for rank, what, _ in said]
    traces = [f"In rank {rank} of {nprocs}:\n{lines.rstrip()}" for rank, _, lines in said]
    return RuntimeError("\n".join([f"launch: {'; then '.join(each)}", *([""] if traces else []), *traces]))


def _how(code: int) -> str:
    if code == 0:
        return "itself without returning (os._exit?)"
    if code > 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}  # the real-time ones between have none
    return names.get(-code, f"signal {-code}")
