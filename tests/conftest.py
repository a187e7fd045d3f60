"""What holds for every test of this folder.

Torch is imported where it is needed: a process that only hands out tests to others does without.
"""

import gc
from collections.abc import Iterator

import pytest

from tests.common.depth import leave_most_to_deep


@pytest.fixture
def four_cores() -> Iterator[None]:
    """As many shards at once as on a larger machine."""
    from tests.common.threads import many_cores

    with many_cores(4):
        yield


@pytest.fixture
def switching() -> Iterator[None]:
    """Four lanes that take turns all the time."""
    from tests.common.threads import side_by_side

    with side_by_side():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)  # before those marked `deep` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_most_to_deep(items)


def pytest_collection_finish() -> None:
    import torch

    from tests.common.settings import load_forward_mode

    torch.set_num_threads(1)  # the tensors are tiny
    load_forward_mode()
    leave_alone_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        leave_alone_what_stays()


def leave_alone_what_stays() -> None:
    """What is imported stays, and so does what the compiler has made: tests that collect need not look at it again."""
    gc.collect()
    gc.freeze()
