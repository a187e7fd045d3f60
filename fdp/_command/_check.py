"""`python -m fdp check`: whether a function gives the same on many slots as on one."""

import argparse
import contextlib
import sys
from typing import Any

from fdp._command._loading import DEFAULT, FORM, Name, Samples, described, load_samples
from fdp._command._results import Unusable, add_devices, chosen_devices, line, print_document
from fdp.testing._assertions import assert_data_parallel
from fdp.testing._case import WHERE

_DESCRIPTION = f"""\
Run a function on 1, 2, 3 and 4 slots, one after the other and in threads, and compare values and gradients with one
call on all rows, by fdp.testing.assert_data_parallel.

Sample inputs come from {DEFAULT}() in the module of the function, or from --samples. It returns
{FORM}: what fdp.dp_apply(fn, params, inputs) is given, and a dict of options
of assert_data_parallel, such as {{"in_dims": (0, None)}}. A tuple of inputs is several arguments. Take a few rows more
than slots, which the slots do not divide."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="check a function of yours on sample inputs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="package.module:function or path/to/file.py:function"
    )
    text = f"where samples come from: a function without arguments, or a value (default: {DEFAULT} in MODULE)"
    parser.add_argument("--samples", metavar="MODULE:NAME", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_devices(parser, "run on these devices too, with samples on the first")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            report, slots = _checked(options)
    except Unusable as error:
        if options.json:
            _print(options.function, "error", str(error), [])
        raise
    if options.json:
        _print(options.function, "ok" if report is None else "failed", report, slots)
    elif report is None:
        tried = f"{', '.join(map(str, slots[:-1]))} and {slots[-1]}" if len(slots) > 1 else str(slots[0])
        line(
            ("ok", "green"),
            f"  {options.function} gives on {tried} slot{'s' * (slots != [1])} what it gives on one device",
        )
    else:
        line(("failed", "bold red"), f"  {options.function}")
        line(report)
    return 0 if report is None else 1


def _checked(options: argparse.Namespace) -> tuple[str | None, list[int]]:
    """What differs, if anything, and the numbers of slots that were tried."""
    name = Name(options.function, "function")
    devices = chosen_devices(options)
    fn = name.load()
    if not callable(fn):
        raise Unusable(f"{name} is no function, but a {type(fn).__name__}")
    samples = load_samples(options.samples, name.module)
    if options.virtual is not None:
        samples.options["slots"] = tuple(range(1, options.virtual + 1))
    if devices is not None:
        samples.options["devices"] = devices
    slots = sorted({1, *samples.options.get("slots", (1, 2, 3, 4))})
    return _report(fn, samples, str(name)), slots


def _report(fn: Any, samples: Samples, name: str) -> str | None:
    """What `assert_data_parallel` says of the function; None if it holds."""
    params, inputs, options = samples
    try:
        assert_data_parallel(fn, params, inputs, **options)
    except (Exception, SystemExit) as error:
        if isinstance(error, AssertionError) and str(error).startswith(f"{WHERE}: "):
            return str(error)
        # One that the function makes itself, or that says what is wrong with the call.
        raise Unusable(f"{name} cannot be checked: {described(error)}") from error
    return None


def _print(function: str, status: str, report: str | None, slots: list[int]) -> None:
    print_document({"command": "check", "function": function, "status": status, "slots": slots, "report": report})
