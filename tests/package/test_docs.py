"""Every ```python block of README.md and docs/ runs, page by page: a page is one program."""

import doctest
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.common.pages import ROOT, blocks

PAGES = [path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses and pickle look their module up
    monkeypatch.chdir(tmp_path)  # a page may write files
    for above, code in blocks(page):
        if ">>>" in code:
            run_doctest(page, above, code, vars(module))
        else:
            exec(compile("\n" * above + code, page, "exec"), vars(module))  # a traceback shows the page's own lines


def run_doctest(page: Path, above: int, code: str, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), above)
    test.globs = namespace  # not a copy: later blocks see its names
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(test, out=report.append, clear_globs=False)
    assert not failed, "".join(report)
