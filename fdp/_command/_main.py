"""The parser, and what all commands have in common: exit codes, an interrupt, a reader that has gone."""

import argparse
import os
import sys
from collections.abc import Sequence

from fdp._command import _check, _doctor
from fdp._command._results import Unusable

INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
NO_READER = 141  # 128 + SIGPIPE

_EPILOG = """\
exit codes:
  0    everything is fine
  1    a check failed, or a function differs
  2    the command line is wrong, or what it names cannot be run
  130  interrupted by Ctrl-C"""


def run(arguments: Sequence[str], version: str) -> int:
    """Run a command and return its exit code."""
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _run(arguments, version)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes at exit once more, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:  # a full disk, behind the standard output
        print(f"python -m fdp: {error}", file=sys.stderr)
        return 2


def parser(version: str) -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = argparse.ArgumentParser(
        prog="python -m fdp",
        description="Data parallelism for PyTorch as a pure function: look at this machine, and at functions of yours.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"fdp {version}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (_doctor, _check):
        module.add_to(commands)
    return root


def _run(arguments: Sequence[str], version: str) -> int:
    root = parser(version)
    try:
        options = root.parse_args(arguments, argparse.Namespace(version=version))
    except SystemExit as end:  # after --help, --version or a wrong argument
        return end.code if isinstance(end.code, int) else 2
    if options.command is None:
        root.print_help()
        return 2
    try:
        return options.run(options)
    except Unusable as error:
        print(f"python -m fdp {options.command}: {error}", file=sys.stderr)
        return 2
