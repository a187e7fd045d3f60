"""What pages about collectives build, from end to end: their functions as the pages have them, against one device."""

import functools
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import COUNTS, numbers
from tests.package.test_docs import ROOT, blocks

EXECUTORS: Any = ("auto", "sequential", "threads")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_count = pytest.mark.parametrize("slots", COUNTS)


@functools.cache
def page(name: str) -> SimpleNamespace:
    """The names that a page of the docs defines."""
    path, names = ROOT / "docs" / "how_to" / f"{name}.md", dict[str, Any](__name__="page")
    for above, code in blocks(path):
        if ">>>" not in code:
            exec(compile("\n" * above + code, path, "exec"), names)
    return SimpleNamespace(**names)


# ---- standardised


@few(3)
@each_executor
@each_count
@pytest.mark.parametrize("rows", [13, 8, 2])
def test_standardised_by_the_whole_batch(slots: int, rows: int, executor: Any):
    def one(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0, correction=0)

    x, other = numbers(rows, 3).requires_grad_(), numbers(rows, 3).requires_grad_()
    got = fdp.dp_apply(page("collectives").standardised, None, x, fdp.virtual_devices(slots), executor=executor)
    want = one(other)
    (got**3).sum().backward()
    (want**3).sum().backward()
    assert_close_tree((got, x.grad), (want, other.grad))


# ---- the convention


@each_count
def test_the_trap_is_as_large_as_the_page_says(slots: int):
    devices, w, x = fdp.virtual_devices(slots), torch.tensor(1.0, dtype=torch.float64), numbers(14)
    total = x.sum()
    torch.testing.assert_close(fdp.dp_apply(page("collectives").right, w, x, devices, out_dims=None), total)
    each = fdp.dp_apply(page("collectives").trap, w, x, devices, out_dims="list")
    torch.testing.assert_close(torch.stack(each), slots * torch.stack([part.sum() for part in x.tensor_split(slots)]))

    def summed(w: Tensor, x: Tensor) -> Tensor:
        return fdp.psum(page("collectives").total(w, x))

    def mean_of_all(w: Tensor, x: Tensor) -> Tensor:
        return summed(w, x) / fdp.psum(fdp.axis_rows())

    value, grad = fdp.value_and_grad(mean_of_all, devices=devices)(w, x)
    torch.testing.assert_close((value, grad), (total / 14, total / 14))
    value, grad = fdp.value_and_grad(summed, devices=devices, reduction="sum")(w, x)
    torch.testing.assert_close((value, grad), (slots * total, slots * total))


# ---- contrastive

PARAMS: Any = {"w": numbers(6, 8), "v": numbers(8, 4)}


def pairs(rows: int) -> tuple[Tensor, Tensor]:
    a = numbers(rows, 6)
    return a, a + 0.3 * torch.cos(5 * a)


def embed(params: Any, x: Tensor) -> Tensor:
    return F.normalize(torch.tanh(x @ params["w"]) @ params["v"], dim=1)


def contrastive_sum(params: Any, a: Tensor, b: Tensor) -> Tensor:
    """The loss of each of this slot's rows, against all rows, added up."""
    a, b = embed(params, a), embed(params, b)
    sizes = fdp.all_gather(torch.tensor([len(a)]))
    partner = sizes[: fdp.axis_index()].sum() + torch.arange(len(a))
    ab, ba = a @ fdp.all_gather(b).T, b @ fdp.all_gather(a).T
    sums = [F.cross_entropy(logits / 0.1, partner, reduction="sum") for logits in (ab, ba)]
    return torch.stack(sums).sum() / 2


def contrastive(params: Any, a: Tensor, b: Tensor) -> Tensor:
    return contrastive_sum(params, a, b) / len(a)


def contrastive_step(params: Any, a: Tensor, b: Tensor) -> Any:
    rows = fdp.psum(fdp.axis_rows())
    grads, loss = torch.func.grad_and_value(lambda p: contrastive_sum(p, a, b) / rows)(params)
    return fdp.psum((loss, grads))


