"""How long to search: HYPOTHESIS_PROFILE is `ci` (the default: some examples, the same every time), `few` or `deep`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", max_examples=8, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("few", settings.get_profile("ci"), max_examples=3)
settings.register_profile("deep", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Any]]:
    """Two processes, and four."""
    from tests.distributed.pool import Pool

    with Pool(2) as two, Pool(4) as four:
        yield {2: two, 4: four}


def pytest_collection_finish() -> None:
    import torch  # here: a process that only hands out tests to others does without

    torch.set_num_threads(1)  # the tensors are tiny: more threads inside an operation only get in each other's way
