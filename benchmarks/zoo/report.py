"""The verdicts as markdown."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.zoo.check import ALONE, BUILD, CACHE, DIFFERS, DRAWS, KEEPS, MEETS, RAISES, SLOW, TRIED, WORKS, Verdict

BEGIN, END = "<!-- made by `make zoo`: begin -->", "<!-- made by `make zoo`: end -->"
SHOWN = 160  # characters of a reason
NOT_ABOUT_FDP = {ALONE, BUILD, SLOW}  # only named on the page; the reasons are in the files of --out


class Tried(NamedTuple):
    """What came of the models of a library, and with which versions."""

    versions: dict[str, str]
    verdicts: dict[str, Verdict]


def page(text: str, found: Mapping[str, Tried]) -> str:
    """The page with new tables between the marks."""
    versions = {name: version for tried in found.values() for name, version in tried.versions.items()}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [f"Versions: {told}.", "", *summary(found)]
    parts += ["", "| library | | | models |", "|---|---|---|---|"]
    parts += [row for title, tried in found.items() for row in _rows(title, tried.verdicts)]
    body = "\n".join([BEGIN, "", *parts, END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: body, text, flags=re.DOTALL)


def summary(found: Mapping[str, Tried]) -> list[str]:
    """A line for each library: n of m."""
    head = ["library", "works", RAISES, DIFFERS, MEETS, DRAWS, KEEPS, ALONE, BUILD, SLOW]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for title, tried in found.items():
        count = Counter(verdict.kind for verdict in tried.verdicts.values())
        right, of = count[WORKS] + count[CACHE], sum(count[kind] for kind in TRIED)
        cells = [title, f"**{right} of {of}**", *(str(count[kind]) for kind in head[2:])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rows(title: str, each: Mapping[str, Verdict]) -> list[str]:
    """A row for each kind of verdict: how many models, and which, with the reasons."""
    rows: list[str] = []
    for kind in (WORKS, CACHE, RAISES, DIFFERS, MEETS, DRAWS, KEEPS, ALONE, BUILD, SLOW):
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name, verdict in each.items():
            if verdict.kind == kind:
                by_reason["" if kind in NOT_ABOUT_FDP else _short(verdict.why)].append(name)
        models = [
            ", ".join(f"`{name}`" for name in sorted(names)) + (f": {why}" if why else "")
            for why, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
        ]
        if models:
            rows.append(f"| {title} | {kind} | {sum(map(len, by_reason.values()))} | {'; '.join(models)} |")
    return rows


def _short(why: str) -> str:
    """In one line, with no marks that a table of markdown would take for its own."""
    text = why if len(why) <= SHOWN else why[:SHOWN] + "…"
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`" if text else ""
