"""The examples as modules."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The one that the file of tests names."""
    for package in ("matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module(request.module.EXAMPLE)
    torch.set_num_threads(before)
