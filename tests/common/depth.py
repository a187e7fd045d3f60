"""Of many cases few in the fast suite, and all of them in `make test-deep`."""

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def thinned(*tables: Collection[Any], keep: int = 3) -> list[Any]:
    """All combinations; of `keep` one is in the fast suite, and each entry of each table is in some of these."""
    return [
        pytest.param(
            *(entry for _, entry in case), marks=[] if sum(i for i, _ in case) % keep == 0 else [pytest.mark.deep]
        )
        for case in product(*map(enumerate, tables))
    ]


def deep(names: Collection[str], rare: Collection[str]) -> list[Any]:
    """All names; those of rare cases are for `make test-deep`."""
    assert set(rare) <= set(names)
    return [pytest.param(name, marks=[pytest.mark.deep] if name in rare else []) for name in names]
