from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    """Two processes."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four processes."""
    with Pool(4) as pool:
        yield pool
