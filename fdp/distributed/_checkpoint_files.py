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
from typing import Any, final

import torch

_NAME = re.compile(r"(\d{6,})-step-\d+(?:-[0-9a-f]{16})?\.pt")  # fdp 0.1.0 added a digest
_PARTIAL = "checkpoint.partial"
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@final
class CheckpointFiles:
    """The files of a directory, of which the last `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep

    def write(self, step: int, state: Any) -> None:
        """Add a file, and remove the oldest."""
        self.directory.mkdir(parents=True, exist_ok=True)
        entries = self._entries()
        number = 1 + max((number for number, _ in entries), default=0)  # steps may go backwards, and repeat
        partial = self.directory / _PARTIAL
        partial.unlink(missing_ok=True)  # what a killed run has left
        try:
            _fill(partial, state)
            os.replace(partial, self.directory / f"{number:06}-step-{step}.pt")
        except BaseException as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _explained(error, partial) from None
            raise
        _sync(self.directory)
        for _, path in entries[self._keep - 1 :]:
            path.unlink(missing_ok=True)

    def newest(self) -> Any:
        """What the last file that is whole holds; None if there is no file at all. Nothing in it can run code."""
        entries = self._entries()
        for _, path in entries:
            try:
                with path.open("rb") as file:
                    _check(file)
                    # Not mapped: who cuts a mapped file short ends the process that looks at it.
                    return torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to a place that is none
                    raise
                warnings.warn(f"Checkpoints: {path} is damaged or cut short: trying the one before", stacklevel=3)
        if entries:
            raise RuntimeError(
                f"Checkpoints: none of the {len(entries)} files in {self.directory} is whole. To begin anew, remove "
                "them"
            )
        return None

    def _entries(self) -> list[tuple[int, Path]]:
        """The newest first."""
        if not self.directory.exists():
            return []
        paths = [path for path in self.directory.iterdir() if path.is_file() and not path.is_symlink()]
        found = [(_NAME.fullmatch(path.name), path) for path in paths]
        return sorted([(int(match[1]), path) for match, path in found if match], reverse=True)


def _fill(path: Path, state: Any) -> None:
    """Bring a state to the disk."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # by which torch hides what the file has raised, or Ctrl-C
            hidden = error.__context__
            raise (hidden if isinstance(hidden, OSError | KeyboardInterrupt) else error) from None
        file.flush()
        os.fsync(file.fileno())


def _explained(error: OSError, path: Path) -> OSError:
    full = ". Make room, or save to another directory. The checkpoints before this one are still there: the oldest is "
    more = f"{full}removed when a new one is whole" if error.errno in _FULL else ""
    return OSError(error.errno, f"{error.strerror}{more}", str(path))


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
