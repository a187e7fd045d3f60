"""Exceptions, interrupts and warnings of the module of a DataParallel."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import outputs_of

TWO = ["cpu", "cpu"]

each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


def fail(error: BaseException) -> Any:
    raise error


def test_one_chunk_on_several_devices_has_notes_too():
    with pytest.raises(ValueError, match="alone") as caught:
        outputs_of(lambda x: fail(ValueError("alone")), numbers(1))
    assert "Caught ValueError in replica 0 on device cpu." in caught.value.__notes__


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
