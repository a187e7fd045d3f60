"""scatter, gather, replicate and parallel_apply beside those of torch, on several devices."""

from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import parallel

import fdp
from tests.accelerator.beside_torch import (
    CASES,
    CPU,
    DEVICES,
    Where,
    assert_same,
    beside,
    made,
    running,
    to,
    values,
    wrapped,
)
from tests.accelerator.torch_copies import torch_copies
from tests.common.containers import Pixel, Point
from tests.common.numbers import numbers

pytestmark = pytest.mark.usefixtures("four_cores")


@values
@pytest.mark.parametrize("source", [CPU, DEVICES[1]], ids=str)
@pytest.mark.parametrize("devices", [(0, 1), (2, 1, 3), (1,)], ids=str)
def test_scatter_as_torch(value: Any, source: torch.device, devices: tuple[int, ...]):
    assert_same(*beside("scatter")(to(value, source), devices))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_scatter_along_a_dim_as_torch(dim: int):
    assert_same(*beside("scatter")(numbers(3, 4, 5), (0, 1), dim))
    got, want = beside("scatter_kwargs")((numbers(3, 4, 5),), {"y": [numbers(3, 4, 5)]}, (0, 1), dim)
    assert_same(got, want)
    parts = [args[0] for args in got[0]]
    assert_same(*beside("gather")(parts, 1, dim))


CALLS: dict[str, Any] = {
    "positional": ((numbers(7), "a"), {}),
    "keywords": ((), {"x": numbers(7), "y": None}),
    "both": ((numbers(7),), {"x": numbers(7, 2), "y": "b"}),
    "none": ((), None),
    "only-none": ((None,), None),
}


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS)
def test_scatter_kwargs_as_torch(args: Any, kwargs: Any):
    assert_same(*beside("scatter_kwargs")(args, kwargs, (1, 0, 3)))


def test_a_chunk_that_is_there_already_is_a_view():
    for chunks in beside("scatter")(x := torch.ones(4, device=DEVICES[1]), (0, 1)):
        for chunk in chunks:
            chunk.zero_()
    assert x.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("source", [CPU, DEVICES[1]], ids=str)
