"""`python -m fdp doctor`: what fdp finds on this machine, and what is wrong with it."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fdp._command._balance import check_balance
from fdp._command._copies import check_copies
from fdp._command._hardware import check_devices, check_threads
from fdp._command._loopback import check_distributed
from fdp._command._results import Result, add_devices, chosen_devices, is_terminal, line, print_document, worst
from fdp._command._versions import check_versions
from fdp._placement.devices import available_devices, virtual_devices

Check = Callable[[], Result]

_DESCRIPTION = """\
Look at this machine: versions, devices and their balance, whether copies between every two devices arrive as they were,
threads and cores, and whether processes can meet. It takes a few seconds."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="check this machine", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_devices(parser, "devices to look at, by default all accelerators, else four slots on the CPU")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    devices = chosen_devices(options) or _default_devices()
    checks = checks_of(devices, options.version)
    results: list[Result] = []
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        for result in diagnose(checks):
            results.append(result)
            if not options.json:
                result.show()
    status = worst(results)
    if options.json:
        document = {"command": "doctor", "fdp": options.version, "status": status}
        print_document(document | {"checks": [result.document() for result in results]})
    else:
        _sum_up(results)
    return 1 if status == "failed" else 0


def checks_of(devices: Sequence[torch.device], version: str) -> dict[str, Check]:
    """The checks by name, in the order that they run in."""
    return {
        "versions": functools.partial(check_versions, version),
        "devices": functools.partial(check_devices, devices),
        "balance": functools.partial(check_balance, devices),
        "copies": functools.partial(check_copies, devices),
        "threads": check_threads,
        "distributed": check_distributed,
    }


def diagnose(checks: dict[str, Check]) -> Iterator[Result]:
    """Run the checks one by one. A check that raises has failed, and the others go on."""
    for name, check in checks.items():
        with _waiting(name):
            try:
                result = check()
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                advice = "the error is torch's or the driver's unless its message names fdp: look there first"
                result = Result(name, "failed", text, advice, details={"error": text})
        yield result


def _default_devices() -> tuple[torch.device, ...]:
    devices = available_devices()
    return virtual_devices(4) if devices[0].type == "cpu" else devices


def _sum_up(results: Sequence[Result]) -> None:
    count = {status: sum(result.status == status for result in results) for status in ("failed", "warning")}
    if any(count.values()):
        line()
        line(f"{count['failed']} failed, {count['warning']} with a warning, of {len(results)} checks")


def _waiting(name: str) -> contextlib.AbstractContextManager[Any]:
    """Say in a terminal what is under way; elsewhere nobody would see it in time."""
    if not is_terminal(sys.stderr):
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"checking {name}")
