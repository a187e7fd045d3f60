"""What test/cpp/api/parallel.cpp of PyTorch asserts, on virtual devices."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, data_parallel
from fdp.nn import gather, parallel_apply, replicate, scatter
from tests.common.comparing import assert_same_tree
from tests.common.numbers import numbers

TWO = ("cpu", "cpu")
SCALARS = "Was asked to gather along dimension 0, but all input tensors were scalars"


pytestmark = pytest.mark.usefixtures("float64_side_by_side")


def test_differentiable_scatter():
    x = torch.ones(10, requires_grad=True)
    first, second = scatter(x, TWO)
    assert (len(first), len(second)) == (5, 5)
    (first + second).sum().backward()
    assert float(x.grad.sum()) == 10


def test_differentiable_gather():
    one, other = torch.ones(5, requires_grad=True), torch.full((5,), 2.0, requires_grad=True)
    joined = gather([one, other], "cpu")
    assert_same_tree(joined, torch.tensor([1.0] * 5 + [2.0] * 5))
    joined.sum().backward()
    assert_same_tree([one.grad, other.grad], [torch.ones(5)] * 2)


def test_cpp_replicate():
    """There also the first replica is a copy; here it is the module's own, as in Python."""
    layer = nn.Linear(3, 4)
    replicas = replicate(layer, ["cpu"] * 3)
    for replica in replicas:
        assert_same_tree(list(replica.parameters()), list(layer.parameters()))
    pointers = [param.data_ptr() for module in (layer, *replicas[1:]) for param in module.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_cpp_parallel_apply():
    layers = [nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(3, 6)]
    xs = [numbers(rows, 3) for rows in (1, 2, 3)]
    assert_same_tree(parallel_apply(layers, xs, None, ["cpu"] * 3), [a(x) for a, x in zip(layers, xs, strict=True)])


def test_cpp_parallel_apply_with_different_devices():
    outputs = parallel_apply(
        [nn.Linear(3, 4), nn.Linear(3, 4, device="meta")], [numbers(1, 3), numbers(1, 3).to("meta")]
    )
    assert [output.device.type for output in outputs] == ["cpu", "meta"]


def test_cpp_parallel_apply_rethrows_exception():
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("Badness!")

    for call in (lambda x: parallel_apply([Bad(), Bad()], [x, x]), DataParallel(Bad(), TWO)):
        with pytest.raises(RuntimeError, match=r"^Badness!") as caught:
            call(torch.ones(10, 3))
        assert caught.value.args == ("Badness!",)


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["1", "2"])
def test_cpp_places_the_output_on_the_requested_device(devices: Any):
    """In Python torch ignores output_device if there is but one device."""
    layer = nn.Linear(3, 2)
    for output in (
        data_parallel(layer, numbers(10, 3), devices, "meta"),
        DataParallel(layer, devices, "meta")(numbers(10, 3)),
    ):
        assert (output.device.type, output.shape) == ("meta", (10, 2))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_cpp_uses_all_available_devices(count: int):
    """Each replica returns a scalar; of a single device it stays one."""
    calls = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return torch.tensor(float(len(x)))

    warns = pytest.warns(UserWarning, match=SCALARS) if count > 1 else contextlib.nullcontext()
    with warns:
        output = data_parallel(Counting(), numbers(8, 10), ["cpu"] * count)
    assert_same_tree(output, torch.tensor([8.0 / count] * count) if count > 1 else torch.tensor(8.0))
    assert len(calls) == count
