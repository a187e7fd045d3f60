"""What a DataParallel copies between devices, when it copies anew, and how many bytes."""

from collections.abc import Callable
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
    function,
    made,
    moved,
    ran_by,
    running,
    there,
    to,
    vectors,
    wrapped,
)
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.virtual import Copied, record_copies, traffic

pytestmark = pytest.mark.usefixtures("four_cores")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data": lambda layer: layer.weight.data.mul_(2),
    "data-item": lambda layer: layer.weight.data[0, 0].add_(1e-9),
    "other-data": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "in-place": lambda layer: layer.weight.add_(1),
    "init": lambda layer: nn.init.ones_(layer.weight),
    "swapped-values": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "swapped-signs": lambda layer: layer.weight.data[0].mul_(-1) + layer.weight.data[1].mul_(-1),
    "other-parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.data.clone() + 1)),
    "load": lambda layer: layer.load_state_dict({"weight": there[:2] + 1, "bias": there[0, :2]}),
    "assign": lambda layer: layer.load_state_dict({"weight": there[:2] + 1, "bias": there[0, :2]}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_are_made_again_after_a_change(change: Any, frozen: bool):
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    layer.load_state_dict({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.arange(2.0)})
    shim = fdp.DataParallel(layer.requires_grad_(not frozen), [0, 1, 2])
    with torch.set_grad_enabled(frozen):
        shim(ROWS)
        with torch.no_grad():
            change(layer)
            layer.requires_grad_(not frozen)
        paths, out = moved(lambda: shim(ROWS))
        assert_same(out.detach(), layer(there).detach())
        assert paths == ["module.weight", "module.bias"] * 2


def test_copies_for_other_devices():
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    with torch.no_grad():
        for order in ([0, 1], [0, 2, 1], [0, 0], ["virtual:0", "cpu"]) * 2:
            for shim in (fdp.DataParallel(layer, order), function(False, layer, order)):
                assert_same(shim(ROWS), layer(there))
            layer.weight.mul_(1.5)
    inference, training = (fdp.DataParallel(layer, [0, 1]) for _ in range(2))
    with torch.inference_mode():
        assert_same(inference(ROWS), layer(there))
    training(ROWS).sum().backward()
    assert layer.weight.grad is not None
    inference(ROWS).sum().backward()  # its copies were made in inference mode


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


def test_copies_after_a_step_of_an_optimizer():
    layer = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64)
    shim = fdp.DataParallel(layer, [0, 1])
    optimizer = torch.optim.SGD(shim.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        paths, out = moved(lambda: shim(ROWS))
        assert paths == ["module.weight", "module.bias"]  # they have a part in the gradient
        assert_same(out, layer(there))
        out.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert moved(lambda: shim(ROWS))[0] == ["module.weight", "module.bias"]
            assert_same(shim(ROWS), layer(there))


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
