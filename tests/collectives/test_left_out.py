"""What nobody differentiates has no part in a gradient through a call with collectives: 0 times infinity is NaN.

In every function here something is made of the root of 0, whose slope is infinite, and is not differentiated.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_executor
from tests.common.comparing import assert_close_tree
from tests.common.depth import few

W = torch.tensor([1.0, 2.0], dtype=torch.float64)
X = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [0.5, 2.5], [1.5, 0.0]], dtype=torch.float64)


class Slots:
    """What functions do together on slots, by collectives."""

    sum = staticmethod(fdp.psum)

    @staticmethod
    def largest(x: Tensor) -> Tensor:
        return fdp.pmax(x.amax(0))


class Alone:
    """The same on one device."""

    @staticmethod
    def sum(tree: Any) -> Any:
        return tree

    @staticmethod
    def largest(x: Tensor) -> Tensor:
        return x.amax(0)


class Root(torch.autograd.Function):
    """A function of a user's own: torch calls its backward with zeros where it is visited without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (2 * ctx.saved_tensors[0])


Together = type[Slots] | type[Alone]


def of_rows(t: Together, w: Tensor, x: Tensor) -> Any:
    return w * x - t.sum((w * x).sum(0)), t.sum(w.sum()), x.sqrt() * w


def behind_a_collective(t: Together, w: Tensor, x: Tensor) -> Any:
    return w * x - t.sum((w * x).sum(0)), t.sum((x.sqrt() * w).sum(0))


def in_a_tree(t: Together, w: Tensor, x: Tensor) -> Any:
    total, roots = t.sum(((w * x).sum(0), (w * x).sqrt().sum(0)))
    return w * x * total, roots


def behind_two(t: Together, w: Tensor, x: Tensor) -> Any:
    roots = t.sum((w * x).sqrt().sum(0))
    return w * x * t.sum((w * x).sum(0)), t.sum((roots * x).sum(0))


def between_two_that_count(t: Together, w: Tensor, x: Tensor) -> Any:
    total = t.sum((w * x).sum(0))
    roots = t.sum((total * x).sqrt().sum(0))
    return (w * x).sin() * t.sum((total * x).cos().sum(0)), roots


def of_a_custom_function(t: Together, w: Tensor, x: Tensor) -> Any:
    return w * x * t.sum((w * x).sum(0)), t.sum(Root.apply(w * x).sum(0))


def the_largest(t: Together, w: Tensor, x: Tensor) -> Any:
    return w * x / t.sum((w * x).sum(0)), t.largest((w * x).sqrt())


FUNCTIONS = (
    of_rows,
    behind_a_collective,
    in_a_tree,
    behind_two,
    between_two_that_count,
    of_a_custom_function,
    the_largest,
)
each_function = pytest.mark.parametrize("function", FUNCTIONS)
Call = Callable[[Tensor, Tensor], Tensor]


def alone(function: Any) -> Call:
    return lambda w, x: function(Alone, w, x)[0]


def applied(function: Any, n: int, executor: Any) -> Call:
    dims = (0, None, 0) if function is of_rows else (0, None)
    fn = fdp.shard_map(
        lambda w, x: function(Slots, w, x),
        devices=fdp.virtual_devices(n),
        in_dims=(None, 0),
        out_dims=dims,
        executor=executor,
    )
    return lambda w, x: fn(w, x)[0]


def on_slots(function: Any, n: int, executor: Any) -> Call:
    def call(w: Tensor, x: Tensor) -> Tensor:
        shards = fdp.scatter(x, fdp.virtual_devices(n))
        outs: Any = fdp.parallel_apply(lambda w, x: function(Slots, w, x), w, shards, executor=executor)
        return fdp.gather(outs[0], 0)

    return call


def leaves() -> tuple[Tensor, Tensor]:
    return W.clone().requires_grad_(), X.clone().requires_grad_()


def by_grad(call: Call) -> Any:
    return torch.autograd.grad(call(*(own := leaves())).sin().sum(), own)


def by_backward(call: Call) -> Any:
    w, x = leaves()
    call(w * 1, x * 1).sin().sum().backward()
    return w.grad, x.grad


def twice(call: Call) -> Any:
    own = leaves()
    grads = torch.autograd.grad(call(*own).sin().sum(), own, create_graph=True)
    return grads + torch.autograd.grad(torch.stack([grad.sin().sum() for grad in grads]).sum(), own)


def summed(call: Call) -> Callable[[Tensor], Tensor]:
    return lambda w: call(w, X).sin().sum()


TWO_WEIGHTS = torch.stack([W, W + 1])
WAYS: dict[str, Callable[[Call], Any]] = {
    "grad": by_grad,
    "backward": by_backward,
    "twice": twice,
    "func": lambda call: torch.func.grad(lambda w, x: call(w, x).sin().sum(), (0, 1))(W, X),
    "func twice": lambda call: torch.func.grad(lambda w: torch.func.grad(summed(call))(w).sin().sum())(W),
    "vmap of grad": lambda call: torch.func.vmap(torch.func.grad(summed(call)))(TWO_WEIGHTS),
    "grad of vmap": lambda call: torch.func.grad(lambda ws: torch.func.vmap(summed(call))(ws).sum())(TWO_WEIGHTS),
}


@few(4)
@each_executor
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_function
def test_outputs_that_are_not_used(function: Any, way: Callable[[Call], Any], executor: Any):
    expected = way(alone(function))
    for n, make in itertools.product((2, 3), (applied, on_slots)):
        assert_close_tree(way(make(function, n, executor)), expected)


