"""Laws of gradients: the moves are each other's adjoints, and the gradient is that of the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_close, assert_same
from property_tests.functions import grads_of, sines, summary, value_and_grads
from property_tests.places import ACCELERATOR, cpu_only, memory_of, moved, spread
from property_tests.strategies import (
    EXACT,
    Problem,
    Split,
    batches,
    devices,
    executors,
    parameters,
    problems,
    slot_counts,
    splits,
    tensors,
    weights,
)
from tests.common.containers import mapped, tensors_of

# Forward mode in torch imports code that it marks as deprecated itself.
from_torch = pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")

# ---- L5: with whole numbers the inner products are exact


def whole_numbers(tree: Any) -> Any:
    """The tree with small whole numbers in its place, which require grad; ties are kept."""
    made: dict[int, torch.Tensor] = {}

    def number(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = counted(leaf, len(made)).requires_grad_()
        return made[id(leaf)]

    return mapped(number, tree)


def counted(like: torch.Tensor, seed: int) -> torch.Tensor:
    numbers = (torch.arange(like.numel(), device=like.device) * 7 + 3 * seed) % 11 - 5
    values = numbers.to(like.dtype)
    return (values + 1j * values.flip(0) if like.is_complex() else values).reshape(like.shape)


def unique(tree: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_of(tree)}.values())


def inner(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(moved(ones), moved(others), strict=True)
    return sum(float((one.conj() * other).real.sum()) for one, other in pairs)


def assert_adjoint(move: Callable[[], Any], inputs: Sequence[torch.Tensor], *, exact: bool = True) -> None:
    """For a linear move: <w, J v> == <Jᵀ w, v>, where J v is the move of v itself."""
    outputs = [tensor for tensor in tensors_of(move()) if tensor.requires_grad]
    cotangents = [counted(output, 5 + i) for i, output in enumerate(outputs)]
    values = [tensor.detach() for tensor in inputs]
    if not outputs:
        assert all(value.numel() == 0 for value in values) or not inputs
        return
    grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, materialize_grads=True)
    one, other = inner(cotangents, [output.detach() for output in outputs]), inner(list(grads), values)
    assert one == other if exact else one == pytest.approx(other, rel=1e-12, abs=1e-9)


@given(st.data())
def test_l5_scatter(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, dtypes=EXACT, functions=False))
    tree = whole_numbers(batch.tree)
    sharded = fdp.scatter(tree, split.devices, batch.dims, weights=split.weights)
    assert_adjoint(lambda: sharded.shards, unique(tree))


@given(st.data())
def test_l5_gather(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, dtypes=EXACT))
    sharded = fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights)
    numbers = sharded.map(whole_numbers)
    assert_adjoint(lambda: fdp.gather(numbers, sharded.dims), unique(numbers.shards))


@given(st.data())
def test_l5_gather_reductions(data: st.DataObject):
    slots = data.draw(slot_counts())
    tree = data.draw(batches(2, dtypes=EXACT)).tree
    numbers = fdp.replicate(tree, data.draw(devices(slots))).map(whole_numbers)
    out_dims = data.draw(st.sampled_from(["sum", "mean", "stack", "list", None]))
    shares = data.draw(weights(slots))
    assert_adjoint(
        lambda: fdp.gather(numbers, out_dims, weights=shares), unique(numbers.shards), exact=out_dims != "mean"
    )


@given(st.data())
def test_l5_vjp_of_replicate_is_a_sum(data: st.DataObject):
    slots = data.draw(slot_counts())
    tree = whole_numbers(data.draw(batches(2, dtypes=EXACT)).tree)
    replicated = fdp.replicate(tree, data.draw(devices(slots)), copy=data.draw(st.booleans()))
    assert_adjoint(lambda: replicated.shards, unique(tree))
    inputs = unique(tree)
    cotangents = [[counted(tensor, slot) for tensor in inputs] for slot in range(slots)]
    outputs = [tensor for shard in replicated.shards for tensor in unique(shard)]
    if inputs:
        grads = torch.autograd.grad(outputs, inputs, [cotangent for each in cotangents for cotangent in each])
        assert_same(list(grads), [sum(parts) for parts in zip(*cotangents, strict=True)])


@from_torch
@given(st.data())
def test_l5_by_transforms(data: st.DataObject):
    """The same, with the derivative by forward mode and its transpose by torch.func."""
    split = data.draw(splits(at_least=1))
    dim = data.draw(st.sampled_from([0, 1, -1]))
    x = counted(data.draw(tensors(split.rows, dim, EXACT, scalars=False, states=["plain"])), 1)
    out_dims = data.draw(st.sampled_from(["concat", "sum", "mean", "max", "min"]))
    if x.is_complex() and out_dims in ("max", "min"):
        out_dims = "sum"

    def scattered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fdp.scatter(x, split.devices, dim, weights=split.weights).shards

    def joined(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sharded = fdp.scatter(x, split.devices, dim, weights=split.weights)
        if out_dims == "concat":
            return (fdp.gather(sharded),)
        return (fdp.gather(sharded.map(lambda shard: shard.sum(dim)), out_dims, weights=sharded.sizes),)

    def copied(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fdp.replicate(x, split.devices).shards

    for move in (scattered, joined, copied):
        tangent = counted(x, 4)
        outputs, derivatives = torch.func.jvp(move, (x,), (tangent,))[:2]
        cotangents = tuple(counted(output, 2 + i) for i, output in enumerate(outputs))
        transpose = torch.func.vjp(move, x)[1]
        assert inner(cotangents, derivatives) == pytest.approx(
            inner(transpose(cotangents), [tangent]), rel=1e-12, abs=1e-9
        )


# ---- L6


def in_context(context: str, call: Callable[[], Any]) -> Any:
    """A call in a mode or under a transform of torch.func that must not matter."""
    match context:
        case "no_grad":
            with torch.no_grad():
                return call()
        case "inference":
            with torch.inference_mode():
                return call()
        case "vmap":
            out: list[Any] = []

            def keep(_: torch.Tensor) -> list[torch.Tensor]:
                out[:] = [call()]
                return tensors_of(out)

            values = iter(torch.func.vmap(keep, out_dims=None)(torch.zeros(2)))
            return mapped(lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf, out)[0]
    return call()


CONTEXTS = ("plain", "no_grad", "inference", "vmap")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(st.data(), st.sampled_from(CONTEXTS))
def test_l6_over_rows(reduction: str, data: st.DataObject, context: str):
    problem = data.draw(problems(at_least=int(reduction == "mean")))

    def loss(*args: Any) -> torch.Tensor:
        return getattr(problem.row_losses(*args), reduction)()

    got = in_context(context, lambda: problem.transformed(fdp.value_and_grad, loss, reduction=reduction))
    assert_close(got, problem.oracle(loss))


@given(problems(), st.sampled_from(CONTEXTS))
def test_l6_aux(problem: Problem, context: str):
    def loss(*args: Any) -> Any:
        rows = problem.row_losses(*args)
        aux = {"rows": rows, "mean": rows.exp().mean(), "sum": rows.sum(), "max": rows.amax(), "name": "text"}
        return rows.mean(), (aux, None)

    aux_dims = ({"rows": 0, "mean": "mean", "sum": "sum", "max": "max", "name": "mean"}, None)
    options = {"has_aux": True, "aux_dims": aux_dims}
    got = in_context(context, lambda: problem.transformed(fdp.value_and_grad, loss, **options))
    assert_close(got, problem.oracle(loss))


@given(problems())
@settings(max_examples=1 + settings().max_examples // 3)  # six calls each
def test_grad_and_grad_and_value_are_value_and_grad(problem: Problem):
    def loss(*args: Any) -> torch.Tensor:
        return problem.row_losses(*args).mean()

    def with_aux(*args: Any) -> tuple[torch.Tensor, Any]:
        return loss(*args), loss(*args) * 2

    value, grads = problem.transformed(fdp.value_and_grad, loss)
    assert_same(problem.transformed(fdp.grad, loss), grads)
    assert_same(problem.transformed(fdp.grad_and_value, loss), (grads, value))
    (value, aux), grads = problem.transformed(fdp.value_and_grad, with_aux, has_aux=True)
    assert_same(problem.transformed(fdp.grad, with_aux, has_aux=True), (grads, aux))
    assert_same(problem.transformed(fdp.grad_and_value, with_aux, has_aux=True), (grads, (value, aux)))


@given(st.data())
def test_l6_mean_over_tokens(data: st.DataObject):
    split = data.draw(splits(at_least=1))
    length = st.sampled_from([0, 0, 0, 1, 2, 3])  # often so that a shard has none
    lengths = data.draw(st.lists(length, min_size=split.rows, max_size=split.rows).filter(any))
    mask = torch.arange(3) < torch.tensor(lengths).unsqueeze(1)  # (rows, 3)
    x = sines(split.rows, 3, 2)
    params = data.draw(parameters(states=["plain", "parameter"]))

    def loss(params: Any, x: torch.Tensor, *, mask: torch.Tensor) -> Any:
        tokens = (
            torch.sin(x * torch.cos(summary(params) + torch.arange(2, device=x.device))).square().sum(-1)
        )  # (rows, 3)
        mean = (tokens * mask).sum() / mask.sum()  # NaN with NaN gradients where there are none
        return mean, mean * 2

    counts: Any = {"count": lambda params, x, *, mask: mask.sum(), "aux_weight": "count"}
    options = {"has_aux": True, **counts, **split.options}
    transformed = fdp.value_and_grad(loss, microbatches=data.draw(st.sampled_from([1, 2, 3])), **options)
    got = in_context(data.draw(st.sampled_from(CONTEXTS)), lambda: transformed(params, x, mask=mask))
    want, (grads,) = value_and_grads(lambda params: loss(params, x, mask=mask), [params], [0])
    assert_close(got, (want, grads))


@given(problems(argnums=[0]), st.data())
def test_l6_of_slots(problem: Problem, data: st.DataObject):
    """Parameters that are Replicated have Replicated gradients, and a batch may be Sharded."""
    reduction = data.draw(st.sampled_from(["mean", "sum"]))

    def loss(*args: Any) -> torch.Tensor:
        return getattr(problem.row_losses(*args), reduction)()

    params, x, tree = problem.args
    split = problem.split
    keep = data.draw(st.booleans())  # the loss of an empty shard is NaN, and is left out
    batch = fdp.scatter((x, tree), split.devices, problem.in_dims[1:], weights=split.weights, keep_empty=keep)
    # Of CPU slots that are left out nobody knows which they were.
    where = batch.devices if ACCELERATOR else split.devices
    replicated = fdp.replicate(params, where, copy=data.draw(st.booleans()))
    options = {"microbatches": problem.microbatches, "reduction": reduction, "executor": split.executor}
    value, grads = fdp.value_and_grad(lambda params, batch: loss(params, *batch), **options)(replicated, batch)
    assert isinstance(grads, fdp.Replicated)
    assert grads.devices == replicated.devices
    for slot in range(len(replicated)):
        assert_close((value, grads[slot]), problem.oracle(loss))
    storages = [{memory_of(t) for t in tensors_of(shard) if t.numel()} for shard in grads.shards]
    assert all(not one & other for one in storages for other in storages if one is not other)


@given(problems(argnums=[0]))
def test_l6_in_slots(problem: Problem):
    """A batch may be Sharded, and parameters may be on the slots in part."""
    params, x, tree = problem.args
    split = problem.split

    def loss(*args: Any) -> torch.Tensor:
        return problem.row_losses(*args).mean()

    sharded = fdp.scatter(x, split.devices, weights=split.weights)
    partly = params | {"used": fdp.replicate(params["used"], sharded.devices if ACCELERATOR else split.devices)}
    gradient = fdp.value_and_grad(loss, in_dims=(None, 0, problem.in_dims[2]), executor=split.executor)
    value, grads = gradient(partly, sharded, tree)
    want, (wanted,) = value_and_grads(loss, problem.args, [0])
    for slot in range(len(grads["used"])):
        assert_close((value, grads | {"used": grads["used"][slot]}), (want, wanted))


@given(splits(at_least=1), st.data(), st.sampled_from(CONTEXTS))
def test_l6_of_parameters_that_some_rows_use(split: Split, data: st.DataObject, context: str):
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=split.rows, max_size=split.rows))
    batch = torch.tensor(kinds), sines(split.rows)
    params = [torch.tensor(value, dtype=torch.float64) for value in (0.5, 2, -1)]

    def loss(params: list[torch.Tensor], kinds: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.sin(params[kind] * value) if kind < 3 else value for kind, value in zip(kinds, x, strict=True)]
        return torch.stack(rows).mean()

    options: dict[str, Any] = split.options | {"microbatches": data.draw(st.sampled_from([1, 2]))}
    got = in_context(context, lambda: fdp.value_and_grad(loss, **options)(params, *batch))
    want, (grads,) = value_and_grads(lambda params: loss(params, *batch), [params], [0])
    assert_close(got, (want, grads))


@given(splits(at_least=1), st.sampled_from([0, 1, (0, 1)]), st.sampled_from([None, 0]))
def test_l6_of_one_tensor_in_two_places(split: Split, argnums: Any, dim: int | None):
    x = sines(split.rows, 3)

    def loss(whole: torch.Tensor, part: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.exp(rows[0] * whole.sum() + part.sum() * (dim is None) + rows[1]).sum(1).mean()

    args = (x, x, [x, x])
    got = fdp.value_and_grad(loss, argnums, in_dims=(None, dim, 0), **split.options)(*args)
    want, grads = value_and_grads(loss, args, argnums if isinstance(argnums, tuple) else [argnums])
    assert_close(got, (want, tuple(grads) if isinstance(argnums, tuple) else grads[0]))


@given(st.data())
def test_l6_of_items(data: st.DataObject):
    """Rows that are elements of a list, of different sizes, differentiated in."""
    split = data.draw(splits(at_least=1))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=split.rows, max_size=split.rows))
    rows = [sines(length) for length in lengths]
    scale = torch.tensor(0.5, dtype=torch.float64)

    def loss(scale: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.exp(row * scale).sum() for row in rows]).mean()

    options = split.options | {"in_dims": (None, "items"), "microbatches": data.draw(st.sampled_from([1, 2]))}
    got = fdp.value_and_grad(loss, (0, 1), **options)(scale, rows)
    want, grads = value_and_grads(loss, [scale, rows], [0, 1])
    assert_close(got, (want, tuple(grads)))


@cpu_only  # the virtual accelerator has no sparse tensors
@given(splits(at_least=1), st.booleans())
def test_l6_of_sparse_gradients(split: Split, microbatched: bool):
    ids = torch.arange(split.rows) % 4
    table = sines(5, 2)

    def loss(table: torch.Tensor, ids: torch.Tensor, sparse: bool = True) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, table, sparse=sparse).square().mean()

    grad = fdp.grad(loss, microbatches=1 + microbatched, **split.options)(table, ids)
    _, (want,) = value_and_grads(lambda table: loss(table, ids, sparse=False), [table], [0])
    assert grad.is_sparse
    assert_close(grad.to_dense(), want)


@given(problems(), st.booleans())
def test_l6_second_order(problem: Problem, explicit: bool):
    """Gradients of inputs that require grad can be differentiated again."""
    inputs = unique(mapped(lambda leaf: leaf.requires_grad_(), problem.args))

    def loss(*args: Any) -> torch.Tensor:
        return problem.row_losses(*args).mean()

    got = problem.transformed(fdp.value_and_grad, loss, create_graph=True if explicit else None)
    value, grads = value_and_grads(loss, problem.args, problem.positions, create_graph=True)
    want = value, tuple(grads) if isinstance(problem.argnums, tuple) else grads[0]
    assert_close(got, want)
    assert_close(grads_of(summary(moved(got)), inputs), grads_of(summary(want), inputs))


@given(splits(at_least=1), st.data())
def test_l6_second_order_of_what_the_loss_captures(split: Split, data: st.DataObject):
    uses = data.draw(st.lists(st.booleans(), min_size=split.rows, max_size=split.rows))
    batch = torch.tensor(uses), sines(split.rows)
    captured = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    param = torch.tensor(2.0, dtype=torch.float64)

    def loss(param: torch.Tensor, uses: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.sin(param * value * (captured if use else 1)) for use, value in zip(uses, x, strict=True)]
        return torch.stack(rows).mean()

    options: dict[str, Any] = split.options | {"microbatches": data.draw(st.sampled_from([1, 2]))}
    value, grad = fdp.value_and_grad(loss, **options)(param, *batch)
    alias = param.requires_grad_()
    true_value = loss(alias, *batch)
    (true_grad,) = grads_of(true_value, [alias], create_graph=True)
    assert_close([value.detach(), grad.detach()], [true_value.detach(), true_grad.detach()])
    assert_close(grads_of(value * 3 + grad, [captured]), grads_of(true_value * 3 + true_grad, [captured]))


@given(problems(), st.sampled_from(CONTEXTS))
def test_l6_without_a_graph(problem: Problem, context: str):
    mapped(lambda leaf: leaf.requires_grad_(), problem.args)

    def loss(*args: Any) -> Any:
        rows = problem.row_losses(*args)
        return rows.mean(), rows.exp().mean()

    options = {"create_graph": False, "has_aux": True}
    got = in_context(context, lambda: problem.transformed(fdp.value_and_grad, loss, **options))
    assert not any(tensor.requires_grad for tensor in tensors_of(got))
    assert_close(got, problem.oracle(loss))


@given(st.sampled_from([fdp.value_and_grad, fdp.grad, fdp.grad_and_value]), slot_counts(), executors(), st.booleans())
def test_l6_mean_over_nothing_is_an_error(transform: Any, slots: int, executor: Any, tokens: bool):
    count = (lambda w, x: (x > 5).sum()) if tokens else None
    x = torch.zeros(2 * slots if tokens else 0)
    problem = "count is zero on all shards" if tokens else "there are no rows"
    mean = transform(lambda w, x: (w * x).mean(), devices=spread(slots), executor=executor, count=count)
    with pytest.raises(ValueError, match=f"{transform.__name__}: {problem}, and the mean over .* is not defined"):
        mean(torch.ones(()), x)


# ---- L9


FUNCS = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).square().sum()),
    "vjp": lambda f: lambda w: torch.func.vjp(f, w)[1](torch.ones_like(f(w)))[0],
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (w + 1,))[1],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, w + 1, w * 2])),
    "grad of grad": lambda f: torch.func.grad(lambda w: torch.func.grad(lambda w: f(w).sum())(w).square().sum()),
    "vmap of grad": lambda f: lambda w: torch.func.vmap(torch.func.grad(lambda w: f(w).sum()))(torch.stack([w, 2 * w])),
    "jvp of grad": lambda f: lambda w: torch.func.jvp(torch.func.grad(lambda w: f(w).sum()), (w,), (w * 3,))[1],
    "functionalize": torch.func.functionalize,
}


FORWARD = ("jvp", "jacfwd", "hessian", "jvp of grad")


def row_values(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * w).sum(1) * torch.exp(w[0])  # (rows, 3) -> (rows,)


def row_mean(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return row_values(w, x).mean()


WEIGHT = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)


@from_torch
@given(splits(at_least=1), st.sampled_from(list(FUNCS)), st.sampled_from([0, "sum", "mean"]))
def test_l9_transforms_outside(split: Split, transform: str, out_dim: Any):
    x = sines(split.rows, 3)

    def one(w: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
        values = row_values(w, x)
        return values if out_dim == 0 else getattr(values, out_dim)(0)

    def many(w: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(one, w, x, out_dims=out_dim, **split.options)

    assert_close(FUNCS[transform](many)(WEIGHT), FUNCS[transform](one)(WEIGHT))


@from_torch
@given(splits(at_least=1), st.sampled_from(list(FUNCS)), st.sampled_from([1, 3]))
def test_l9_transforms_outside_of_grad(split: Split, transform: str, microbatches: int):
    x = sines(split.rows, 3)
    grad = fdp.grad(row_mean, microbatches=microbatches, **split.options)
    want = torch.func.grad(row_mean)
    assert_close(FUNCS[transform](lambda w: grad(w, x))(WEIGHT), FUNCS[transform](lambda w: want(w, x))(WEIGHT))


@from_torch
@given(splits(at_least=1), st.sampled_from(list(FUNCS)))
def test_l9_transforms_inside(split: Split, transform: str):
    x = sines(split.rows, 3)

    def per_row(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = [FUNCS[transform](lambda w, row=row: row_values(w, row[None]))(w) for row in x]
        return torch.stack(rows)

    with_rows = len(fdp.scatter(x, split.devices, weights=split.weights).shards)
    if transform in FORWARD and split.executor == "threads" and with_rows > 1:
        with pytest.raises(RuntimeError, match=r"executor='threads': the function calls .* enters forward mode"):
            fdp.dp_apply(per_row, WEIGHT, x, **split.options)
        return
    assert_close(fdp.dp_apply(per_row, WEIGHT, x, **split.options), per_row(WEIGHT, x))


@from_torch
@given(splits(at_least=1))
def test_l9_gradients_of_each_row(split: Split):
    x = sines(split.rows, 3)
    per_row = torch.func.vmap(torch.func.grad(lambda w, row: row_mean(w, row[None])), in_dims=(None, 0))
    assert_close(fdp.dp_apply(per_row, WEIGHT, x, **split.options), per_row(WEIGHT, x))


@given(splits(at_least=1), slot_counts())
def test_l9_mapped_in_mapped(split: Split, inner_slots: int):
    """A gradient function inside a mapped function: the gradients of each group of rows."""
    x = sines(split.rows, 3)

    def groups(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([fdp.grad(row_mean, devices=[row.device] * inner_slots)(w, row.expand(5, 3)) for row in x])

    want = torch.stack([torch.func.grad(row_mean)(WEIGHT, row[None]) for row in x])
    assert_close(fdp.dp_apply(groups, WEIGHT, x, **split.options), want)
