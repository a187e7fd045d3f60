"""The code of a page of the docs, for tests that try more than the page shows."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


@functools.cache
def recipe(name: str) -> Any:
    """What the first block of a how-to page defines."""
    page = DOCS / "how_to" / f"{name}.md"
    match = re.search(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(match[1], page, "exec"), namespace)
    return SimpleNamespace(**namespace)
