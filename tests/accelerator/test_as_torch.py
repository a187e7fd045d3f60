"""DataParallel beside torch.nn.DataParallel, on several devices: the same calls, compared in all that they do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.beside_torch import (
    CPU,
    DEVICES,
    ORDERS,
    ROWS,
    Case,
    assert_same,
    cases,
    first_of,
    function,
    made,
    on,
    ran,
    ran_by,
    running,
    to,
    vectors,
    wrapped,
)
from tests.common.depth import few

pytestmark = pytest.mark.usefixtures("four_cores")


orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@few(2)
@cases
@orders
@vectors
def test_as_torch(case: Case, order: Any):
    got = ran_by(False, wrapped, case, order, CPU)
    assert_same(got, ran_by(True, wrapped, case, order, CPU))
    if case.alike:
        module = made(case, first_of(order))
        one = ran(
            lambda *args, **kwargs: module(*to(args, first_of(order)), **to(kwargs, first_of(order))), case, module
        )
        assert_same(got, one)


@few()
@cases
@pytest.mark.parametrize("form", [wrapped, function])
@vectors
def test_as_torch_between_other_devices(case: Case, form: Any):
    """Inputs come from a device that is none of the slots, outputs go to another one."""
    got, want = (ran_by(torchs, form, case, (2, 0), DEVICES[1], output_device=3) for torchs in (False, True))
    assert_same(got, want)
    assert on(got.output) == {DEVICES[3]}
    assert on(got.input_grads) <= {DEVICES[1]}
    assert on(got.state) <= {DEVICES[2]}


@cases
@vectors
def test_as_torch_without_gradients(case: Case):
    results = []
    for torchs in (False, True):
        module = made(case, DEVICES[1])
        with running(torchs), torch.no_grad():
            call = wrapped(torchs, module, (1, 3, 0), dim=case.dim)
            results.append([call(*case.inputs(), **case.kwargs()) for _ in range(2)])
            results[-1].append(dict(module.state_dict()))
    assert_same(*results)


class Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.maps, self.by_device, self.found, self.rows = [], {}, set(), {"all": 0}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.maps.append(out)
        self.by_device[x.device.index] = [out.detach()]
        self.found.add(x.device.index)
        self.rows["all"] += len(x)
        return out


@pytest.mark.parametrize("hooked", [False, True])
def test_lists_and_dicts_that_forward_fills(hooked: bool):
    found = []
    for torchs in (False, True):
        module = made(Case(Filling), DEVICES[0])
        if hooked:
            module.layer.register_full_backward_hook(lambda *_: None)
        with running(torchs):
            call = wrapped(torchs, module, (0, 2, 1))
            for _ in range(2):
                call(ROWS)
        module.maps.sort(key=lambda out: out.device.index)  # torch's are in the order in which threads come
        found.append((module.maps, [module.by_device[i] for i in range(3)], module.found, module.rows))
    assert_same(*found)
