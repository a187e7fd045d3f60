"""What test/jit/test_data_parallel.py of PyTorch replicates is refused: scripted and traced modules."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, data_parallel
from fdp.nn import replicate
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

TWO = ("cpu", "cpu")
pytestmark = pytest.mark.usefixtures("float64_side_by_side")


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Torch warns of torch.jit wherever it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class Holder(nn.Module):
    """A Python module around others."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def shared() -> nn.Module:
    part: Any = torch.jit.script(block())
    return Holder(Holder(part), part)


SCRIPTS: dict[str, tuple[Callable[[], Any], str]] = {
    "test_python_submodule_script": (lambda: Holder(torch.jit.script(block())), r"'parts\.0'"),  # T31
    "test_shared_module": (shared, r"'parts\.0\.parts\.0'"),  # T32
    "test_traced_module": (lambda: torch.jit.trace(Holder(block()), torch.ones(2, 2)), "it"),  # T33
    "function": (lambda: torch.jit.script(block()), "it"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_compiled_by_torch_jit_is_refused(name: str):
    make, which = SCRIPTS[name]
    with without_warnings():
        module, x = make(), numbers(4, 2)
        said = f"there can be no replica of this .*: {which} is scripted or traced: pass the Python module"
        with pytest.raises(RuntimeError, match=f"^replicate: {said}"):
            replicate(module, TWO)
        with pytest.raises(RuntimeError, match=f"^DataParallel: {said}"):
            DataParallel(module, TWO)(x)
        with pytest.raises(RuntimeError, match=f"^data_parallel: {said}"):
            data_parallel(module, x, TWO)
        assert_close_tree(DataParallel(module, ["cpu"])(x), module(x))  # one device needs no replica
