"""fdp beside plain torch, DistributedDataParallel and JAX, on this machine: `make bench-peers`."""

import argparse
import contextlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import compare, plot, report, stages
from benchmarks.peers.models import SPECS

ROUNDS, QUICK = 60, 6
QUICK_MODELS = ["small MLP", "CNN", "transformer"]
NAME = "python -m benchmarks.peers"
_DESCRIPTION = """\
Measure a forward and backward of five models on two slots of the CPU: fdp in sequence, on threads, compiled and over
two processes, beside plain torch, DistributedDataParallel and JAX. Print tables; write peers.json, peers.svg and
peers.png to a folder, and nothing elsewhere. Nothing else should run on the machine meanwhile.

The plot needs matplotlib and the comparison with JAX needs JAX, both in pip install -e ".[bench]". What is missing is
left out: the figures are kept, and --show draws them later."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or show what the arguments say, and return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.profile:
        if options.json:
            parser.error("--profile prints a table, and has no --json")
        stages.print_stages(options.profile, compare.SLOTS)
        return 0
    try:
        earlier = None if options.show is None else _earlier(options.show)
        options.out.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
    except (OSError, ValueError) as error:
        parser.error(str(error))
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if not can_draw:
        print('no plot: matplotlib is not installed: pip install -e ".[bench]"', file=sys.stderr)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = earlier or compare.measure(_models(options), _count(options), _text_of(options))
    except (RuntimeError, TimeoutError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    _give(found, options, can_draw=can_draw)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds of three models: whether it works")
    text = f"measurements of each contender and model, at least 2 (default: {ROUNDS})"
    parser.add_argument("--rounds", type=_rounds, help=text)
    names = ", ".join(f'"{name}"' for name in SPECS)
    parser.add_argument("--models", nargs="+", choices=SPECS, metavar="MODEL", help=f"which of {names}")
    text = "folder (default: build/peers)"
    parser.add_argument("--out", type=Path, default=Path("build/peers"), metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document, and no tables")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", type=Path, metavar="FILE", help="tables and plot of an earlier peers.json")
    text = "show instead where the time of a call of fdp on threads goes, and write nothing"
    instead.add_argument("--profile", choices=SPECS, metavar="MODEL", help=text)
    return parser


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return rounds


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--show {path}: {error}") from None
    if not isinstance(found, dict) or "models" not in found:
        raise ValueError(f"--show {path}: not a peers.json, which `{NAME}` writes")
    return found


def _count(options: argparse.Namespace) -> int:
    return options.rounds or (QUICK if options.quick else ROUNDS)


def _models(options: argparse.Namespace) -> list[str]:
    return options.models or (QUICK_MODELS if options.quick else list(SPECS))


def _text_of(options: argparse.Namespace) -> str:
    """The command line that measures the same."""
    words = ["--rounds", str(_count(options))]
    if _models(options) != list(SPECS):
        words += ["--models", *_models(options)]
    return f"{NAME} {shlex.join(words)}"


def _give(found: dict[str, Any], options: argparse.Namespace, *, can_draw: bool) -> None:
    if options.show is None:
        (options.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    if can_draw:
        plot.draw(found, options.out)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    report.show(found)
    print(f"written to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
