"""Models of transformers, timm, torchvision and PyTorch Geometric through fdp, against one device: `make zoo`."""

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

from benchmarks.zoo import graph_models, transformers_models, vision_models
from benchmarks.zoo.check import FAULTS, Verdict
from benchmarks.zoo.model import Ways
from benchmarks.zoo.processes import SECONDS, verdicts
from benchmarks.zoo.report import Tried, page, summary

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "zoo.md"


class Library(NamedTuple):
    """Its package, what of it to import once for all, which models there are, and how each can be made."""

    package: str
    modules: Sequence[str]
    names: Callable[[], list[str]]
    ways: Callable[[str], Ways]


LIBRARIES = {
    "transformers": Library(
        "transformers",
        [
            "transformers.modeling_utils",
            "transformers.models.auto.modeling_auto",
            "transformers.models.auto.processing_auto",
        ],
        transformers_models.names,
        transformers_models.ways,
    ),
    "timm": Library("timm", ["timm"], vision_models.timm_families, vision_models.timm_ways),
    "torchvision": Library(
        "torchvision", ["torchvision"], vision_models.torchvision_families, vision_models.torchvision_ways
    ),
    "PyTorch Geometric": Library("torch_geometric", ["torch_geometric.nn"], graph_models.names, graph_models.ways),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try what the arguments name; 1 if fdp is at fault somewhere."""
    options = _parser().parse_args(arguments)
    found = {title: _tried(title, LIBRARIES[title], options) for title in options.library}
    print("\n".join(summary(found)))
    if options.write:
        kept = {title: tried for title in LIBRARIES if (tried := _kept(title, options.out))}
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")
    return int(any(verdict.kind in FAULTS for tried in found.values() for verdict in tried.verdicts.values()))


def _file(title: str, out: Path) -> Path:
    return out / f"{LIBRARIES[title].package}.json"


def _kept(title: str, out: Path) -> Tried | None:
    """What an earlier run has found."""
    file = _file(title, out)
    if not file.exists():
        return None
    kept = json.loads(file.read_text(encoding="utf-8"))
    return Tried(kept["versions"], {name: Verdict(*each) for name, each in kept["verdicts"].items()})


def _tried(title: str, library: Library, options: argparse.Namespace) -> Tried:
    """Each model of a library."""
    vision_models.prepare_torchvision()
    for module in library.modules:  # before the processes are forked
        importlib.import_module(module)
    names = [name for name in library.names() if not options.only or name in options.only]
    names = names[:: max(1, len(names) // 20)] if options.quick else names
    packages = {"torch": "torch", title: library.package}
    versions = {title: importlib.metadata.version(package).partition("+")[0] for title, package in packages.items()}
    tried, start = Tried(versions, {}), time.monotonic()
    for name, verdict in verdicts(names, library.ways, options.jobs, options.seconds):
        tried.verdicts[name] = verdict
        took = time.monotonic() - start
        print(f"{title} {len(tried.verdicts)}/{len(names)} {took:.0f} s {name}: {': '.join(verdict)}", file=sys.stderr)
    if not options.quick:
        _keep(title, tried, options)
    return tried


def _keep(title: str, tried: Tried, options: argparse.Namespace) -> None:
    """Write a whole run; some models alone belong into a whole run of the same versions."""
    if options.only:
        kept = _kept(title, options.out)
        if kept is None or kept.versions != tried.versions:
            return
        tried = Tried(kept.versions, kept.verdicts | tried.verdicts)
    options.out.mkdir(parents=True, exist_ok=True)
    _file(title, options.out).write_text(json.dumps(tried._asdict(), indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    text = f"which of {', '.join(LIBRARIES)}"
    parser.add_argument("--library", nargs="*", choices=LIBRARIES, default=list(LIBRARIES), metavar="NAME", help=text)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="MODEL", help="these models or families anew, of a whole run"
    )
    parser.add_argument("--quick", action="store_true", help="some twenty of each library")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help=f"of computing for each model (default: {SECONDS})"
    )
    parser.add_argument("--out", type=Path, default=Path("build/zoo"), metavar="DIR", help="where whole runs are kept")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write the tables of whole runs to {PAGE.name}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
