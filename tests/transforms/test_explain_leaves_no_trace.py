"""`explain`: nothing is drawn, written or compiled, and modules are as before."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fdp
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import children_of
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SLOTS = fdp.virtual_devices(3)
GPUS = [f"cuda:{i}" for i in range(3)]


def linear(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def leaf(plan: fdp.Plan, path: str) -> fdp.PlannedLeaf:
    (found,) = [leaf for leaf in (*plan.arguments, *(plan.outputs or ())) if leaf.path == path]
    return found


# ---- modules


def modules() -> dict[str, tuple[nn.Module, Tensor, Any]]:
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))
    return {
        "norm": (norm, torch.randn(7, 3), None),
        "lstm": (nn.LSTM(3, 4, batch_first=True), torch.randn(5, 6, 3), ((0, (1, 1)), "mean")),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(5, 6, 8), None),
        "attention-eval": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(5, 6, 8), None),
        "convolution": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), torch.randn(4, 2, 5, 5), None),
    }


@few()
@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("name", modules())
def test_a_module_is_as_before(name: str, executor: Any):
    """The call after `explain` gives the numbers of a call without it; parameters, buffers and random state stay."""
    torch.manual_seed(0)
    module, x, dims = modules()[name]
    options = {"executor": executor, "seed": 3} | ({} if dims is None else {"out_dims": dims})
    plain, state = fdp.functional(module)
    want = fdp.dp_apply(plain, state, x, SLOTS, **options)
    apply, _ = fdp.functional(module)
    values, random_state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    with unharmed(state, x), many_cores():
        for _ in range(2):
            plan = fdp.explain(apply, state, x, SLOTS, **options)
            assert plan.outputs is not None, plan.problem
            found = [(leaf.shape, leaf.dtype) for leaf in plan.outputs]
            assert found == [(tuple(t.shape), t.dtype) for t in sorted_of(want)]
            assert_same_tree(fdp.dp_apply(apply, state, x, SLOTS, **options), want)
    assert_same_tree(dict(module.state_dict()), values)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(isinstance(tensor, FakeTensor) for tensor in [*module.parameters(), *module.buffers()])


def sorted_of(tree: Any) -> list[Tensor]:
    """Tensors of a tree, dicts by their keys."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree) for tensor in sorted_of(tree[key])]
    return [tensor for child in children_of(tree) or [] for tensor in sorted_of(child)]


# ---- nothing is left


def test_random_numbers_are_not_drawn():
    generator = torch.Generator().manual_seed(1)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape) + torch.rand(x.shape, generator=generator) + torch.randperm(3)
        return nn.functional.dropout(x + noise) + torch.empty(3).uniform_() + torch.bernoulli(x)

    before = torch.get_rng_state(), generator.get_state(), random.getstate()
    for seed in (None, 3):
        assert fdp.explain(fn, None, torch.rand(7, 3), SLOTS, seed=seed).problem is None
        torch.set_rng_state(before[0]) if seed is None else None
        before = torch.get_rng_state(), *before[1:]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert random.getstate() == before[2]


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "rows": lambda held, w, x: held.add_(x.sum()),
    "number": lambda held, w, x: held.mul_(2),
    "fill": lambda held, w, x: held.fill_(7),
    "part": lambda held, w, x: held[0].add_(1),
    "copy": lambda held, w, x: held.copy_(x[0]),
    "out": lambda held, w, x: torch.add(x[0], 1, out=held),
    "history": lambda held, w, x: held.add_((x @ w).sum()),
    "data": lambda held, w, x: held.data.add_(1),
    "zero": lambda held, w, x: held.zero_(),
}


@pytest.mark.parametrize("shape", [(3,), ()], ids=["vector", "number"])
@pytest.mark.parametrize("write", WRITES)
def test_tensors_from_elsewhere_are_not_written_to(write: str, shape: tuple[int, ...]):
    held, w = numbers(*shape).clone(), numbers(3).requires_grad_()  # torch detaches no view in place
    if not shape and write in ("part", "copy", "out"):
        return

    def fn(w: Tensor, x: Tensor) -> Tensor:
        WRITES[write](held, w, x)
        return x

    with unharmed(held, w):
        plan = fdp.explain(fn, w, numbers(7, 3), SLOTS)
    assert plan.problem is None
    assert (held.requires_grad, held.grad_fn, type(held)) == (False, None, Tensor)


