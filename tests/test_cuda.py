"""On a real accelerator, where there is one: one GPU as one slot, as two, and all GPUs that there are."""

from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.helpers import assert_close_tree

pytestmark = pytest.mark.cuda
SLOTS: list[Any] = [["cuda:0"], ["cuda:0"] * 2, ["cuda:0"] * 5, ["cuda:0", "cpu"], None]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads"])
each_devices = pytest.mark.parametrize("devices", SLOTS, ids=str)


def model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    apply, (params, _) = fdp.functional(module)
    return lambda params, x: apply((params, {}), x)[0], params


@each_devices
@each_executor
def test_values_and_gradients_are_those_of_the_cpu(executor: Any, devices: Any):
    fn, params = model()
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(fn(params, x), y)

    want = torch.func.grad_and_value(loss)(params, x, y)
    on_gpu = {name: tensor.cuda() for name, tensor in params.items()}
    out = fdp.dp_apply(fn, on_gpu, x, devices, executor=executor)
    grads, value = fdp.grad_and_value(loss, devices=devices, executor=executor)(on_gpu, x, y)
    assert all(grad.is_cuda for grad in grads.values())
    assert_close_tree(out.cpu(), fn(params, x))
    assert_close_tree(({name: grad.cpu() for name, grad in grads.items()}, value.cpu()), want)


@each_executor
def test_shards_see_the_callers_stream_and_their_own_device(executor: Any):
    seen: list[Any] = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()))
        return w * x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fdp.dp_apply(fn, torch.ones((), device="cuda:0"), torch.ones(4), ["cuda:0"] * 4, executor=executor)
    assert seen == [(stream.cuda_stream, 0)] * 4


@each_executor
def test_seeds(executor: Any):
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, device=x.device) + w

    def call(seed: int) -> torch.Tensor:
        return fdp.dp_apply(fn, torch.zeros(()), torch.ones(6), ["cuda:0"] * 3, seed=seed, executor=executor)

    before = torch.cuda.get_rng_state()
    assert torch.equal(call(1), call(1))
    assert not torch.equal(call(1), call(2))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@each_executor
def test_an_inner_compiled_function(executor: Any):
    compiled = torch.compile(lambda w, x: (x @ w).sin())
    w, x = torch.randn(5, 5, device="cuda:0"), torch.randn(8, 5)
    for _ in range(3):
        out = fdp.dp_apply(compiled, w, x, ["cuda:0"] * 2, executor=executor)
        torch.testing.assert_close(out.cpu(), (x @ w.cpu()).sin(), rtol=1e-3, atol=1e-3)
