"""Files that are whole or not there, in the order in which they were written."""

import contextlib
import hashlib
import io
import os
import re
import uuid
import warnings
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

_NAME = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{16})\.pt")
_PARTIAL = re.compile(r"\d{6,}-[0-9a-f]{32}\.partial")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class _FileEntry(NamedTuple):
    """A file by its name. The number counts what was written: steps may go backwards, and repeat."""

    number: int
    step: int
    digest: str
    path: Path


@final
class _Hashed:
    """A file to write to, which takes the digest of what it gets."""

    def __init__(self, file: Any) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.failure: OSError | None = None
        """The first one. Torch raises a RuntimeError of its own in its place."""

    def write(self, data: Any) -> int:
        self._hash.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


def write(directory: Path, step: int, state: Any, keep: int) -> None:
    """Add a file, and remove all but the last `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory)
    number = 1 + max((entry.number for entry in _entries(directory)), default=0)
    partial = directory / f"{number:06}-{uuid.uuid4().hex}.partial"
    descriptor = os.open(partial, _NEW, 0o666)
    hashed: Any = None
    try:
        with open(descriptor, "wb") as file:
            _lock(file)
            hashed = _Hashed(file)
            torch.save(state, hashed)
            file.flush()
            os.fsync(file.fileno())
        # The digest is in the name, as torch.hub has it: the file stays one that torch.load reads.
        os.replace(partial, directory / f"{number:06}-step-{step}-{hashed.digest()}.pt")
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if hashed is not None and hashed.failure is not None:
            raise hashed.failure from None
        raise
    _sync(directory)
    entries = _entries(directory)
    whole = [entry for entry in entries if entry.number == number or _is_whole(entry)] if len(entries) > keep else []
    for entry in entries[entries.index(whole[keep - 1]) + 1 :] if len(whole) >= keep else ():
        entry.path.unlink(missing_ok=True)


def _remove_abandoned(directory: Path) -> None:
    """Remove what runs that were killed have left half written. Whoever still writes holds a lock."""
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name):
            with contextlib.suppress(OSError), path.open("rb+") as file:
                if _lock(file):
                    path.unlink(missing_ok=True)


def _lock(file: Any) -> bool:
    """Lock a file until it is closed, if nobody has and the file system can."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_whole(entry: _FileEntry) -> bool:
    """Whether a file holds what its name says; damaged ones do not count among those that are kept."""
    with entry.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().startswith(entry.digest)


def newest(directory: Path) -> tuple[int, bytes] | None:
    """Step and content of the last file that is whole; None if there is none at all."""
    entries = _entries(directory)
    for entry in entries:
        data = entry.path.read_bytes()
        if hashlib.sha256(data).hexdigest().startswith(entry.digest):
            return entry.step, data
        warnings.warn(f"Checkpoints: {entry.path} is damaged or cut short: trying the one before", stacklevel=3)
    if entries:
        raise RuntimeError(
            f"Checkpoints: none of the {len(entries)} files in {directory} is whole. To begin anew, remove them"
        )
    return None


def load(data: bytes) -> Any:
    """What was written; nothing in it can run code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _entries(directory: Path) -> list[_FileEntry]:
    """The newest first."""
    if not directory.exists():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    entries = [_FileEntry(int(match[1]), int(match[2]), match[3], path) for match, path in found if match]
    return sorted(entries, reverse=True)


def _sync(directory: Path) -> None:
    """Make new names last through a loss of power."""
    if os.name == "nt":  # there a directory cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
