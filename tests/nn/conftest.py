from collections.abc import Iterator

import pytest
import torch

from tests.common.settings import default_dtype
from tests.common.threads import many_cores


@pytest.fixture
def float64() -> Iterator[None]:
    """Modules are made in float64."""
    with default_dtype(torch.float64):
        yield


@pytest.fixture
def float64_side_by_side() -> Iterator[None]:
    """As `float64`, with the same numbers each time and shards side by side."""
    torch.manual_seed(0)
    with default_dtype(torch.float64), many_cores():
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """Modules that run in place are tested here; that they say so is a test of its own."""
    item.add_marker(pytest.mark.filterwarnings("ignore:Calls of this:UserWarning"))
