"""On a real accelerator, where there is one: one GPU as one slot, as two, and all GPUs that there are."""

from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.common.comparing import assert_close_tree

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


def batches(count: int) -> list[Any]:
    return [(torch.full((1 << 16, 5), float(i)), {"y": torch.full((1 << 16,), i)}) for i in range(count)]


@each_devices
@pytest.mark.parametrize("size", [1, 2, 4])
def test_prefetch_is_scatter(size: int, devices: Any):
    slots = fdp.available_devices() if devices is None else devices
    got = list(fdp.prefetch(batches(6), slots, size=size))
    for sharded, batch in zip(got, batches(6), strict=True):
        want = fdp.scatter(batch, slots)
        assert (sharded.devices, sharded.sizes) == (want.devices, want.sizes)
        for shard, other in zip(sharded.shards, want.shards, strict=True):
            assert_close_tree(shard, other)


def test_prefetched_batches_are_not_overwritten_while_they_are_in_use():
    """The next batches are copied on another stream into memory that this one may still be read from."""
    total = torch.zeros((), device="cuda:0")
    work = torch.randn(2048, 2048, device="cuda:0")
    for sharded in fdp.prefetch(batches(30), ["cuda:0"] * 2, size=1):
        for _ in range(5):
            work = (work @ work).clamp(-1, 1)  # the additions below wait for this
        for x, _ in sharded.shards:
            total += x.mean() + 0 * work.sum()
    assert total.item() == pytest.approx(2 * sum(range(30)), rel=1e-4)


def test_prefetch_copies_from_pinned_memory_on_a_stream_of_its_own():
    with torch.profiler.profile() as profile:
        list(fdp.prefetch(batches(4), ["cuda:0"]))
    names = [event.name for event in profile.events() or []]
    assert any("Pinned -> Device" in name for name in names)
    assert not any("Pageable -> Device" in name for name in names[1:])


def test_explain_counts_what_is_copied_to_gpus():
    fn, params = model()
    x = torch.randn(9, 5, dtype=torch.float64)
    for devices in SLOTS:
        plan = fdp.explain(fn, params, x, devices)
        with fdp.transfers() as log:
            out = fdp.dp_apply(fn, params, x, devices)
        assert list(plan.copies) == log
        assert plan.outputs is not None
        assert [leaf.shape for leaf in plan.outputs] == [tuple(out.shape)]