# ---------------------------------------------------------------- the gradient functions


def loss_of(t: Together) -> Callable[..., Any]:
    def loss(w: Tensor, x: Tensor) -> Any:
        total, roots = t.sum(((w * x).sum(0), (w * x).sqrt().sum(0)))
        return (w * x * total).sin().sum(), {"roots": roots, "largest": t.largest(w * x)}

    return loss


@each_executor
@pytest.mark.parametrize("create_graph", [None, True])
@pytest.mark.parametrize("n", [2, 3])
def test_aux_beside_a_loss(n: int, create_graph: Any, executor: Any):
    def everything(value: Tensor, grads: Any, own: Any) -> Any:
        further = torch.autograd.grad(torch.stack([grad.sin().sum() for grad in grads]).sum(), own, retain_graph=True)
        return value, grads, torch.autograd.grad(value, own, retain_graph=True), further

    own = leaves()
    options: Any = {"reduction": "sum", "in_dims": (None, 0), "aux_dims": None, "executor": executor}
    (value, aux), grads = fdp.value_and_grad(
        *(loss_of(Slots), (0, 1), True), devices=fdp.virtual_devices(n), create_graph=create_graph, **options
    )(*own)
    mine = leaves()
    one, one_aux = loss_of(Alone)(*mine)
    assert_close_tree(aux, one_aux)
    found = everything(value, grads, own)
    assert_close_tree(found, everything(one, torch.autograd.grad(one, mine, create_graph=True), mine))


@each_executor
@pytest.mark.parametrize("attached", [False, True])
def test_a_slot_that_counts_nothing(attached: bool, executor: Any):
    """Its loss is left out; what its rows do to the losses of others is not."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sqrt().sum() * fdp.psum((w * x.square() + w).sin().sum())

    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)

    def whole(w: Tensor) -> Tensor:
        return (w * x[2:]).sqrt().sum() * (w * x.square() + w).sin().sum()

    options: Any = {"devices": fdp.virtual_devices(2), "count": lambda w, x: int(x.sum() > 0), "executor": executor}
    w, v = W.clone().requires_grad_(attached), W.clone().requires_grad_()
    value, grad = fdp.value_and_grad(loss, **options)(w, x)
    (expected,) = torch.autograd.grad(whole(v), v, create_graph=True)
    assert_close_tree((value, grad), (whole(v), expected))
    if attached:
        assert_close_tree(torch.autograd.grad(value, w, retain_graph=True)[0], expected)
        (found,) = torch.autograd.grad(grad.sin().sum(), w)
        assert_close_tree(found, torch.autograd.grad(expected.sin().sum(), v)[0])


def test_a_slot_that_counts_nothing_in_inference_mode():
    """Gradients are those of torch.func there."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return fdp.psum((w * x).sum())

    call = fdp.grad(loss, devices=fdp.virtual_devices(2), count=lambda w, x: float(x[0] > 2))
    with torch.inference_mode():
        found = call(torch.ones(()), torch.arange(1.0, 5.0))
        assert call(torch.ones(()), torch.tensor([0.0, torch.inf, 3.0, 4.0])).isinf()  # of the sum, not NaN
    assert_close_tree(found, call(torch.ones(()), torch.arange(1.0, 5.0)))
    assert found == 10


# ---------------------------------------------------------------- inside


INSIDE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "func": lambda loss, w, x: torch.func.grad(loss, (0, 1))(w, x),
    "func twice": lambda loss, w, x: torch.func.grad(lambda w: torch.func.grad(loss)(w, x).sin().sum())(w),
    "vmap": lambda loss, w, x: torch.func.vmap(lambda k: torch.func.grad(loss)(w * k, x))(W),
    "fdp": lambda loss, w, x: fdp.grad(loss, (0, 1), reduction="sum", axis_name="inner")(w, x),
}


@each_executor
@pytest.mark.parametrize("inner", INSIDE.values(), ids=INSIDE)
def test_leaves_of_a_tree_inside(inner: Callable[..., Any], executor: Any):
    def mapped(with_roots: bool) -> Any:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            total, *_ = fdp.psum(((w * x).sum(0), *[(w * x).sqrt().sum(0)] * with_roots))
            return (w * x * total).sin().sum()

        fn: Any = lambda w, x: inner(loss, w, x)  # noqa: E731
        return fdp.dp_apply(fn, W, X, fdp.virtual_devices(2), out_dims="list", executor=executor)

    assert_close_tree(mapped(with_roots=True), mapped(with_roots=False))


# ---------------------------------------------------------------- as on one device


@each_executor
@pytest.mark.parametrize("n", [1, 2])
def test_the_gradient_of_an_extreme_beside_what_is_used(n: int, executor: Any):
    def fn(_: Any, x: Tensor) -> Any:
        return x / fdp.psum(x.sum()), fdp.pmax(x.amax(0))

    _, x = leaves()
    used, largest = fdp.dp_apply(fn, None, x, fdp.virtual_devices(n), out_dims=(0, None), executor=executor)
    _, y = leaves()
    expected = torch.autograd.grad((y / y.sum()).square().sum(), y)
    assert_close_tree(torch.autograd.grad(used.square().sum(), x, retain_graph=True), expected)
    with pytest.raises(RuntimeError, match="pmax cannot be differentiated; detach its argument"):
        torch.autograd.grad(largest.sum(), x)
