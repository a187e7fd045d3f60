"""Files that are whole or not there, in the order in which they were written."""

import contextlib
import hashlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

_NAME = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{16})\.pt")
_PARTIAL = "checkpoint.partial"


class _FileEntry(NamedTuple):
    """A file by its name. The number counts what was written: steps may go backwards, and repeat."""

    number: int
    step: int
    digest: str
    path: Path


def write(directory: Path, step: int, state: Any, keep: int) -> None:
    """Add a file, and remove all but the last `keep` that are whole."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = _entries(directory)
    number = 1 + max((entry.number for entry in entries), default=0)
    buffer = io.BytesIO()
    torch.save(state, buffer)  # torch would hide an OSError of a file behind one of its own
    partial = directory / _PARTIAL
    partial.unlink(missing_ok=True)  # what a killed run has left
    try:
        with partial.open("xb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        # The digest is in the name, as torch.hub has it: the file stays one that torch.load reads.
        os.replace(partial, directory / f"{number:06}-step-{step}-{_digest(buffer)}.pt")
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync(directory)
    if len(entries) < keep:
        return
    older = keep - 1  # than the new one, to be kept; damaged ones do not count
    for entry in entries:
        if older == 0:
            entry.path.unlink(missing_ok=True)
        else:
            with entry.path.open("rb") as file:
                older -= _digest(file) == entry.digest


def newest(directory: Path) -> tuple[int, bytes] | None:
    """Step and content of the last file that is whole; None if there is none at all."""
    entries = _entries(directory)
    for entry in entries:
        data = entry.path.read_bytes()
        if _digest(io.BytesIO(data)) == entry.digest:
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


def _digest(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]


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
