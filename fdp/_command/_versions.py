"""Which versions there are, and whether fdp works with them."""

import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

import torch

from fdp._command._results import Result, Status

# pyproject.toml and .ci/constraints.txt say the same: tests/command/test_command.py compares.
OLDEST = {"python": (3, 11), "torch": (2, 11), "optree": (0, 14)}
TESTED = (2, 15)  # the newest torch that the tests have run with


def check_versions(fdp: str) -> Result:
    """What is installed, and whether it is too old, or newer than what was tested."""
    python = platform.python_version()
    found = {"fdp": fdp, "torch": str(torch.__version__), "optree": _installed("optree"), "python": python}
    status, advice = judge(found)
    summary = ", ".join(f"{name} {version}" for name, version in found.items())
    system = f"{platform.system()} {platform.machine()}"
    details = found | {"platform": platform.platform(), "executable": sys.executable}
    return Result("versions", status, f"{summary}, {system}", advice, details=details)


def judge(found: Mapping[str, str]) -> tuple[Status, str | None]:
    """The status of versions by name, and what to do.

    >>> judge({"torch": "2.13.1+cpu"})
    ('ok', None)
    >>> judge({"torch": "2.4.0"})
    ('failed', 'fdp needs torch 2.11 or newer: upgrade it')
    """
    for name, oldest in OLDEST.items():
        if name in found and is_older(found[name], oldest):
            return "failed", f"fdp needs {name} {_text(oldest)} or newer: upgrade it"
    newest = _numbers(found.get("torch", ""))
    if newest is not None and newest > TESTED:
        return "warning", f"fdp was tested up to torch {_text(TESTED)}; run your tests, or install that version"
    return "ok", None


def is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Whether a version comes before another."""
    numbers = _numbers(version)
    return numbers is not None and numbers < oldest


def _numbers(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
