"""What a DataParallel copies between devices, when it copies anew, and how many bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.accelerator.beside_torch import (
    CASES,
    CPU,
    DEVICES,
    ROWS,
    Case,
    assert_same,
    by_fdp,
    by_torch,
    cases,
    doing,
    made,
    ran_by,
    running,
    to,
    vectors,
    wrapped,
)
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.virtual import Copied, record_copies, traffic

pytestmark = pytest.mark.usefixtures("four_cores")


def test_copies_that_forward_writes_to():
    """As in torch: what a replica does to its parameters is lost, but for the first."""

    def halve_elsewhere(self: Any, x: Tensor) -> Tensor:
        if x.device != DEVICES[0]:
            self.weight.data.mul_(0.5)
        return x * self.weight

    for by in (by_torch, by_fdp):
        module = doing(halve_elsewhere)
        shim = fdp.DataParallel(module, [0, 1])
        with torch.no_grad():
            for _ in range(2):
                out = shim(ROWS) if by is by_fdp else by_torch(module, ROWS)
                factors = torch.tensor([[1.0]] * 4 + [[0.5]] * 4, dtype=torch.float64)
                assert_same(out.cpu(), ROWS * numbers(3) * factors)


def test_inputs_and_outputs_move_all_the_same():
    shim = fdp.DataParallel(nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), [0, 1], output_device="cpu")
    with torch.no_grad(), fdp.transfers() as log, record_copies() as real:
        shim(ROWS)
    assert sorted((t.path, t.nbytes) for t in log) == [
        *[("inputs[0]", 4 * 3 * 8)] * 2,
        ("module.bias", 2 * 8),
        ("module.weight", 6 * 8),
        *[("output", 4 * 2 * 8)] * 2,
    ]
    assert traffic(log) == traffic(real)


@few(2)
@cases
@pytest.mark.parametrize("options", [{"output_device": 3}, {"weights": (0, 1, 1)}], ids=str)
@vectors
def test_every_copy_of_a_call_is_in_the_log(case: Case, options: Any):
    module, args, kwargs = made(case, DEVICES[2]), *to((case.inputs(), case.kwargs()), DEVICES[1])
    shim = fdp.DataParallel(module, (2, 0, 1), dim=case.dim, **options)
    with fdp.transfers() as log, record_copies() as real:
        shim(*args, **kwargs)
    assert traffic(log) == traffic(real)
    assert all(t.path.startswith(("module.", "inputs[", "kwargs[", "output")) for t in log)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("source", [CPU, DEVICES[0]], ids=str)
def test_the_bytes_of_a_step_of_training(count: int, source: torch.device):
    """As many as torch moves, or fewer."""
    moved: dict[bool, int] = {}
    for torchs in (False, True):
        log: list[Copied] = []
        module, x = made(CASES["mlp"], DEVICES[0]), ROWS.clone().to(source).requires_grad_()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with running(torchs):
            call = wrapped(torchs, module, range(count))
            for _ in range(2):
                with record_copies() as log:
                    call(x).square().mean().backward()
                    optimizer.step()
            moved[torchs] = sum(copied.nbytes for copied in log)
    params, buffers = (sum(t.nbytes for t in ts) for ts in (module.parameters(), module.buffers()))
    inputs = ROWS.nbytes if source == CPU else ROWS.nbytes * (count - 1) // count
    outputs = 8 * 2 * 8 * (count - 1) // count
    assert moved[True] == (count - 1) * (2 * params + buffers) + 2 * inputs + 2 * outputs
    assert moved[False] <= moved[True]


@pytest.mark.parametrize("name", ["linear", "tied", "parameter-list", "buffers", "rnn", "several", "nest", "complex"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 2, 3)], ids=str)
def test_the_bytes_of_other_modules(name: str, order: Any):
    """As many as torch moves, or fewer."""
    moved = []
    for torchs in (False, True):
        with record_copies() as log:
            ran_by(torchs, wrapped, CASES[name], order, CPU)
        moved.append(sum(copied.nbytes for copied in log))
    assert moved[0] <= moved[1]
