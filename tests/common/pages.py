"""The code of a page of the docs, for tests that try more than the page shows."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The page's blocks, each with the number of lines above it. A fence that says ```py is shown and not run."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        indent, code = match.groups()
        yield text.count("\n", 0, match.start(2)), re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


@functools.cache
def recipe(name: str) -> Any:
    """What the first block of a how-to page defines."""
    page = DOCS / "how_to" / f"{name}.md"
    match = re.search(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(match[1], page, "exec"), namespace)
    return SimpleNamespace(**namespace)
