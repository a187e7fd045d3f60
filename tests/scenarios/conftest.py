from collections.abc import Iterator

import pytest

from tests.common.threads import many_cores


@pytest.fixture(autouse=True)
def enough_cores() -> Iterator[None]:
    """Slots run side by side, however few cores there are."""
    with many_cores(8):
        yield
