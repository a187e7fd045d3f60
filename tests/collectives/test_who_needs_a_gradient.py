"""Collectives where only some slots, entries or results have a gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import (
    CASES,
    Case,
    W,
    X,
    cotangents,
    each_case,
    each_executor,
    leaves,
    local,
    mapped,
    plain,
    product,
)
from tests.common.comparing import assert_close_tree
from tests.common.depth import few


@few()
@each_executor
@pytest.mark.parametrize("is_leaf", [True, False])
@each_case
def test_captured(case: Case, is_leaf: bool, executor: Any):
    def run(fn: Callable[[Tensor], list[Tensor]]) -> Any:
        w = W.clone().requires_grad_()
        captured = w if is_leaf else w.exp()
        outs = fn(captured)
        product(outs, cotangents(outs)).backward()
        return w.grad

    def found(captured: Tensor) -> list[Tensor]:
        def fn(_: Any, x: Tensor) -> Tensor:
            return case.call(local(case, captured, x)) * captured.sum()

        return fdp.dp_apply(fn, None, X, fdp.virtual_devices(3), executor=executor, out_dims="list")

    assert_close_tree(run(found), run(lambda captured: plain(case, 3)(captured, X)))


@few()
@each_executor
@each_case
def test_graph_kept_and_freed(case: Case, executor: Any):
    w, x = leaves()
    outs = mapped(case, 3, executor)(w, x)
    loss = product(outs, cotangents(outs))
    first = torch.autograd.grad(loss, (w, x), retain_graph=True, allow_unused=True)  # nothing is sent of some
    assert_close_tree(torch.autograd.grad(loss, (w, x), retain_graph=True, allow_unused=True), first)
    assert_close_tree(torch.autograd.grad(loss, (w, x), allow_unused=True), first)
    with pytest.raises(RuntimeError, match=r"backward through the graph.* a second time"):
        torch.autograd.grad(loss, (w, x))


@few(2)
@each_executor
@pytest.mark.parametrize("name", CASES)
def test_the_graph_of_all_slots_is_freed_at_once(name: str, executor: Any):
    """What is sent to one slot alone has a graph of its own."""
    w, x = leaves()
    outs = mapped(CASES[name], 3, executor)(w, x)
    torch.autograd.grad(outs[0].sum(), w)
    if name.startswith("ppermute"):
        expected = plain(CASES[name], 3)(w, x)
        assert_close_tree(torch.autograd.grad(outs[1].sum(), w), torch.autograd.grad(expected[1].sum(), w))
        return
    with pytest.raises(RuntimeError, match=r"backward through the graph.* a second time"):
        torch.autograd.grad(outs[1].sum(), w)


@few()
@each_executor
@each_case
def test_without_gradients(case: Case, executor: Any):
    w, x = leaves()
    expected = plain(case, 3)(W, X)
    with torch.no_grad():
        outs = mapped(case, 3, executor)(w, x)
    assert not any(out.requires_grad for out in outs)
    assert_close_tree(list(outs), list(expected))
    with torch.inference_mode():
        outs = mapped(case, 3, executor)(w, x)
        assert all(out.is_inference() for out in outs)
        assert_close_tree([out.clone() for out in outs], list(expected))


# ---------------------------------------------------------------- corners


@each_executor
def test_a_leaf_that_is_returned_as_it_is_keeps_its_gradient(executor: Any):
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    v = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def fn(params: Any, x: Tensor) -> Any:
        return fdp.psum((params["v"] * x).sum()) * x, params["w"]

    devices = fdp.virtual_devices(2)
    for _ in range(2):
        _, out = fdp.dp_apply(fn, {"v": v, "w": w}, X, devices, out_dims=(0, "sum"), executor=executor)
        assert torch.autograd.grad(3 * out, w)[0] == 6


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("name", ["psum", "pmean", "all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_inference_mode_in_one_slot(name: str, slot: int, executor: Any):
    """It is that slot's own: what the other has brought is differentiated as under no_grad."""
    calls: dict[str, Any] = {
        "all_to_all": lambda x: fdp.all_to_all(x, split_dim=0, concat_dim=0),
        "ppermute": lambda x: fdp.ppermute(x, [(0, 1), (1, 0)]),
    }
    call, devices = calls.get(name, getattr(fdp, name)), fdp.virtual_devices(2)
    w, x = torch.tensor(0.5, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64)

    def gradient(mode: Any) -> Any:
        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            if fdp.axis_index() == slot:
                with mode():
                    return 0 * call(w * x).sum()
            return (call(w * x) ** 2).sum() * w

        return fdp.value_and_grad(loss, devices=devices, reduction="sum", executor=executor)(w, x)

    torch.testing.assert_close(gradient(torch.inference_mode), gradient(torch.no_grad))


# ---------------------------------------------------------------- gradients inside, where slots differ


def two_sums(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return fdp.psum((w * x).sum()), fdp.psum((w * x).exp().sum())


def detached(w: Tensor, x: Tensor) -> Tensor:
    return fdp.psum(((w if fdp.axis_index() else w.detach()) * x).exp().sum())


def dropped(w: Tensor, x: Tensor) -> Tensor:
    first, _ = two_sums(w, x)
    return first if fdp.axis_index() else (w * x).sin().sum()


def of_another(w: Tensor, x: Tensor) -> Tensor:
    return two_sums(w, x)[fdp.axis_index()]


def recorded_by_another(w: Tensor, x: Tensor) -> Tensor:
    for i in range(2):
        with torch.set_grad_enabled(fdp.axis_index() == i):
            total = fdp.psum((w * x).sum())
        w = w + total
    return w


WAITS = "psum in shard . waits for .*This is in a gradient.*needs a result that depends on what is differentiated"
ANOTHER = "different collectives: the gradient of psum in shard 0, the gradient of another psum in shard 1"
INSIDE = {detached: WAITS, dropped: WAITS, of_another: ANOTHER, recorded_by_another: ANOTHER}


@each_executor
@pytest.mark.parametrize("by", [torch.func.grad, lambda loss: fdp.grad(loss, axis_name="inner")], ids=["torch", "fdp"])
@pytest.mark.parametrize("loss", INSIDE, ids=lambda loss: loss.__name__)
def test_slots_that_differ_in_a_gradient_inside(loss: Any, by: Any, executor: Any):
    devices = fdp.virtual_devices(2)
    with pytest.raises(RuntimeError, match=INSIDE[loss]):
        fdp.dp_apply(by(loss), torch.tensor(0.5), torch.ones(4), devices, out_dims="sum", executor=executor)


# ---------------------------------------------------------------- as torch has it


@pytest.mark.parametrize("n", [1, 3])
def test_inputs_that_nothing_depends_on(n: int):
    def fn(params: Any, x: Tensor) -> Any:
        return fdp.psum((params[0] * x).exp().sum()), (params[1] * x).exp().sum()

    w, v = (torch.tensor(0.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss, _ = fdp.dp_apply(fn, (w, v), X[:, 0], fdp.virtual_devices(n), out_dims=(None, "sum"))
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(loss, v)
    assert torch.autograd.grad(loss, v, allow_unused=True) == (None,)
    x = X[:, 0]
    assert_close_tree(torch.autograd.grad(loss, (w, v), allow_unused=True), ((x * (w * x).exp()).sum(), None))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, w)
