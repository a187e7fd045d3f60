"""`python -m fdp bench`: fdp beside plain torch, DistributedDataParallel and JAX, on this machine."""

import argparse
import contextlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from fdp._bench._models import SPECS
from fdp._command._results import Unusable, print_document

ROUNDS, QUICK = 60, 6
QUICK_MODELS = ["small MLP", "CNN", "transformer"]
_DESCRIPTION = """\
Measure a forward and backward of five models on two slots of the CPU: fdp in sequence, on threads, compiled and over
two processes, beside plain torch, DistributedDataParallel and JAX. Print tables; write peers.json, peers.svg and
peers.png to a folder, and nothing elsewhere. Nothing else should run on the machine meanwhile.

The plot needs matplotlib and the comparison with JAX needs JAX, both in pip install "fdp[bench]". What is missing is
left out: the figures are kept, and --show draws them later."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="compare fdp with its peers on this machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds of three models: whether it works")
    text = f"measurements of each contender and model, at least 2 (default: {ROUNDS})"
    parser.add_argument("--rounds", type=_rounds, help=text)
    names = ", ".join(f'"{name}"' for name in SPECS)
    parser.add_argument("--models", nargs="+", choices=SPECS, metavar="MODEL", help=f"which of {names}")
    parser.add_argument(
        "--out", type=Path, default=Path("fdp-bench"), metavar="DIR", help="folder (default: fdp-bench)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document, and no tables")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", type=Path, metavar="FILE", help="tables and plot of an earlier peers.json")
    text = "show instead where the time of a call of fdp on threads goes, and write nothing"
    instead.add_argument("--profile", choices=SPECS, metavar="MODEL", help=text)
    parser.set_defaults(run=_run)


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return rounds


def _run(options: argparse.Namespace) -> int:
    from fdp._bench import _compare  # imports what only a run needs

    if options.profile:
        return _profile(options.profile, _compare.SLOTS, options.json)
    earlier = None if options.show is None else _earlier(options.show)
    _make(options.out)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if not can_draw:
        print('no plot: matplotlib is not installed: pip install "fdp[bench]"', file=sys.stderr)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = earlier or _compare.measure(_models(options), _count(options), _text_of(options))
    except (RuntimeError, TimeoutError) as error:
        print(f"python -m fdp bench: {error}", file=sys.stderr)
        return 1
    _write(found, options.out, keep=earlier is None, draw=can_draw)
    _say(found, options.out, as_json=options.json)
    return 0


def _profile(model: str, slots: int, as_json: bool) -> int:
    from fdp._bench._profile import profile

    if as_json:
        raise Unusable("--profile prints a table, and has no --json")
    profile(model, slots)
    return 0


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unusable(f"--show {path}: {error}") from None
    if not isinstance(found, dict) or "models" not in found:
        raise Unusable(f"--show {path}: not a peers.json, which `python -m fdp bench` writes")
    return found


def _make(folder: Path) -> None:
    """Make the folder before anything is measured in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"--out {folder}: {error}") from None


def _count(options: argparse.Namespace) -> int:
    return options.rounds or (QUICK if options.quick else ROUNDS)


def _models(options: argparse.Namespace) -> list[str]:
    return options.models or (QUICK_MODELS if options.quick else list(SPECS))


def _text_of(options: argparse.Namespace) -> str:
    """The command line that measures the same."""
    words = ["python", "-m", "fdp", "bench", "--rounds", str(_count(options))]
    if _models(options) != list(SPECS):
        words += ["--models", *_models(options)]
    return shlex.join(words)


def _write(found: dict[str, Any], folder: Path, *, keep: bool, draw: bool) -> None:
    if keep:
        (folder / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    if draw:
        from fdp._bench._plot import draw as draw_to

        draw_to(found, folder)


def _say(found: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    from fdp._bench import _report

    if as_json:
        print_document(found)
        return
    _report.show(found)
    print(f"written to {folder}", file=sys.stderr)
