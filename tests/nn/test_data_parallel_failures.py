"""Exceptions, interrupts and warnings of the module of a DataParallel."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import Apply, outputs_of

TWO = ["cpu", "cpu"]

each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


def fail(error: BaseException) -> Any:
    raise error


class Fails(nn.Module):
    """A module that raises what is under the first row of its part. It holds no error, which might lead back to it."""

    def forward(self, x: Tensor, errors: Any) -> Tensor:
        error = errors.of.get(int(x[0]))
        if error is not None:
            raise error
        return x


class Errors:
    def __init__(self, of: dict[int, Exception]) -> None:
        self.of = of


class Odd(Exception):
    """No string makes one."""

    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(a, b)


@each_executor
@pytest.mark.parametrize("error", [KeyError("a\nb"), Odd(1, b=2), StopIteration(3), AssertionError()], ids=repr)
def test_the_exception_itself_arrives(error: Exception, executor: Any):
    """Torch raises another one made of its text."""
    error.__notes__ = []
    with many_cores(), pytest.raises(type(error), match=f"^{re.escape(str(error))}") as caught:
        DataParallel(Fails(), ["cpu"] * 3, executor=executor)(torch.arange(6), Errors({2: error}))
    assert caught.value is error
    name = type(error).__name__
    assert error.__notes__ == [
        f"Caught {name} in replica 1 on device cpu.",
        "in shard 1 of 3, rows 2:4, on cpu",
    ]


def test_one_chunk_on_several_devices_has_notes_too():
    with pytest.raises(ValueError, match="alone") as caught:
        outputs_of(lambda x: fail(ValueError("alone")), numbers(1))
    assert "Caught ValueError in replica 0 on device cpu." in caught.value.__notes__


@each_executor
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(kind: type[BaseException], executor: Any):
    """Torch dies of a KeyError."""
    shim = DataParallel(Apply(lambda x: fail(kind("stop")) if x[0] else x), TWO, executor=executor)
    with many_cores(), pytest.raises(kind, match="stop"):
        shim(torch.arange(4))
    with many_cores():
        assert_same_tree(shim(torch.zeros(4)), torch.zeros(4))


@each_executor
def test_after_a_failure_the_next_call_works(executor: Any):
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.trace = input
            return fail(ValueError("negative")) if input.min() < 0 else super().forward(input)

    module, x = nn.Sequential(Picky(3, 2), nn.BatchNorm1d(2)).double(), numbers(6, 3).abs()
    shim = DataParallel(module, TWO, executor=executor)
    bad = torch.cat([x[:3], -x[3:]])
    with many_cores():
        for _ in range(2):
            with pytest.raises(ValueError, match="negative"):
                shim(bad)
            assert not hasattr(module[0], "trace")
            want = torch.cat([copy.deepcopy(module)(part) for part in x.chunk(2)])
            assert_close_tree(shim(x).detach(), want.detach())


def test_a_warning_of_the_module_is_the_user_s():
    def fn(x: Tensor) -> Tensor:
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return x

    with many_cores(), pytest.warns(RuntimeWarning, match="mine"):
        outputs_of(fn, numbers(4))
