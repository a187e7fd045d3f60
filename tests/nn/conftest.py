from collections.abc import Iterator

import pytest
import torch

from tests.common.settings import default_dtype


@pytest.fixture
def float64() -> Iterator[None]:
    """Modules are made in float64."""
    with default_dtype(torch.float64):
        yield