def contrastive_on_one_device(params: Any, a: Tensor, b: Tensor) -> Tensor:
    logits, partner = embed(params, a) @ embed(params, b).T / 0.1, torch.arange(len(a))
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


@few(3)
@each_executor
@each_count
@pytest.mark.parametrize("rows", [15, 9, 2])
def test_contrastive_by_value_and_grad(slots: int, rows: int, executor: Any):
    want = torch.func.grad_and_value(contrastive_on_one_device)(PARAMS, *pairs(rows))[::-1]
    loss = fdp.value_and_grad(contrastive, devices=fdp.virtual_devices(slots), executor=executor)
    assert_close_tree(loss(PARAMS, *pairs(rows)), want)


@few(2)
@each_executor
@each_count
@pytest.mark.parametrize("rows", [15, 9, 2])
def test_contrastive_by_parallel_apply(slots: int, rows: int, executor: Any):
    """Slots without rows take part: what they send is empty."""
    want = torch.func.grad_and_value(contrastive_on_one_device)(PARAMS, *pairs(rows))[::-1]
    devices = fdp.virtual_devices(slots)
    batch = (fdp.scatter(x, devices, keep_empty=True) for x in pairs(rows))
    params = fdp.replicate(PARAMS, devices)
    loss, grads = fdp.parallel_apply(contrastive_step, params, *batch, executor=executor)
    for slot in range(slots):
        assert_close_tree((loss[slot], grads[slot]), want)


@each_executor
@pytest.mark.parametrize("weights", [None, (3, 1, 0, 2)], ids=["balanced", "weighted"])
def test_contrastive_differentiated_from_outside(executor: Any, weights: Any):
    devices = fdp.virtual_devices(4)

    def whole(params: Any, a: Tensor, b: Tensor) -> Tensor:
        return fdp.dp_apply(contrastive, params, (a, b), devices, out_dims="mean", executor=executor, weights=weights)

    params, others = ({name: p.clone().requires_grad_() for name, p in PARAMS.items()} for _ in range(2))
    (a, b), (c, d) = ([x.requires_grad_() for x in pairs(9)] for _ in range(2))
    got, want = whole(params, a, b), contrastive_on_one_device(others, c, d)
    leaves, other_leaves = [*params.values(), a, b], [*others.values(), c, d]
    grads = torch.autograd.grad(got, leaves, create_graph=True)
    want_grads = torch.autograd.grad(want, other_leaves, create_graph=True)
    assert_close_tree((got, grads), (want, want_grads))
    second = torch.autograd.grad([(g**2).sum() for g in grads], leaves)
    assert_close_tree(second, torch.autograd.grad([(g**2).sum() for g in want_grads], other_leaves))


def test_microbatches_need_a_row_each():
    loss = fdp.value_and_grad(contrastive, devices=fdp.virtual_devices(2), microbatches=2)
    with pytest.raises(RuntimeError, match=r"all_gather: 1 of 2 slots have rows in this microbatch"):
        loss(PARAMS, *pairs(3))
    value, _ = loss(PARAMS, *pairs(4))
    assert value < contrastive_on_one_device(PARAMS, *pairs(4))


# ---- an ensemble


def stack_of(members: int) -> tuple[list[nn.Module], dict[str, Tensor]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).double() for _ in range(members)
    ]
    params, _ = torch.func.stack_module_state(models)
    return models, {name: p.detach() for name, p in params.items()}


