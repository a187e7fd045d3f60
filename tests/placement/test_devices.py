"""Devices: what a user may say, and what is wrong with the rest."""

from typing import Any

import pytest
import torch

import fdp
from tests.common.depth import few
from tests.common.functions import never
from tests.common.numbers import numbers

CPU = torch.device("cpu")
HERE = fdp.available_devices()
no_accelerator = pytest.mark.skipif(HERE[0].type != "cpu", reason="this machine has an accelerator")
W = torch.tensor(2.0, dtype=torch.float64)


def devices_of(devices: Any) -> tuple[torch.device, ...]:
    return fdp.replicate(W, devices).devices


def mul(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return w * x


def test_virtual_devices_are_repeats():
    assert fdp.virtual_devices(3) == (CPU, CPU, CPU)
    assert fdp.virtual_devices(2, torch.device("meta")) == (torch.device("meta"),) * 2


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_virtual_devices_of_no_positive_number(count: Any):
    with pytest.raises(ValueError, match=rf"virtual_devices: expected a positive number of slots, got {count!r}"):
        fdp.virtual_devices(count)


@no_accelerator
def test_without_accelerators_none_is_one_cpu():
    assert fdp.available_devices() == (CPU,)
    assert devices_of(None) == (CPU,)


@pytest.mark.cuda
def test_none_is_all_accelerators():
    assert devices_of(None) == fdp.available_devices()
    assert len(fdp.available_devices()) == torch.cuda.device_count()


@pytest.mark.parametrize(
    "devices", ["cpu", torch.device("cpu"), ["cpu"], (torch.device("cpu"),), "cpu:0", torch.device("cpu", 0)]
)
def test_one_device_however_it_is_spelled(devices: Any):
    assert devices_of(devices) == (CPU,)
    if isinstance(devices, str | torch.device):
        assert fdp.dp_apply(mul, W, numbers(5), ["cpu"] * 2, output_device=devices).device == CPU
        assert fdp.gather(fdp.scatter(numbers(5), ["cpu"] * 2), device=devices).device == CPU


def test_a_sequence_is_a_slot_each():
    assert devices_of(["cpu", torch.device("cpu"), "meta"]) == (CPU, CPU, torch.device("meta"))
    assert len(fdp.scatter(numbers(9), ("cpu",) * 4)) == 4


def test_inside_a_mapped_function_none_is_its_own_device():
    seen: list[Any] = []

    def fn(w: Any, x: Any) -> Any:
        seen.append((devices_of(None), len(fdp.scatter(numbers(4), None)), fdp.dp_apply(mul, w, x).device))
        return x

    meta = torch.device("meta")
    fdp.dp_apply(fn, W, numbers(5), "meta")
    fdp.dp_apply(fn, W, numbers(5), fdp.virtual_devices(2))
    assert seen == [((meta,), 1, meta), ((CPU,), 1, CPU), ((CPU,), 1, CPU)]
    assert devices_of(None) == HERE  # and outside again it is not


# ---- what is wrong


EVERYWHERE = {
    "scatter": lambda devices: fdp.scatter(numbers(3), devices),
    "replicate": lambda devices: fdp.replicate(W, devices),
    "dp_apply": lambda devices: fdp.dp_apply(mul, W, numbers(3), devices),
    "shard_map": lambda devices: fdp.shard_map(mul, devices=devices, in_dims=(None, 0))(W, numbers(3)),
    "parallel_apply": lambda devices: fdp.parallel_apply(mul, W, numbers(3), devices=devices),
    "value_and_grad": lambda devices: fdp.value_and_grad(mul, devices=devices)(W, numbers(3)),
    "grad": lambda devices: fdp.grad(mul, devices=devices)(W, numbers(3)),
    "grad_and_value": lambda devices: fdp.grad_and_value(mul, devices=devices)(W, numbers(3)),
}

WRONG = {
    "empty-list": ([], ValueError, "devices is empty. Available here: '"),
    "empty-tuple": ((), ValueError, "devices is empty. Available here: '"),
    "int": (2, TypeError, r"devices=2 is a bare number.*devices=fdp\.virtual_devices\(2\).*devices=\[2\]"),
    "unknown": ("gpu", ValueError, "'gpu' is no device that torch knows. Available here: '"),
    "unknown-in-list": (["cpu", "gpu"], ValueError, "'gpu' is no device that torch knows. Available here: '"),
    "no-such-index": ([99], ValueError, "there is no accelerator with index 99. Available here: '"),
    "negative-index": ([-1], ValueError, "there is no accelerator with index -1. Available here: '"),
    "cuda:99": ("cuda:99", ValueError, "device 'cuda:99' is not available. Available here: '"),
    "cuda:99-device": (torch.device("cuda:99"), ValueError, "device 'cuda:99' is not available. Available here: '"),
    "none-in-list": ([None], TypeError, "None is no device; expected e.g. 'cpu', 'cuda:1', 1 or a torch.device"),
    "bool-in-list": ([True], TypeError, "True is no device"),
    "tensor-in-list": ([W], TypeError, "tensor.* is no device; expected e.g. 'cpu'"),
    "set": ({"cpu"}, TypeError, "devices must be None, a device or a sequence of devices, got set"),
    "float": (1.5, TypeError, "devices must be None, a device or a sequence of devices, got float"),
}


@few(2)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("where", EVERYWHERE)
def test_wrong_devices(where: str, name: str):
    devices, error, message = WRONG[name]
    with pytest.raises(error, match=rf"^{where}: {message}"):
        EVERYWHERE[where](devices)


@no_accelerator
@pytest.mark.parametrize("devices", ["cuda", ["cpu", "cuda:0"], "mps", [0]])
def test_accelerators_on_a_machine_without(devices: Any):
    message = r"(device '.*' is not available|there is no accelerator with index 0)\. Available here: 'cpu'\. To try"
    with pytest.raises(ValueError, match=rf"scatter: {message}"):
        fdp.scatter(numbers(3), devices)
    with pytest.raises(ValueError, match="virtual_devices: device 'cuda' is not available"):
        fdp.virtual_devices(2, "cuda")


@pytest.mark.parametrize("devices", [True, 0, -1])
def test_advice_for_a_bare_number_works(devices: Any):
    """No advice to write what is an error again."""
    with pytest.raises(TypeError, match="scatter: devices") as info:
        fdp.scatter(numbers(3), devices)
    assert f"virtual_devices({devices!r})" not in str(info.value)
    assert f"devices=[{devices!r}]" in str(info.value) or isinstance(devices, bool) or devices < 0


@pytest.mark.parametrize("where", ["dp_apply", "shard_map", "value_and_grad", "gather"])
@pytest.mark.parametrize(("device", "error"), [("gpu", ValueError), ("cuda:99", ValueError), (["cpu"], TypeError)])
def test_wrong_output_device(where: str, device: Any, error: type[Exception]):
    calls = {
        "dp_apply": lambda: fdp.dp_apply(never, W, numbers(3), "cpu", output_device=device),
        "shard_map": lambda: fdp.shard_map(never, devices="cpu", output_device=device)(numbers(3)),
        "value_and_grad": lambda: fdp.value_and_grad(never, devices="cpu", output_device=device)(W, numbers(3)),
        "gather": lambda: fdp.gather(fdp.scatter(numbers(3), "cpu"), device=device),
    }
    with pytest.raises(error, match=rf"^{where}: .*(is no device|not available)"):
        calls[where]()


@pytest.mark.parametrize("slots", [1, 2])
def test_everything_lands_on_the_output_device(slots: int):
    def fn(w: Any, x: Any) -> Any:
        return {"cat": w * x, "mean": x.mean(), "none": w, "list": x, "items": [x]}

    dims = {"cat": 0, "mean": "mean", "none": None, "list": "list", "items": "items"}
    out = fdp.dp_apply(fn, W, numbers(6), ["cpu"] * slots, out_dims=dims, output_device="meta")
    tensors = [out["cat"], out["mean"], out["none"], *out["list"], *out["items"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_by_default_results_land_on_the_device_of_slot_0():
    x = numbers(6)
    assert fdp.dp_apply(mul, W, x, ["meta", "cpu"]).device.type == "meta"
    assert fdp.gather(fdp.scatter(x, ["meta", "cpu"])).device.type == "meta"
    value, grads = fdp.value_and_grad(lambda w, x: (w * x).mean(), devices=["cpu"] * 2)(W, x)
    assert value.device == grads.device == CPU