def test_gradients_of_tensors_from_elsewhere_are_not_there():
    held = numbers(3).requires_grad_()

    def fn(_: Any, x: Tensor) -> Tensor:
        (x @ held).sum().backward()
        return x

    assert fdp.explain(fn, None, numbers(7, 3), SLOTS).problem is None
    assert held.grad is None


def test_a_tensor_from_elsewhere_on_another_device_is_told():
    held = numbers(3)
    plan = fdp.explain(lambda w, x: x * held, None, numbers(7, 3), GPUS)
    assert "cuda:0" in (plan.problem or "")
    assert "cpu" in (plan.problem or "")


def test_compiled_functions_are_not_compiled_nor_run():
    """Their kernels would read data that is not there."""
    count: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        count.append(len(inputs))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda w, x: (x @ w).sin(), backend=backend)
    w, x = numbers(3, 2), numbers(7, 3)
    for _ in range(2):
        assert leaf(fdp.explain(compiled, w, x, SLOTS), "out").shape == (7, 2)
    assert count == []
    torch.testing.assert_close(compiled(w, x), (x @ w).sin())
    assert len(count) == 1
    assert fdp.explain(compiled, w, x, SLOTS).problem is None


def test_several_at_once():
    w, x, plans = numbers(3, 2), numbers(7, 3), list[fdp.Plan]()
    threads = [threading.Thread(target=lambda: plans.append(fdp.explain(linear, w, x, SLOTS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(plan) for plan in plans}) == 1
    assert len(plans) == 4


def test_open_logs_see_nothing():
    with fdp.transfers() as log:
        plan = fdp.explain(linear, numbers(3, 2), numbers(7, 3), GPUS)
        assert log == []
        fdp.scatter(numbers(2), ["meta"])
    assert len(plan.copies) == 8
    assert len(log) == 1


def test_the_functions_own_transforms_and_an_inner_explain():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        fdp.explain(linear, w, x, GPUS)
        return torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x)

    x, w = numbers(7, 3), numbers(3, 2)
    out = fdp.dp_apply(fn, w, x, SLOTS)
    plan = fdp.explain(lambda w, x: torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x), w, x, SLOTS)
    assert leaf(plan, "out").shape == tuple(out.shape)


# ---- what is left behind


def test_casts_made_meanwhile_are_forgotten():
    net, x = nn.Linear(3, 2), numbers(6, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert fdp.explain(lambda _, x: net(x), None, x, fdp.virtual_devices(2)).problem is None
        out = net(x)
    assert type(out) is Tensor
    out.float().sum().backward()
    assert net.weight.grad is not None
    assert type(net.weight.grad) is Tensor


def test_a_tensor_that_a_cache_keeps_is_an_error_when_it_is_used():
    cache: list[Tensor] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        if not cache:
            cache.append(torch.ones(3))
        return x * w * cache[0]

    w, x = numbers(3), numbers(6, 3)
    assert fdp.explain(fn, w, x, fdp.virtual_devices(2)).problem is None
    with pytest.raises(RuntimeError, match=r"without data: fdp.explain has called .* Clear that, or make it anew"):
        fdp.dp_apply(fn, w, x, fdp.virtual_devices(2))
    cache.clear()
    assert_same_tree(fdp.dp_apply(fn, w, x, fdp.virtual_devices(2)), x * w)


@pytest.mark.parametrize(
    "convert", [nn.Module.double, nn.Module.half, lambda net: net.to("meta")], ids=["64", "16", "to"]
)
def test_a_module_that_the_function_converts_keeps_its_data(convert: Any):
    net = nn.Sequential(nn.Linear(3, 2), nn.LSTM(2, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plan = fdp.explain(lambda _, x: convert(net)[0](x), None, numbers(6, 3).float(), fdp.virtual_devices(2))
    assert plan.problem is not None
    assert "converts a" in plan.problem
    assert_same_tree(dict(net.state_dict()), before)
    net.double()  # as ever outside


def test_a_lazy_module_stays_lazy():
    net = nn.LazyLinear(2)
    plan = fdp.explain(lambda _, x: net(x), None, numbers(6, 3).float(), fdp.virtual_devices(2))
    assert plan.problem is not None
    assert "call it once before" in plan.problem
    assert net(numbers(6, 3).float()).shape == (6, 2)