def test_gradients_of_scatter_as_torch(source: torch.device):
    grads = []
    for scatter in (fdp.nn.scatter, parallel.scatter):
        x = numbers(5, 2).to(source).requires_grad_()
        with torch_copies():
            first: Any = scatter(x, (0, 1))[0]
            (grad,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
            grads.append((grad, *torch.autograd.grad(grad.sum(), x)))
    assert_same(*grads)
    assert grads[0][0].tolist()[3:] == [[0, 0], [0, 0]]


OUTPUTS: dict[str, Any] = {
    "tensor": numbers(2, 3),
    "no-rows": numbers(0, 3),
    "ints": torch.arange(2),
    "none": None,
    "tuple": (numbers(2), None, numbers(2, 3)),
    "list": [numbers(2), [numbers(1, 2)]],
    "dict": {"b": numbers(2), "a": (numbers(2, 2), None)},
    "ordered-dict": OrderedDict(b=numbers(2), a=numbers(2)),
    "namedtuple": Point(numbers(2), Pixel(numbers(2, 2), None)),
    "empty-containers": [numbers(2), (), [], {}],
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("target", [0, DEVICES[2], "virtual:3", "cpu"], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_gather_as_torch(output: Any, target: Any, dim: int):
    assert_same(*beside("gather")([to(output, device) for device in DEVICES[1:]], target, dim))


def test_gather_complex_numbers():
    outputs = [numbers(2, 3, dtype=torch.complex128).to(device) for device in DEVICES[:2]]
    assert_same(*beside("gather")(outputs, 0, 1))


@pytest.mark.parametrize("target", [0, -1])
@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU tensor:FutureWarning")
def test_gather_scalars_as_torch(target: int):
    results, grads = [], []
    for gather in (fdp.nn.gather, parallel.gather):
        outputs = [(1 + numbers(1)[0]).to(device).requires_grad_() for device in DEVICES[:3]]
        with torch_copies():
            with pytest.warns(UserWarning, match="along dimension 0, but all input tensors were scalars"):
                results.append(gather(outputs, target))
            results[-1].pow(3).sum().backward()
        grads.append([output.grad for output in outputs])
        assert [grad.device for grad in grads[-1] if grad is not None] == DEVICES[:3]
    assert_same(*results)
    assert_same(*grads)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("devices", [(1, 0), DEVICES[1:], ["virtual:1", "virtual:1"]], ids=["ints", "devices", "names"])
def test_replicate_as_torch(devices: Any, detach: bool):
    module = made(CASES["mlp"], DEVICES[1])
    for replicas in beside("replicate")(module, devices, detach):
        for replica, device in zip(replicas, devices, strict=True):
            want = torch.device("virtual", device) if isinstance(device, int) else torch.device(device)
            weight, mean = replica[0].weight, replica[1].running_mean
            assert weight.device == mean.device == want
            assert type(replica) is type(module)
            assert weight.requires_grad is not detach or weight is module[0].weight
            assert_same(weight.cpu(), module[0].weight.cpu())
            x = numbers(3, 3).to(want)
            assert_same(replica.eval()(x).cpu(), made(CASES["mlp-eval"], CPU)(numbers(3, 3)))
        assert replicas[0][1].running_mean is not replicas[1][1].running_mean
        assert replicas[0][1].running_mean.host.data_ptr() == module[1].running_mean.host.data_ptr()


def test_what_is_shared_is_shared_in_replicas():
    for replicas in beside("replicate")(made(CASES["tied"], DEVICES[0]), (0, 1)):
        for replica in replicas:
            assert replica.first is replica.third
            assert replica.first.weight is replica.second.weight


def test_no_devices_no_replicas():
    assert beside("replicate")(nn.Linear(1, 1), []) == ([], [])


def test_parallel_apply_as_torch():
    layers = [nn.Linear(3, 2, device=device, dtype=torch.float64) for device in DEVICES[:2]]
    rows = [numbers(i + 1, 3).to(device) for i, device in enumerate(DEVICES[:2])]
    for inputs, kwargs in (
        (rows, None),
        ([(x,) for x in rows], [{}, {}]),
        ([[x] for x in rows], None),
        ([(), ()], [{"input": x} for x in rows]),
    ):
        assert_same(*beside("parallel_apply")(layers, inputs, kwargs, (0, 1)))
    assert_same(*beside("parallel_apply")(layers[1:], rows[1:], None, (1,)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((2, 1, None, None), "The number of modules 2 is not equal to the number of inputs 1"),
        ((1, 1, 2, None), "The number of modules 1 is not equal to the number of kwargs_tup 2"),
        ((2, 2, 2, 3), "The number of modules 2 is not equal to the number of devices 3"),
    ],
)
def test_parallel_apply_counts_as_torch(lengths: Any, message: str):
    modules, inputs, kwargs, devices = (cast(Any, [{}] * n if n else None) for n in lengths)
    for apply in (fdp.nn.parallel_apply, parallel.parallel_apply):
        with pytest.raises(AssertionError, match=message), torch_copies():
            apply(modules, inputs, kwargs, devices)


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 3), (3,)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_replica_is_on_its_device(order: tuple[int, ...], grad: bool):
    for torchs in (False, True):
        with running(torchs), torch.set_grad_enabled(grad), torch.accelerator.device_index(order[0]):
            found = wrapped(torchs, Where().to(DEVICES[order[0]]), order)(numbers(3))
        assert found.tolist() == [[index] * 4 for index in order]


def test_with_one_device_the_current_one_stays():
    for torchs in (False, True):
        with running(torchs):
            assert wrapped(torchs, Where().to(DEVICES[2]), [2])(numbers(3)).tolist() == [[2, 2, 2, 0]]
