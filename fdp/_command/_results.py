"""What a command says: results of checks, and why it could not begin. In colours in a terminal, plain elsewhere."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

import torch

from fdp._placement.devices import as_devices, virtual_devices

Status = Literal["ok", "warning", "failed"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_NAMES, _STATUSES = 13, 9  # widths of columns


class Unusable(Exception):
    """The command cannot be run as it was written."""


class Result(NamedTuple):
    """What one check has found.

    Attributes:
        name: The check.
        status: Whether something is wrong.
        summary: What there is, in a line.
        advice: What to do, in a line.
        lines: More of what there is.
        details: The same for programs.
    """

    name: str
    status: Status
    summary: str
    advice: str | None = None
    lines: Sequence[str] = ()
    details: Mapping[str, Any] = {}

    def document(self) -> dict[str, Any]:
        """The result as JSON has it."""
        names = ("name", "status", "summary", "advice")
        return {name: getattr(self, name) for name in names} | {"details": dict(self.details)}

    def show(self) -> None:
        """Print the result: a line, and what belongs to it below."""
        line((self.status.ljust(_STATUSES), _STYLES[self.status]), (self.name.ljust(_NAMES), "bold"), self.summary)
        for text in self.lines:
            line(" " * (_STATUSES + _NAMES), (text, "dim"))
        if self.advice:
            line(" " * (_STATUSES + _NAMES), "-> ", self.advice)


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody is looking; a stream that is closed or missing is none."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def line(*spans: tuple[str, str] | str) -> None:
    """Print one line of pieces, some with a rich style. It is never cut: a terminal folds it, a pipe gets it whole."""
    pieces = [(span, "") if isinstance(span, str) else span for span in spans]
    if not is_terminal(sys.stdout):
        print("".join(text for text, _ in pieces).rstrip(), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text.assemble(*pieces))


def worst(results: Sequence[Result]) -> Status:
    """The status of all results together."""
    found = {result.status for result in results}
    return "failed" if "failed" in found else "warning" if "warning" in found else "ok"


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document on the standard output."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def add_devices(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--devices` and `--virtual`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--devices", metavar="LIST", help=f"{what}, one per slot: cuda:0,cuda:1 or 0,1 or cpu,cpu")
    group.add_argument("--virtual", metavar="N", type=int, help="N slots on the CPU instead")


def chosen_devices(options: argparse.Namespace) -> tuple[torch.device, ...] | None:
    """The devices that `--devices` or `--virtual` name, one per slot; None if there is neither."""
    try:
        if options.virtual is not None:
            return virtual_devices(options.virtual)
        if options.devices is None:
            return None
        names = [name.strip() for name in options.devices.split(",")]
        return as_devices([int(name) if name.isdecimal() else name for name in names], "--devices")
    except (TypeError, ValueError) as error:
        text = str(error)
        raise Unusable(text if text.startswith("--devices") else f"--virtual {options.virtual}: {text}") from None
