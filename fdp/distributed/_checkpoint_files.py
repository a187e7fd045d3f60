"""Files that are whole or not there, in the order in which they were written.

They are what `torch.save` writes: a zip archive, with a checksum of each part. `torch.load` does not look at these.
"""

import contextlib
import errno
import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

_NAME = re.compile(r"(\d{6,})-step-(\d+)(?:-[0-9a-f]{16})?\.pt")  # fdp 0.1.0 added a digest
_PARTIAL = "checkpoint.partial"
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class _FileEntry(NamedTuple):
    """A file by its name. The number counts what was written: steps may go backwards, and repeat."""

    number: int
    step: int
    path: Path


@final
class CheckpointFiles:
    """The files of a directory, of which the last `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep

    def write(self, step: int, state: Any) -> None:
        """Add a file, and remove the oldest."""
        self.directory.mkdir(parents=True, exist_ok=True)
        entries = self._entries()
        number = 1 + max((entry.number for entry in entries), default=0)
        partial = self.directory / _PARTIAL
        partial.unlink(missing_ok=True)  # what a killed run has left
        try:
            _fill(partial, state)
            os.replace(partial, self.directory / f"{number:06}-step-{step}.pt")
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        _sync(self.directory)
        for entry in entries[self._keep - 1 :]:
            entry.path.unlink(missing_ok=True)

    def newest(self) -> Any:
        """What the last file that is whole holds; None if there is no file at all. Nothing in it can run code."""
        entries = self._entries()
        for entry in entries:
            try:
                with entry.path.open("rb") as file:
                    _check(file)
                    # Not mapped: who cuts a mapped file short ends the process that looks at it.
                    return torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to a place that is none
                    raise
                warnings.warn(f"Checkpoints: {entry.path} is damaged or cut short: trying the one before", stacklevel=3)
        if entries:
            raise RuntimeError(
                f"Checkpoints: none of the {len(entries)} files in {self.directory} is whole. To begin anew, remove "
                "them"
            )
        return None

    def _entries(self) -> list[_FileEntry]:
        """The newest first."""
        if not self.directory.exists():
            return []
        paths = [path for path in self.directory.iterdir() if path.is_file() and not path.is_symlink()]
        found = [(_NAME.fullmatch(path.name), path) for path in paths]
        return sorted([_FileEntry(int(m[1]), int(m[2]), path) for m, path in found if m], reverse=True)


@final
class _Sink:
    """Where torch writes to.

    It hides an exception of its file behind one of its own. So the first is kept here, and what comes after it is
    counted only: then it is known how many bytes would have been needed.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        self.size += len(data)
        if self.error is None:
            try:
                return self._file.write(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""


def _fill(path: Path, state: Any) -> None:
    """Bring a state to the disk."""
    size = 0
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            sink = _Sink(file)
            try:
                torch.save(state, sink)  # pyright: ignore[reportArgumentType]
            finally:
                size = sink.size
                if sink.error is not None:
                    raise sink.error
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise OSError(
            error.errno,
            f"{error.strerror}: this checkpoint needs {size:,} bytes. Make room, raise the limit of the process "
            "if it has one, or save to another directory. The checkpoints before it are still there: the oldest is "
            "removed when a new one is whole",
            str(path),
        ) from None


def _check(file: Any) -> None:
    """Raise where a checksum does not fit: `torch.load` would return what is there."""
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
    file.seek(0)


def _sync(directory: Path) -> None:
    """Make new names last through a loss of power."""
    if os.name == "nt":  # there a directory cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
