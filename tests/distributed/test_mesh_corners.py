"""Where processes have no rows, have other things than the others, or fail before a call has begun."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import fdp
from tests.distributed.pool import Failure, Pool


def said(run: Callable[[], Any]) -> Any:
    """What a call returns, or its error."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def total(mesh: Any) -> float:
    return fdp.dp_apply(lambda w, x: x.sum(), None, torch.ones(2), mesh, out_dims="sum").item()


# ---- gradients around calls


def curve(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().sum()


def without_rows(mesh: Any) -> Any:
    x, w = torch.ones(1 - mesh.rank, 3), torch.ones(3)
    call = lambda w: fdp.dp_apply(curve, w, x, mesh, out_dims="sum")  # noqa: E731
    step = fdp.value_and_grad(curve, devices=mesh)
    error = said(lambda: call(w.clone().requires_grad_()))
    with torch.no_grad():
        value, grad = step(w, x)
        return error, call(w), value, grad, total(mesh)


def test_what_a_process_without_rows_cannot_follow(two: Pool):
    w = torch.ones(3)
    grad, value = torch.func.grad_and_value(curve)(w, torch.ones(1, 3))
    for error, called, found, found_grad, after in two(without_rows):
        assert "a process without rows cannot follow" in error, error
        torch.testing.assert_close((called, found, found_grad), (value, value, grad))
        assert after == 4


def refused(mesh: Any) -> Any:
    x, w = torch.ones(2, 3), torch.ones(3)
    attached = torch.ones(3, requires_grad=True)
    call = lambda w: fdp.dp_apply(curve, w, x, mesh, out_dims="sum")  # noqa: E731
    step = fdp.value_and_grad(curve, devices=mesh)

    def in_inference_mode() -> Any:
        with torch.inference_mode():
            return step(w, x)

    def twice() -> Any:
        (grad,) = torch.autograd.grad(call(attached), attached, create_graph=True)
        return torch.autograd.grad(grad.sum(), attached)

    each = {
        "cannot be transformed by torch.func": [
            lambda: torch.func.jvp(call, (w,), (w,)),
            lambda: torch.func.vmap(call)(w[None]),
            lambda: torch.func.grad(call)(w),
            lambda: torch.func.grad(lambda w: step(w, x)[0])(w),
            lambda: torch.func.vmap(lambda w: fdp.replicate(w, mesh)[0])(w[None]),
        ],
        "cannot be differentiated again": [
            twice,
            lambda: step(attached, x)[0].backward(),
            lambda: step(attached, x)[1].sum().backward(),
        ],
        "with torch.func.grad, and use torch.no_grad()": [
            in_inference_mode,
            lambda: fdp.grad(curve, devices=mesh, create_graph=True)(attached, x),
        ],
        "inside of a mapped function": [
            lambda: fdp.dp_apply(
                lambda w, x: fdp.dp_apply(curve, w, x, mesh, out_dims="sum"), w, x, mesh, out_dims="sum"
            ),
            lambda: fdp.dp_apply(lambda w, x: fdp.gather(fdp.scatter(x, mesh)), w, x, mesh.devices),
        ],
    }
    return {text: [(said(run), total(mesh)) for run in runs] for text, runs in each.items()}


def test_what_is_refused_around_calls(two: Pool):
    for found in two(refused):
        for text, outcomes in found.items():
            for error, after in outcomes:
                assert text in error, error
                assert after == 4


def with_parameters_that_require_grad(mesh: Any) -> Any:
    """What a gradient function gives is what it gives without."""
    x, w = torch.arange(6.0).reshape(2, 3) + mesh.rank, torch.ones(3)
    step = fdp.value_and_grad(curve, devices=mesh)
    (value, grad), expected = step(w.clone().requires_grad_(), x), step(w, x)
    assert value.requires_grad
    assert grad.requires_grad
    return (value.detach(), grad.detach()), expected


def test_parameters_may_require_grad(two: Pool):
    for found, expected in two(with_parameters_that_require_grad):
        torch.testing.assert_close(found, expected)


# ---- what fails before a call has begun


def early(mesh: Any) -> list[Any]:
    def mean(w: Any, x: torch.Tensor) -> torch.Tensor:
        return (w * x).mean()

    odd = mesh.rank == 1
    rows = fdp.Sharded((torch.ones(2),), mesh.devices, (3 if odd else 2,), 0, peers=mesh.peers)
    calls = [
        lambda: fdp.shard_map(torch.sum, devices=mesh, in_dims=(0, 0) if odd else (0,), out_dims="sum")(torch.ones(2)),
        lambda: fdp.dp_apply(curve, None, torch.ones(2), mesh, output_device="cuda:77" if odd else None),
        lambda: fdp.dp_apply(torch.nn.Linear(1, 1) if odd else torch.add, torch.ones(()), torch.ones(2), mesh),
        lambda: fdp.parallel_apply(torch.add, torch.nn.Linear(1, 1) if odd else 3, 1, devices=mesh),
        lambda: fdp.gather(fdp.scatter(torch.ones(2), mesh), "rows" if odd else 0),
        lambda: fdp.value_and_grad(mean, microbatches=2)(torch.ones(()), rows),
        lambda: fdp.value_and_grad(mean, argnums=5 if odd else 0, devices=mesh)(torch.ones(()), torch.ones(2)),
    ]
    return [(said(call), total(mesh)) for call in calls]


def test_a_slip_in_one_process_is_told_to_the_others(two: Pool):
    first, second = two(early)
    for (one, after_one), (other, after_other) in zip(first, second, strict=True):
        assert "fails: process 1 has raised" in one
        assert "fails: process" not in other
        assert after_one == after_other == 4


# ---- what differs


def parameters(mesh: Any) -> list[Any]:
    def mean(w: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(v.double().sum() for v in tree_leaves(w)) * x.mean()

    step = fdp.value_and_grad(mean, devices=mesh)
    odd = mesh.rank
    names = ["b", "a"] if odd else ["a", "b"]
    others = [
        torch.ones(200_000, dtype=[torch.float32, torch.float64][odd]),
        torch.ones([5, 200_000][odd]),
        torch.ones(3 + odd),
        [torch.ones(3)] * (1 + odd),
        OrderedDict((name, torch.ones(3)) for name in names),
    ]
    found = []
    for other in others:
        found.append(said(lambda other=other: step(other, torch.ones(2))))
        found.append(step(torch.ones(5), torch.ones(2))[0].item())  # from here on it is known to call no collectives
    return found


def test_parameters_that_differ(two: Pool):
    for found in two(parameters):
        assert found[1::2] == [5.0] * 5
        for error in found[::2]:
            assert error.startswith("RuntimeError: value_and_grad: the processes do not fit together: args["), error


class Outer(NamedTuple):
    rows: Any


def unpicklable(mesh: Any) -> list[Any]:
    class Inner(NamedTuple):
        rows: Any

    odd = mesh.rank == 1
    none = torch.ones(0 if odd else 2)
    each: Any = fdp.parallel_apply(lambda x: (lambda: 1) if odd else 3, 1, devices=mesh)
    return [
        fdp.dp_apply(lambda w, x: Outer(x), None, none, mesh).rows.shape[0],
        said(lambda: fdp.dp_apply(lambda w, x: Inner(x), None, none, mesh)),
        said(lambda: fdp.dp_apply(lambda w, x: (lambda: 1) if odd else "s", None, torch.ones(2), mesh, out_dims=None)),
        said(lambda: fdp.gather(each, "list", across=True)),
        total(mesh),
    ]


def test_what_cannot_be_pickled(two: Pool):
    for rank, (rows, *errors, after) in enumerate(two(unpicklable)):
        assert rows == [2, 0][rank]
        for error in errors:
            assert "has to say to the others cannot be pickled" in error
        assert after == 4


def sometimes(mesh: Any) -> Any:
    w = torch.tensor(2.0, requires_grad=True)

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x).sum() if len(x) > 2 else torch.ones(())

    error = said(lambda: fdp.dp_apply(fn, w, torch.ones(3 - mesh.rank), mesh, out_dims="sum").backward())
    return error, total(mesh)


def test_results_that_require_grad_in_one_process(two: Pool):
    for error, after in two(sometimes):
        assert "requires grad in process 0" in error
        assert after == 4


def kinds(mesh: Any) -> Any:
    step = fdp.value_and_grad(lambda c, x: (x * c.abs().sum()).mean(), devices=mesh)
    value, grad = step(torch.ones(3, dtype=torch.complex128), torch.ones(2, dtype=torch.float64))
    embed = fdp.value_and_grad(
        lambda w, i: torch.nn.functional.embedding(i, w, sparse=True).sum(), devices=mesh, reduction="sum"
    )
    total, sparse = embed(torch.ones(4, 2), torch.tensor([1, 2]))
    t = torch.zeros(2)
    tied = fdp.replicate({"a": t, "b": t, "turned": torch.arange(6.0).reshape(2, 3).t()}, mesh)[0]
    conjugate = fdp.dp_apply(lambda w, x: x.conj(), None, torch.full((2,), 1j), mesh, out_dims=None)
    return value, grad, total, sparse.to_dense(), tied["a"] is tied["b"], tied["turned"].stride(), conjugate


def test_kinds_of_tensors(two: Pool):
    for value, grad, total, dense, is_tied, stride, conjugate in two(kinds):
        assert value == 3
        assert torch.equal(grad, torch.ones(3, dtype=torch.complex128))
        assert total == 8
        assert torch.equal(dense, torch.tensor([[0.0] * 2, [2.0] * 2, [2.0] * 2, [0.0] * 2]))
        assert is_tied
        assert stride == (1, 3)
        assert torch.equal(conjugate, torch.full((2,), -1j))


def half(mesh: Any, rows: int) -> Any:
    step = fdp.value_and_grad(lambda w, x: (w * x).mean(), devices=mesh)
    x = mesh.local(torch.arange(rows, dtype=torch.bfloat16))
    return [step(torch.ones((), dtype=torch.bfloat16), x) for _ in range(2)]


@pytest.mark.parametrize("slots", [(1, 1), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_half_precision(two: Pool, rows: int, slots: tuple[int, int]):
    expected = torch.tensor((rows - 1) / 2, dtype=torch.bfloat16)
    for steps in two(half, slots, rows):
        for value, grad in steps:
            assert value.dtype is grad.dtype is torch.bfloat16
            assert value == expected
            torch.testing.assert_close(grad, expected)  # shares of rows are rounded to bfloat16


def nan_in_one(mesh: Any) -> Any:
    x = torch.arange(8.0)
    x[5] = torch.inf
    f = torch.func.grad_and_value(lambda w, x: (w["a"] * x).mean() + w["b"])
    found = [fdp.testing.find_nonfinite(f, {"a": 1.0 * torch.ones(()), "b": torch.ones(())}, mesh.local(x), mesh)]
    rows = torch.tensor([torch.nan][mesh.rank :])  # and a process without rows
    return [*found, fdp.testing.find_nonfinite(lambda w, x: (x, 1, "a"), None, rows, mesh)]


def test_where_a_nan_began(two: Pool):
    first, second = two(nan_in_one, 2)
    assert first == [{}, {0: ["out[0]"]}]
    assert second == [{2: ["out[0]['a']", "out[1]"]}, {}]


def from_two_threads(mesh: Any) -> list[Any]:
    started, release = threading.Event(), threading.Event()

    def waits(w: Any, x: torch.Tensor) -> torch.Tensor:
        started.set()
        assert release.wait(10)
        return x.sum()

    thread = threading.Thread(target=lambda: fdp.dp_apply(waits, None, torch.ones(2), mesh, out_dims="sum"))
    thread.start()
    assert started.wait(10)
    error = said(lambda: total(mesh))
    release.set()
    thread.join()
    return [error, total(mesh)]


def test_one_call_at_a_time(two: Pool):
    for error, after in two(from_two_threads):
        assert error.startswith("RuntimeError: dp_apply: another thread is in a call on this mesh")
        assert after == 4


def swallowed(mesh: Any) -> str:
    def fn(w: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return fdp.psum(torch.ones(2 + mesh.rank)).sum() + x
        except ValueError:
            raise
        except Exception:
            return x

    return said(lambda: fdp.dp_apply(fn, None, torch.ones(2), mesh))


def test_an_error_that_the_function_catches_is_said_at_the_end(two: Pool):
    for error in two(swallowed):
        assert "psum: the processes do not fit together: float32[2] in process 0, float32[3] in process 1" in error


def test_failures_have_a_text(two: Pool):
    """Of the pool itself: what a process raises is shown."""
    outcomes = two.outcomes(total, 0)
    assert all(isinstance(outcome, Failure) and "positive number of slots" in outcome.message for outcome in outcomes)


# ---- batches of a loader, which are lists


def of_a_loader(mesh: Any) -> list[list[list[float]]]:
    loader = DataLoader(TensorDataset(torch.arange(8.0), -torch.arange(8.0)), batch_size=4)
    for batch in loader:
        assert type(batch) is type(mesh.local(batch)) is list
    ahead = list(fdp.prefetch(map(mesh.local, loader), mesh))
    assert all(type(shard) is list for sharded in ahead for shard in sharded.shards)
    return [[x.tolist() for x in shard] for sharded in ahead for shard in sharded.shards]


def test_lists_of_a_loader_stay_lists(two: Pool):
    assert two(of_a_loader, 2) == [
        [[[0.0], [-0.0]], [[1.0], [-1.0]], [[4.0], [-4.0]], [[5.0], [-5.0]]],
        [[[2.0], [-2.0]], [[3.0], [-3.0]], [[6.0], [-6.0]], [[7.0], [-7.0]]],
    ]
