"""Where modules, inputs, outputs and buffers of a DataParallel are."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.accelerator.beside_torch import (
    CASES,
    CPU,
    DEVICES,
    ROWS,
    Where,
    assert_same,
    beside,
    doing,
    first_of,
    function,
    made,
    on,
    ran,
    ran_by,
    running,
    there,
    to,
    wrapped,
)
from tests.common.containers import Point
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.virtual import record_copies

pytestmark = pytest.mark.usefixtures("four_cores")


WRONG = (
    r"module must have its parameters and buffers on device {} \(device_ids\[0\]\) but found one of them on device: {}$"
)


@few(2)
@pytest.mark.parametrize("order", [None, (0, 1), (1, 0), (1,)], ids=str)
@pytest.mark.parametrize("second", [CPU, *DEVICES[:2]], ids=str)
@pytest.mark.parametrize("first", [CPU, *DEVICES[:2]], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_a_module_on_the_wrong_device(form: Any, order: Any, first: torch.device, second: torch.device):
    """As in torch: not before the call, so that the module may move after wrapping."""
    want = first_of(order)
    for torchs in (False, True):
        torch.manual_seed(0)
        layers = nn.Linear(3, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        right = nn.Sequential(*layers).eval()(ROWS)
        module = nn.Sequential(layers[0].to(first), layers[1].to(second))
        with running(torchs):
            call = form(torchs, module, order)
            moved = form is wrapped and order == (1,)
            if not moved and {first, second} != {want}:
                found = next(tensor.device for tensor in module.state_dict().values() if tensor.device != want)
                with pytest.raises(RuntimeError, match=WRONG.format(want, found)):
                    call(ROWS)
                (call if form is wrapped else module).to(want)
            out = call(ROWS)
        assert out.device == want
        assert_same(out.cpu(), right)


TARGETS: dict[str, Any] = {"int": 3, "name": "virtual:2", "device": DEVICES[1], "cpu": "cpu", "cpu-device": CPU}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("ids", [[0, 1], DEVICES[:2], ["virtual:0", DEVICES[1]], range(2), [0]], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_devices_in_all_their_forms(form: Any, ids: Any, target: Any):
    module, x = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), ROWS.clone().requires_grad_()
    call = form(False, module, ids, output_device=target)
    want = DEVICES[3] if target == 3 else torch.device(target)
    if form is wrapped:
        assert call.device_ids == [0, 1][: len(ids)]
        assert call.output_device == (CPU if want == CPU else want.index)
        assert call.src_device_obj == DEVICES[0]
    out = call(x)
    assert out.device == want
    assert_same(out.cpu(), module(there).cpu())
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.device == CPU


@pytest.mark.parametrize("ids", [["cpu", "virtual:1"], ["virtual:1", "cpu"], ["virtual:0", "cpu", 1, CPU]], ids=str)
@pytest.mark.parametrize("case", ["linear", "mlp", "buffers", "nest", "rnn", "several"])
def test_the_cpu_among_the_devices(case: str, ids: Any):
    """Torch takes devices of one kind only."""
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        nn.DataParallel(nn.Linear(1, 1), ids)
    first, virtual = torch.device(ids[0]), (0, 1, 2, 3)[: len(ids)]
    module = made(CASES[case], first)
    got = ran(fdp.DataParallel(module, ids), CASES[case], module)
    want = ran_by(True, wrapped, CASES[case], virtual, CPU)
    assert on(got.output) == {first}
    assert on(got.state) <= {first}
    assert_same(to(list(got), CPU), to(list(want), CPU))


def test_components_on_several_devices():
    outputs: list[Any] = [Point(there, ROWS.to(DEVICES[1])), Point(ROWS.to(DEVICES[2]), there)]
    for target in (0, 3, "cpu"):
        got, want = beside("gather")(outputs, target)
        assert_same(got, want)
        assert on(got) == {CPU if target == "cpu" else DEVICES[target]}


@pytest.mark.parametrize("ids", [[0], [2], ["cpu"]], ids=str)
def test_the_constructor_moves_the_module_to_the_one_device(ids: Any):
    module = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), ids).module
    assert {tensor.device for tensor in module.state_dict().values()} == {CPU if ids == ["cpu"] else DEVICES[ids[0]]}
    several = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), [0, 2])
    assert {tensor.device for tensor in several.state_dict().values()} == {DEVICES[1]}


def devices_seen(rows: int, order: Any, **options: Any) -> list[int]:
    module = Where().to(first_of(order))
    return fdp.DataParallel(module, order, **options)(numbers(rows))[:, 0].int().tolist()


def test_devices_without_rows_do_nothing():
    assert devices_seen(2, None) == [0, 1]
    assert devices_seen(5, None) == [0, 1, 2]  # 2, 2, 1
    assert devices_seen(1, (3, 0)) == [3]
    shim = fdp.DataParallel(doing(lambda self, x: x * self.weight))
    with record_copies() as log:
        shim(ROWS[:2])
    assert {copied.target for copied in log} == {DEVICES[0], DEVICES[1]}


WEIGHTS: dict[str, tuple[tuple[float, ...], list[int]]] = {
    "balanced": ((1, 1, 1), [2, 0, 3]),
    "not-the-first": ((0, 1, 1), [0, 3]),
    "only-the-last": ((0, 0, 1), [3]),
    "only-the-first": ((1, 0, 0), [2]),
    "uneven": ((3, 0, 1), [2, 3]),
}


@pytest.mark.parametrize(("weights", "seen"), WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("case", ["linear", "buffers", "layer-norm", "nest", "rnn"])
def test_weights(weights: Any, seen: list[int], case: str):
    order = (2, 0, 3)
    assert devices_seen(7, order, weights=weights) == seen
    got = ran_by(False, wrapped, CASES[case], order, CPU, weights=weights)
    want = ran_by(False, wrapped, CASES[case], order[:1], CPU)
    assert_same(got, want)
    assert on(got.state) <= {DEVICES[2]}


def test_buffers_of_the_first_replica_with_rows():
    module, alone = made(CASES["mlp"], DEVICES[2]), made(CASES["mlp"], CPU)
    fdp.DataParallel(module, (2, 0, 3), weights=(0, 1, 1))(ROWS)
    alone(ROWS[:4])
    assert on(dict(module.state_dict())) == {DEVICES[2]}
    assert_same({key: value.cpu() for key, value in module.state_dict().items()}, dict(alone.state_dict()))


def test_copies_of_the_wrapper():
    shim: Any = fdp.DataParallel(made(CASES["mlp"], DEVICES[1]), [1, 0], output_device="cpu", weights=(1, 3))
    want = shim(ROWS)
    for other in (copy.deepcopy(shim), pickle.loads(pickle.dumps(shim))):
        assert (other.device_ids, other.output_device, other.src_device_obj) == ([1, 0], CPU, DEVICES[1])
        assert on(dict(other.state_dict())) == {DEVICES[1]}
        assert other.module[0].weight is not shim.module[0].weight
        assert_same(other(ROWS), want)
        with torch.no_grad():
            other.module[0].weight.zero_()
        assert not torch.equal(other(ROWS), want)
