"""Which versions there are, and whether fdp works with them."""

import platform
import re
from importlib import metadata

import torch

from fdp._command._result import Result

# pyproject.toml and docs/explanation/compatibility.md say the same: tests/command/test_command.py compares.
OLDEST = {"python": (3, 11), "torch": (2, 11), "optree": (0, 14)}
TESTED = (2, 15)  # the newest torch that the tests have run with


def check_versions(fdp: str) -> Result:
    """What is installed, and whether it is too old, or newer than what was tested."""
    found = {"fdp": fdp, "torch": str(torch.__version__), "optree": metadata.version("optree")}
    found["python"] = platform.python_version()
    summary = ", ".join(f"{name} {version}" for name, version in found.items())
    summary += f", {platform.system()} {platform.machine()}"
    for name, (major, minor) in OLDEST.items():
        if numbers(found[name]) < (major, minor):
            return Result("versions", "failed", summary, f"fdp needs {name} {major}.{minor} or newer: upgrade it")
    if numbers(found["torch"]) > TESTED:
        advice = f"fdp was tested up to torch {TESTED[0]}.{TESTED[1]}: run your tests, or install that version"
        return Result("versions", "warning", summary, advice)
    return Result("versions", "ok", summary)


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor, to compare with.

    >>> numbers("2.13.1+cpu")
    (2, 13)
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