@few(2)
@each_executor
@pytest.mark.parametrize("members", [7, 3])
@each_count
def test_each_member_of_an_ensemble_learns_as_if_alone(slots: int, members: int, executor: Any):
    models, stacked = stack_of(members)
    x, y = numbers(10, 6), torch.arange(10) % 3
    parts: Any = fdp.scatter(stacked, fdp.virtual_devices(slots))
    losses: Any = None
    for _ in range(3):
        parts, losses = fdp.parallel_apply(page("ensembles_and_maml").train_members, parts, x, y, executor=executor)
    trained = fdp.gather(parts, 0)

    want_losses = []
    for i, model in enumerate(models):
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor(0.0)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        want_losses.append(loss.detach())
        assert_close_tree({name: p[i] for name, p in trained.items()}, {n: p.data for n, p in model.named_parameters()})
    torch.testing.assert_close(fdp.gather(losses, 0), torch.stack(want_losses))


# ---- optimizers


def regression(rows: int) -> tuple[Tensor, Tensor]:
    return numbers(rows, 6), numbers(rows, 4)


def on_one_device(make: Any, steps: int, loss: Any = contrastive_on_one_device, batch: Any = None) -> dict[str, Tensor]:
    params = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    optimizer = make(params.values())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(params, *(batch or pairs(11))).backward()
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def torch_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def torch_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


@each_executor
def test_functional_optimizers_on_replicas(executor: Any):
    update, start = page("optimizers").sgd, optree.tree_map(torch.zeros_like, PARAMS)

    def step(params: Any, state: Any, a: Tensor, b: Tensor) -> Any:
        return update(params, contrastive_step(params, a, b)[1], state)

    devices = fdp.virtual_devices(4)
    params: Any = fdp.replicate(PARAMS, devices)
    state: Any = fdp.replicate(start, devices)
    batch = [fdp.scatter(x, devices) for x in pairs(11)]
    for _ in range(5):
        params, state = fdp.parallel_apply(step, params, state, *batch, executor=executor)
    for slot in range(4):
        assert_same_tree((params[slot], state[slot]), (params[0], state[0]))
    assert_close_tree(params[0], on_one_device(torch_sgd, 5))


@each_executor
@pytest.mark.parametrize("make", [torch_sgd, torch_adam])
@pytest.mark.parametrize("slots", [1, 4])
def test_torch_optim_on_replicas(slots: int, make: Any, executor: Any):
    devices = fdp.virtual_devices(slots)
    params = fdp.replicate(PARAMS, devices)
    each = params.map(lambda shard: make(shard.values()))
    batch = [fdp.scatter(x, devices) for x in regression(11)]
    for _ in range(5):
        fdp.parallel_apply(page("optimizers").torch_step, params, each, *batch, executor=executor)
    for slot in range(slots):
        assert_same_tree(params[slot], params[0])
    assert_close_tree(fdp.unreplicate(params), on_one_device(make, 5, page("optimizers").loss, regression(11)))


# ---- unequal devices


@each_executor
@pytest.mark.parametrize("weights", [(1, 2, 3, 4), (0.3, 0, 5.5, 1e-9), (0, 0, 0, 1)], ids=str)
def test_weights_do_not_change_the_numbers(weights: Any, executor: Any):
    devices, (x, y) = fdp.virtual_devices(4), (numbers(13, 6), numbers(13, 4))
    want = torch.func.grad_and_value(page("unequal_gpus").loss)(PARAMS, x, y)[::-1]
    options: Any = {"devices": devices, "executor": executor}
    assert_close_tree(fdp.value_and_grad(page("unequal_gpus").loss, weights=weights, **options)(PARAMS, x, y), want)
    scattered = fdp.scatter((x, y), devices, weights=weights)
    assert_close_tree(
        fdp.value_and_grad(page("unequal_gpus").loss, executor=executor)(PARAMS, *scattered.unzip()), want
    )
    assert_close_tree(
        fdp.value_and_grad(contrastive, weights=weights, **options)(PARAMS, *pairs(13)),
        torch.func.grad_and_value(contrastive_on_one_device)(PARAMS, *pairs(13))[::-1],
    )
    assert_close_tree(fdp.dp_apply(embed, PARAMS, x, weights=weights, **options), embed(PARAMS, x))
