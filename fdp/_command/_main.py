"""The command line: `doctor` runs its checks one by one and prints what they find."""

import argparse
from collections.abc import Callable, Sequence

import torch

from fdp._command._copies import check_copies
from fdp._command._hardware import check_devices, check_threads
from fdp._command._result import Result
from fdp._command._versions import check_versions
from fdp._placement.devices import as_devices

_DOCTOR = """\
Look at this machine: versions, devices, whether copies between every two devices arrive as they were, threads and
cores. It takes a few seconds. The exit code is 0 if nothing has failed, 1 if a check has failed, and 2 if the command
line is wrong."""


def run(arguments: Sequence[str], version: str) -> int:
    """Run a command and return its exit code."""
    root = argparse.ArgumentParser(prog="python -m fdp", description="Data parallelism for PyTorch as a pure function.")
    root.add_argument("--version", action="version", version=f"fdp {version}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="look at this machine", description=_DOCTOR)
    names = "devices to look at, by default all: cuda:0,cuda:1 or 0,1 or cpu"
    doctor.add_argument("--devices", metavar="LIST", help=names)
    options = root.parse_args(arguments)
    try:
        names = options.devices and [int(name) if name.isdecimal() else name for name in options.devices.split(",")]
        devices = list(dict.fromkeys(as_devices(names, "--devices")))
    except (TypeError, ValueError) as error:
        doctor.error(str(error))
    return int(_diagnose(devices, version))


def _diagnose(devices: Sequence[torch.device], version: str) -> bool:
    """Run the checks one by one; whether one has failed. One that raises has failed, and the others go on."""
    checks: dict[str, Callable[[], Result]] = {
        "versions": lambda: check_versions(version),
        "devices": lambda: check_devices(devices),
        "copies": lambda: check_copies(devices),
        "threads": check_threads,
    }
    failed = False
    for name, check in checks.items():
        try:
            result = check()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            advice = "the error is torch's or the driver's unless its message names fdp: look there first"
            result = Result(name, "failed", text, advice)
        print(result, flush=True)
        failed |= result.status == "failed"
    return failed
