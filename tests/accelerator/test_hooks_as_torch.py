"""Hooks, gradients of gradients and calls side by side, beside torch.nn.DataParallel."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.accelerator.beside_torch import (
    CASES,
    DEVICES,
    ROWS,
    assert_same,
    by_fdp,
    by_torch,
    doing,
    first_of,
    function,
    made,
    running,
    there,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("four_cores")


# ---- hooks


@pytest.mark.parametrize("backward", [False, True])
def test_hooks_of_modules_as_torch(backward: bool):
    """Those of a part fire once per device, those of the wrapper once."""
    fired = []
    for torchs in (False, True):
        module, log = made(CASES["layer-norm"], DEVICES[1]), []
        with running(torchs):
            shim: Any = wrapped(torchs, module, (1, 0, 3))
            for part, name in ((module[1], "part"), (shim, "wrapper")):

                def note(_: Any, before: Any, after: Any, name: str = name, log: Any = log) -> None:
                    log.append((name, str(before[0] is not None and before[0].device), len(after[0])))

                (part.register_full_backward_hook if backward else part.register_forward_hook)(note)
            shim(ROWS.clone().requires_grad_()).sum().backward()
        fired.append(sorted(log))
    assert fired[0] == fired[1]
    assert Counter(name for name, *_ in fired[0]) == {"part": 3, "wrapper": 1}


def test_hooks_of_parameters_as_torch():
    """They see the gradient of all replicas, once."""
    seen: list[list[Any]] = [[], []]
    for torchs in (False, True):
        layer = nn.Linear(3, 2, device=DEVICES[1], dtype=torch.float64)
        layer.load_state_dict({"weight": there[:2], "bias": there[0, :2]})
        layer.weight.register_hook(seen[torchs].append)
        layer.weight.register_post_accumulate_grad_hook(lambda p, log=seen[torchs]: log.append(p.grad))
        with running(torchs):
            out = wrapped(torchs, layer, (1, 0, 3))(ROWS)
            out.square().sum().backward(retain_graph=True)
            out.square().sum().backward()
    assert len(seen[0]) == 4
    assert_same(*seen)


def test_inputs_that_forward_writes_to():
    """As in torch: a chunk that is on its device is a part of the caller's tensor."""
    module = doing(lambda self, x: x.mul_(2) * self.weight)
    results = []
    for by in (by_torch, by_fdp):
        x = ROWS.clone().to(DEVICES[1])
        with torch.no_grad():
            results.append([x, by(module, x)])
    assert_same(*results)


# ---- gradients of gradients, calls side by side


def penalty(call: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    (grad,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("form", [wrapped, function])
def test_a_gradient_penalty(order: Any, form: Any):
    """As in torch."""
    results = []
    for torchs in (False, True, None):
        module, x = made(CASES["tied"], first_of(order)), ROWS.to(DEVICES[1]).requires_grad_()
        if torchs is None:
            results.append(penalty(lambda x, module=module: module(x.to(first_of(order))), module, x))
        else:
            with running(torchs):
                results.append(penalty(form(torchs, module, order), module, x))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_gradients_of_functional_call():
    module = made(CASES["layer-norm"], DEVICES[1])
    shim = fdp.DataParallel(module, [1, 0, 3])

    def loss(params: Any, call: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(call, params, (x,)).square().sum()

    params = {name: p.detach() for name, p in module.named_parameters()}
    want = torch.func.grad(loss)(params, module, ROWS.to(DEVICES[1]))
    got = torch.func.grad(loss)({f"module.{name}": p for name, p in params.items()}, shim, ROWS)
    assert_same({name.removeprefix("module."): grad for name, grad in got.items()}, want)


def test_calls_from_several_threads():
    module = made(CASES["layer-norm"], DEVICES[1])
    shim = fdp.DataParallel(module, [1, 0, 3])
    want = module(ROWS.to(DEVICES[1])).detach()

    def work(i: int) -> None:
        with torch.set_grad_enabled(i % 2 == 0), torch.accelerator.device_index(i % 4):
            assert_same(shim(ROWS * 1).detach(), want)
            assert torch.accelerator.current_device_index() == i % 4

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))
