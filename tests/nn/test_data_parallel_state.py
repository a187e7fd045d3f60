"""State dicts, copies and files of a DataParallel, and the settings of its caller."""

import contextvars
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import Apply, mlp, value_and_grads

TWO = ["cpu", "cpu"]

each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


# ---------------------------------------------------------------- state


def trip_by_torch(shim: Any) -> Any:
    file = io.BytesIO()
    torch.save(shim, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


TRIPS = {"pickle": lambda shim: pickle.loads(pickle.dumps(shim)), "deepcopy": copy.deepcopy, "torch": trip_by_torch}


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_copies_and_files(trip: Any):
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, ["cpu"] * 3, dim=0, weights=[1, 2, 1], executor="threads")
    shim(x)
    again = trip(shim)
    assert type(again) is DataParallel
    for name in ("device_ids", "output_device", "src_device_obj", "dim", "_weights", "_executor", "training"):
        assert getattr(again, name) == getattr(shim, name)
    assert_same_tree(again(x).detach(), shim(x).detach())
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert_close_tree(shim(x), module(x))
    assert_close_tree(again(x), again.module(x))


def test_keys_have_the_prefix():
    shim = DataParallel(nn.BatchNorm1d(2), TWO)
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(shim.state_dict()) == [f"module.{name}" for name in names]
    assert [name for name, _ in shim.named_parameters()] == ["module.weight", "module.bias"]


# ---------------------------------------------------------------- what the caller has set


def test_gradients_are_off_where_they_are_off():
    module, x = mlp(), numbers(5, 3).requires_grad_()
    shim = DataParallel(module, TWO)
    with many_cores():
        with torch.no_grad():
            assert not shim(x).requires_grad
        with torch.inference_mode():
            assert shim(x).is_inference()
        assert_close_tree(value_and_grads(shim, module, x), value_and_grads(module, module, x))


@each_executor
def test_the_state_of_the_thread_is_that_of_the_caller(executor: Any):
    """Torch leaves most of it behind."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[Any] = []

    def fn(x: Tensor, variable: contextvars.ContextVar[str]) -> Tensor:
        product = x @ x.mT
        state = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled())
        seen.append((*state, product.dtype, torch.zeros(()).device.type, torch.zeros(()).dtype, variable.get()))
        return product

    shim = DataParallel(Apply(fn), ["cpu"] * 4, executor=executor)
    x = numbers(4, 3, 3).float()
    token, before = variable.set("set"), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with many_cores(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            out = shim(x, variable)
    finally:
        torch.set_default_dtype(before)
        variable.reset(token)
    assert seen == [(False, True, False, torch.bfloat16, "meta", torch.float16, "set")] * 4
    assert out.dtype is torch.bfloat16


def test_the_call_has_a_name_in_profiles():
    shim = DataParallel(mlp(), TWO)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        shim(numbers(4, 3))
    events = [event.key for event in profile.key_averages()]
    assert events.count("DataParallel.forward") == 1
