"""What a DataParallel keeps of a call: nothing."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.settings import without_collector
from tests.common.threads import many_cores, wake_workers
from tests.nn.modules_of_data_parallel import Checkpointed, Recurrent, loss_of, mlp

each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


LEFT: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch-norm": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(),
    "lstm": lambda: Recurrent(nn.LSTM),
    "checkpoint": lambda: Checkpointed(0.5, use_reentrant=False, preserve_rng_state=False),
    "hooks": lambda: with_hook(mlp()),
}


def with_hook(module: nn.Module) -> nn.Module:
    """One with a hook that closes over it."""
    module.register_forward_hook(lambda *_: module.training and None)
    return module


@few(2)
@each_executor
@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("grad", [True, False])
def test_nothing_of_a_call_is_kept(make: Any, grad: bool, executor: Any):
    """In torch's words: a forward creates no reference cycles."""
    shim = DataParallel(make(), ["cpu"] * 3, executor=executor)
    seen: list[Any] = []
    shim.module.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(args[0])))
    with many_cores(), torch.set_grad_enabled(grad):
        shim(numbers(8, 3))  # whatever is made once
        seen.clear()
        with without_collector():
            x = numbers(8, 3).clone().requires_grad_(grad)
            out = shim(x)
            if grad:
                loss_of(out).backward()
            refs = [weakref.ref(x), weakref.ref(out), *seen]
            del x, out
            wake_workers()
            assert [ref() for ref in refs] == [None] * len(refs)
    assert len(seen) == 3


@each_executor
def test_nothing_of_a_failed_call_is_kept(executor: Any):
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            refs.append(weakref.ref(input))
            if input.min() < 0:
                raise ValueError("negative")
            return super().forward(input)

    refs: list[Any] = []
    shim = DataParallel(Picky(3, 2).double(), ["cpu"] * 3, executor=executor)
    with many_cores(), without_collector():
        x = -numbers(6, 3).abs()
        refs.append(weakref.ref(x))
        with contextlib.suppress(ValueError):
            shim(x)
        del x
        assert len(refs) == 4
        wake_workers()
        assert [ref() for ref in refs] == [None] * 4


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_the_module_is_garbage_when_it_is_dropped(make: Any):
    module = make()
    shim = DataParallel(module, ["cpu"] * 3)
    with many_cores():
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                shim(numbers(8, 3))
    refs = [weakref.ref(module), weakref.ref(shim), *map(weakref.ref, module.parameters())]
    del module, shim
    gc.collect()
    wake_workers()
    assert [ref() for ref in refs] == [None] * len(refs)
