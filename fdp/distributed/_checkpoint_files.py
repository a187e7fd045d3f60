"""Files that are whole or not there, in the order in which they were written.

Tensors are read into memory of their own, and not mapped: who cuts a mapped file short ends the process that looks at
it, and what is written to one later shows in the tensors, long after its digest has been compared.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

_NAME = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{16})\.pt")
_PARTIAL = "checkpoint.partial"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_OLD = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_PIECE = 2**20  # bytes that are written and hashed at once: between two pieces Ctrl-C is heard


class _FileEntry(NamedTuple):
    """A file by its name. The number counts what was written: steps may go backwards, and repeat."""

    number: int
    step: int
    digest: str
    path: Path


@final
class CheckpointFiles:
    """The files of a directory, of which the last `keep` that are whole stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep
        self._whole: dict[Path, tuple[int, ...]] = {}  # those whose digest is known to fit, and as what

    def write(self, step: int, state: Any) -> None:
        """Add a file, and remove the oldest."""
        self.directory.mkdir(parents=True, exist_ok=True)
        entries = self._entries()
        number = 1 + max((entry.number for entry in entries), default=0)
        partial = self.directory / _PARTIAL
        partial.unlink(missing_ok=True)  # what a killed run has left
        try:
            with open(partial, "wb", buffering=0, opener=lambda path, _: os.open(path, _NEW, 0o600)) as file:
                digest = _fill(file, state, partial)
            # The digest is in the name, as torch.hub has it: the file stays one that torch.load reads.
            path = self.directory / f"{number:06}-step-{step}-{digest}.pt"
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        _sync(self.directory)
        self._whole[path] = _as_it_is(os.lstat(path))
        self._remove(entries)

    def newest(self) -> Any:
        """What the last file that is whole holds; None if there is no file at all. Nothing in it can run code."""
        entries = self._entries()
        for entry in entries:
            with _opened(entry.path) as file:
                if file is not None and _digest(file) == entry.digest:
                    file.seek(0)
                    return torch.load(file, map_location="cpu", weights_only=True)
            warnings.warn(f"Checkpoints: {entry.path} is damaged or cut short: trying the one before", stacklevel=3)
        if entries:
            raise RuntimeError(
                f"Checkpoints: none of the {len(entries)} files in {self.directory} is whole. To begin anew, remove "
                "them"
            )
        return None

    def _remove(self, entries: list[_FileEntry]) -> None:
        """Of the older files all that are not needed; damaged ones do not count."""
        if len(entries) < self._keep:
            return
        older = self._keep - 1
        for entry in entries:
            if older == 0:
                entry.path.unlink(missing_ok=True)
                self._whole.pop(entry.path, None)
            else:
                older -= self._is_whole(entry)

    def _is_whole(self, entry: _FileEntry) -> bool:
        with _opened(entry.path) as file:
            if file is None:
                return False
            now = _as_it_is(os.fstat(file.fileno()))
            if self._whole.get(entry.path) == now:
                return True
            if _digest(file) != entry.digest:
                return False
        self._whole[entry.path] = now
        return True

    def _entries(self) -> list[_FileEntry]:
        """The newest first."""
        if not self.directory.exists():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir() if not path.is_dir()]
        entries = [_FileEntry(int(match[1]), int(match[2]), match[3], path) for match, path in found if match]
        return sorted(entries, reverse=True)


@final
class _Sink:
    """Where torch writes to: it hashes what comes.

    torch hides an exception of its file behind one of its own. So an OSError is kept here, and the bytes that come
    after it are counted only: then it is known how many would have been needed.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = self.written = 0
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        """All of it."""
        self.size += len(data)
        start = 0
        try:
            while start < len(data) and self.error is None:
                piece = data[start : start + _PIECE]
                count = self._file.write(piece)
                self.digest.update(piece[:count])
                start += count
                self.written += count
        except BaseException as error:
            self.error = error
            if not isinstance(error, OSError):
                raise
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""


def _fill(file: FileIO, state: Any, path: Path) -> str:
    """Bring a state to the disk; the digest of the file."""
    sink, around = _Sink(file), sys.exception()
    try:
        torch.save(state, sink)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        first = sink.error or error.__context__  # Ctrl-C may come before or after the lines that keep it
        raise error if first is None or first is around else first from None
    try:
        if sink.error is not None:
            raise sink.error
        os.fsync(file.fileno())
    except OSError as error:
        raise _explained(error, sink, path) from error
    return sink.digest.hexdigest()[:16]


def _explained(error: OSError, sink: _Sink, path: Path) -> OSError:
    if error.errno not in _FULL:
        return OSError(error.errno, error.strerror, str(path))
    room = shutil.disk_usage(path.parent).free + sink.written
    return OSError(
        error.errno,
        f"{error.strerror}: this checkpoint needs {sink.size:,} bytes, and the file system has {room:,} for it. Make "
        "room, raise the limit of the process if it has one, or save to another directory. The checkpoints before it "
        "are still there: the oldest is removed when a new one is whole",
        str(path),
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader | None]:
    """A file to be read; None for a link, a directory, a pipe, and for what has gone."""
    try:
        descriptor = os.open(path, _OLD)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOENT, errno.ENXIO):
            raise
        yield None
        return
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        yield None
        return
    with open(descriptor, "rb") as file:
        yield file


def _digest(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _as_it_is(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file does."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sync(directory: Path) -> None:
    """Make new names last through a loss of power."""
    if os.name == "nt":  # there a directory cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
