"""Collectives between devices that are kept apart: where results are, what moves, and state that stays where it is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

DEVICES = [torch.device("virtual", i) for i in range(4)]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads"])


def on_cpu(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.cpu(), tree)


@each_executor
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 3), (0, 0, 1)], ids=str)
def test_results_are_on_the_device_of_their_slot(executor: Any, order: tuple[int, ...]):
    slots = [DEVICES[i] for i in order]
    n, x = len(order), numbers(2 * len(order), 3)
    parts = x.split(2)

    def everything(x: Tensor) -> tuple[Any, ...]:
        rotate = [(i, (i + 1) % n) for i in range(n)]
        return (
            fdp.psum({"x": x}),
            fdp.pmean(x, weight="rows"),
            fdp.pmax(x),
            fdp.all_gather(x),
            fdp.psum_scatter(fdp.all_gather(x)),
            fdp.ppermute(x, rotate),
            fdp.all_to_all(x.expand(n, 2, 3), split_dim=0, concat_dim=1),
        )

    found = fdp.parallel_apply(everything, fdp.scatter(x, slots), executor=executor)
    whole = torch.stack(parts).sum(0)
    for i, device in enumerate(slots):
        got = [each[i] for each in found]
        assert {leaf.device for leaf in tree_leaves(got)} == {device}
        want = [
            {"x": whole},
            whole / n,
            torch.stack(parts).amax(0),
            x,
            n * parts[i],
            parts[i - 1],
            torch.cat(parts)[None],
        ]
        assert_close_tree(on_cpu(got), want)


def test_transfers_name_what_is_exchanged():
    batch = fdp.scatter(numbers(4, 3), DEVICES[:2])
    with fdp.transfers() as log:
        fdp.parallel_apply(fdp.psum, batch)
    assert {transfer.path for transfer in log} == {"psum[0]"}
    assert sum(transfer.nbytes for transfer in log) == 2 * batch[0].nbytes


@pytest.mark.parametrize("strays", [set[int](), {0}, {1}, {0, 1}], ids=str)
def test_small_tensors_travel_as_one_wherever_they_are(strays: set[int]):
    """One buffer of a dtype goes to the first slot, and one back; what a slot has elsewhere comes to it first."""

    def fn(i: int) -> Any:
        tree = {"a": numbers(2, 3), "b": numbers(4), "c": numbers(3, 2), "d": numbers(5)}
        return fdp.psum({key: x if key == "b" and i in strays else x.to(DEVICES[i]) for key, x in tree.items()})

    numbered = fdp.Sharded((0, 1), tuple(DEVICES[:2]))
    with fdp.transfers() as log:
        found: Any = fdp.parallel_apply(fn, numbered)
    whole = {"a": 2 * numbers(2, 3), "b": 2 * numbers(4), "c": 2 * numbers(3, 2), "d": 2 * numbers(5)}
    for i, shard in enumerate(found.shards):
        assert {leaf.device for leaf in tree_leaves(shard)} == {DEVICES[i]}
        assert_close_tree(on_cpu(shard), whole)
    between = [each for each in log if each.source.type == "virtual"]
    assert [each.nbytes for each in between] == [21 * 8] * 2
    assert len(log) == 2 + len(strays)


def test_a_collective_that_only_a_later_microbatch_calls():
    def loss(w: Tensor, x: Tensor) -> Tensor:
        value = (w * x).mean()
        return fdp.psum(value) if x[0, 0].item() % 2 else value

    x = torch.arange(4.0).reshape(4, 1).to(DEVICES[0])  # the pieces of a slot begin with an even and an odd number
    grads = fdp.grad(loss, devices=DEVICES[:2], microbatches=2)(torch.ones((), device=DEVICES[0]), x)
    torch.testing.assert_close(on_cpu(grads), torch.tensor((0 + 2 + 2 * (1 + 3)) / 4))  # a sum is of both slots' losses


@each_executor
@pytest.mark.parametrize("axes", [("data",), ("inner",), ("data", "inner")], ids="-".join)
def test_gradients_inside_through_collectives_of_each_axis(axes: tuple[str, ...], executor: Any):
    """Beside others what slots of the inner call meet in may not be of the outer one."""
    w, x = torch.tensor(0.7, dtype=torch.float64), numbers(8)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        value = (w * x).mean()
        for axis in axes:
            value = fdp.pmean(value, axis) ** 2
        return value

    def fn(w: Tensor, x: Tensor) -> Tensor:
        grads = fdp.grad(loss, devices=[DEVICES[1]] * 2, axis_name="inner", executor=executor)
        return grads(w.to(DEVICES[1]), x.to(DEVICES[1]))

    if executor == "threads" and "data" in axes:
        with pytest.raises(RuntimeError, match=r"pmean: executor='threads': .*further out"):
            fdp.dp_apply(fn, w, x, [DEVICES[1]] * 2, out_dims="list", executor=executor)
        return
    found = fdp.dp_apply(fn, w, x, [DEVICES[1]] * 2, out_dims="list", executor=executor)
    own = w.expand(2, 1).clone().requires_grad_()
    value = (own[..., None] * x.reshape(2, 2, 2)).mean(2)
    for axis in axes:
        value = value.mean(0 if axis == "data" else 1, keepdim=True).expand(2, 2) ** 2
    (want,) = torch.autograd.grad(value.mean(1).sum(), own)
    torch.testing.assert_close(torch.stack(on_cpu(found)), want[:, 0])
