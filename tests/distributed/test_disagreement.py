"""Processes that do not do the same: each raises an error that says so, nobody waits, and the next call works."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.distributed.pool import Failure, Pool

PATIENCE = 15.0  # as the pool's: an error that took this long was a hang


def x_of(mesh: Any, rows: int = 4) -> Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3) + mesh.rank


def mean(p: Tensor, x: Tensor) -> Tensor:
    return (x * p).mean()


def works(mesh: Any) -> float:
    """A call with all that there is, after something has gone wrong."""
    value, grads = fdp.value_and_grad(lambda p, x: (x * p).mean() + fdp.psum(1.0), devices=mesh)(
        torch.ones(3), torch.ones(4, 3)
    )
    assert value == 1.0 + sum(mesh.slots)
    return grads.sum().item()


class Case:
    """What processes do, and for each of the two the kind of its error and what it says."""

    def __init__(self, run: Callable[[Any], Any], *expected: tuple[str, str] | None, slots: Any = 1) -> None:
        self.run, self.slots = run, slots
        self.expected = expected if len(expected) == 2 else expected * 2


CASES: dict[str, Case] = {}


def case(*expected: tuple[str, str] | None, slots: Any = 1) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CASES[run.__name__] = Case(run, *expected, slots=slots)
        return run

    return add


def check(pool: Pool, name: str) -> list[Failure]:
    found = pool.outcomes(run_case, CASES[name].slots, name)
    for rank, (outcome, expected) in enumerate(zip(found, CASES[name].expected, strict=True)):
        if expected is None:
            assert not isinstance(outcome, Failure), f"process {rank}: {outcome}"
            continue
        assert isinstance(outcome, Failure), f"process {rank} has not failed: {outcome}"
        kind, pattern = expected
        assert "could not reach" not in outcome.message, f"process {rank} has waited until the limit: {outcome}"
        assert re.fullmatch(kind, outcome.kind), f"process {rank}: {outcome.text}"
        assert re.search(pattern, outcome.message), f"process {rank}: {outcome}"
    for total in pool(works, CASES[name].slots):
        assert total == 1.0
    return found


def run_case(mesh: Any, name: str) -> Any:
    CASES[name].run(mesh)


# ---- another call, or another kind of the same


@case(("RuntimeError", r"different places: dp_apply in process 0, gather in process 1"))
def another_function(mesh: Any) -> None:
    held = fdp.scatter(x_of(mesh), mesh)
    if mesh.rank == 0:
        fdp.dp_apply(mean, torch.ones(3), x_of(mesh), mesh, out_dims="mean")
    else:
        fdp.gather(held)


@case(("RuntimeError", r"different places: value_and_grad in process 0, grad in process 1"))
def another_gradient_function(mesh: Any) -> None:
    transform = fdp.value_and_grad if mesh.rank == 0 else fdp.grad
    transform(mean, devices=mesh)(torch.ones(3), x_of(mesh))


@case(("RuntimeError", r"do not fit together: seed=0 in process 0, seed=1 in process 1"))
def another_seed(mesh: Any) -> None:
    fdp.dp_apply(mean, torch.ones(3), x_of(mesh), mesh, out_dims="mean", seed=mesh.rank)


@case(("RuntimeError", r"do not fit together: randomness='rows' in process 0, randomness='same' in process 1"))
def another_randomness(mesh: Any) -> None:
    fdp.dp_apply(mean, torch.ones(3), x_of(mesh), mesh, out_dims="mean", seed=1, randomness=("rows", "same")[mesh.rank])


@case(("RuntimeError", r"do not fit together: .*'data'.* in process 0, .*'other'.* in process 1"))
def another_axis_name(mesh: Any) -> None:
    name = ("data", "other")[mesh.rank]
    fdp.parallel_apply(torch.sum, fdp.scatter(x_of(mesh), mesh), axis_name=name)


@case(("RuntimeError", r"do not fit together: .*float32\[\].* in process 0, .*float64\[\].* in process 1"))
def another_dtype_of_results(mesh: Any) -> None:
    dtype = (torch.float32, torch.float64)[mesh.rank]
    fdp.dp_apply(lambda p, x: x.sum().to(dtype), None, x_of(mesh), mesh, out_dims="sum")


@case(("RuntimeError", r"do not fit together: .*float32\[2\].* in process 0, .*float32\[3\].* in process 1"))
def another_shape_of_results(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: x[0, : 2 + mesh.rank], None, x_of(mesh), mesh, out_dims="sum")


@case(("(Value|Runtime)Error", r"out\['b'\]|structure|do not fit together"))
def another_structure_of_results(mesh: Any) -> None:
    key = "ab"[mesh.rank]
    fdp.dp_apply(lambda p, x: {key: x.sum()}, None, x_of(mesh), mesh, out_dims="sum")


@case(("(Value|Runtime)Error", r"out.*dim|do not fit together"))
def another_out_dim(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: x.sum(), None, x_of(mesh), mesh, out_dims=("sum", "max")[mesh.rank])


@case(("ValueError", r"differs between processes: 0 in process 0, 1 in process 1"))
def another_value_that_is_no_tensor(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: mesh.rank, None, x_of(mesh), mesh, out_dims=None)


@case(("ValueError", r"int64, which has no 'mean', and differs between processes"))
def another_integer_under_mean(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: torch.tensor(mesh.rank), None, x_of(mesh), mesh, out_dims="mean")


@case(
    ("RuntimeError", r"do not fit together: args\[0\] float32\[3\] in process 0, args\[0\] float32\[1\] in process 1")
)
def other_shapes_of_parameters(mesh: Any) -> None:
    fdp.value_and_grad(mean, devices=mesh)(torch.ones((3, 1)[mesh.rank]), x_of(mesh))


@case(("RuntimeError", r"(psum.*pmean|pmean.*psum)"), slots=2)
def another_collective(mesh: Any) -> None:
    reduce = (fdp.psum, fdp.pmean)[mesh.rank]
    fdp.dp_apply(lambda p, x: reduce(x.sum()), None, x_of(mesh), mesh, out_dims="mean")


@case(("RuntimeError", r"psum"), slots=2)
def one_returns_early(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: fdp.psum(x.sum()) if mesh.rank else x.sum(), None, x_of(mesh), mesh, out_dims="mean")


@case(("(Value|Runtime)Error", r"psum.*float32\[2\].*float32\[3\]"), slots=2)
def another_shape_in_a_collective(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: fdp.psum(x[0, : 2 + mesh.rank]), None, x_of(mesh), mesh, out_dims=None)


@case(("RuntimeError", r"different places: .*backward"))
def one_calls_no_backward(mesh: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    value = fdp.dp_apply(mean, p, x_of(mesh), mesh, out_dims="mean")
    if mesh.rank == 0:
        value.backward()
    else:
        fdp.gather(fdp.scatter(x_of(mesh), mesh))


@case(("(Value|Runtime)Error", r"(p|params|requires_grad|whole).*process"))
def one_requires_grad(mesh: Any) -> None:
    p = torch.ones(3, requires_grad=mesh.rank == 0)
    value = fdp.dp_apply(mean, p, x_of(mesh), mesh, out_dims="mean")
    (value + 0 * torch.ones(1, requires_grad=True)).sum().backward()
    fdp.gather(fdp.scatter(x_of(mesh), mesh))


# ---- parameters that have other values


OTHERS = r"value_and_grad: the processes begin with different values of args\[0\]\['b'\], and would train different"


def own_parameters(mesh: Any) -> dict[str, Tensor]:
    return {"a": torch.ones(3), "b": torch.tensor([1.0, 2.0 + mesh.rank, 0.0])}


@case(("RuntimeError", OTHERS))
def other_parameters(mesh: Any) -> None:
    fdp.value_and_grad(lambda p, x: mean(p["a"] * p["b"], x), devices=mesh)(own_parameters(mesh), x_of(mesh))


@case(("RuntimeError", OTHERS))
def other_parameters_around_which_something_differentiates(mesh: Any) -> None:
    p = {name: x.requires_grad_() for name, x in own_parameters(mesh).items()}
    fdp.value_and_grad(lambda p, x: mean(p["a"] * p["b"], x), devices=mesh)(p, x_of(mesh))


@case(("RuntimeError", r"backward: the processes begin with different values of args\[0\]\['bias'\], "))
def another_module(mesh: Any) -> None:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(mesh.rank)
    fdp.backward(model, lambda model, x: model(x).mean(), devices=mesh)(x_of(mesh))


def other_values(mesh: Any) -> Any:
    """Whole leaves that nobody differentiates in may differ, and so may parameters that `replicate` has been given."""
    step = fdp.value_and_grad(lambda p, q, x: mean(p * q.sum(), x), in_dims=(None, None, 0), devices=mesh)
    value, _ = step(torch.ones(3), torch.ones(2) * mesh.rank, torch.ones(4, 3))
    params = fdp.replicate({"a": torch.ones(3) * (1 + mesh.rank)}, mesh)
    again, _ = fdp.value_and_grad(lambda p, x: mean(p["a"], x), devices=mesh)(params, torch.ones(4, 3))
    return value.item(), again.item()


def test_what_may_differ(two: Pool):
    assert two(other_values) == [(1.0, 1.0)] * 2


# ---- replicate


def replicated(mesh: Any, tree: Any, **options: Any) -> None:
    fdp.replicate({"a": [torch.ones(2), tree]}, mesh, **options)


@case(("RuntimeError", r"tree\['a'\]\[1\] float32\[3\] in process 0, tree\['a'\]\[1\] float32\[2\] in process 1"))
def replicate_another_shape(mesh: Any) -> None:
    replicated(mesh, torch.ones((3, 2)[mesh.rank]))


@case(("RuntimeError", r"tree\['a'\]\[1\] float32\[3\] in process 0, tree\['a'\]\[1\] float64\[3\] in process 1"))
def replicate_another_dtype(mesh: Any) -> None:
    replicated(mesh, torch.ones(3, dtype=(torch.float32, torch.float64)[mesh.rank]))


@case(("RuntimeError", r"tree\['a'\]\[1\]\['b'\] .* in process 0, tree\['a'\]\[1\]\['c'\] .* in process 1"))
def replicate_another_key(mesh: Any) -> None:
    replicated(mesh, {"bc"[mesh.rank]: torch.ones(3)})


@case(("RuntimeError", r"do not fit together: tree\['a'\]\[1\]\[1\] float32\[3\] in process 0"))
def replicate_more_leaves(mesh: Any) -> None:
    replicated(mesh, [torch.ones(3)] * (2 - mesh.rank))


@case(("RuntimeError", r"do not fit together: .*\[\*\].* in process 0, .*\(\*,\).* in process 1"))
def replicate_another_container(mesh: Any) -> None:
    replicated(mesh, ([torch.ones(3)], (torch.ones(3),))[mesh.rank])


@case(("RuntimeError", r"tree\['a'\]\[1\] 0 in process 0, tree\['a'\]\[1\] 1 in process 1"))
def replicate_another_number(mesh: Any) -> None:
    replicated(mesh, mesh.rank)


@case(("ValueError", r"values differ from those of process 0: process 1: tree\['a'\]\[1\]"))
def replicate_checks_values(mesh: Any) -> None:
    replicated(mesh, torch.full((3,), 1.0 * mesh.rank), check_values=True)


@case(("ValueError", r"values differ from those of process 0: process 1: tree\['a'\]\[1\]"))
def replicate_checks_nan(mesh: Any) -> None:
    replicated(mesh, torch.tensor([(0.0, torch.nan)[mesh.rank]]), check_values=True)


@case(("RuntimeError", r"do not fit together: check_values=False in process 0, check_values=True in process 1"))
def replicate_one_checks_values(mesh: Any) -> None:
    replicated(mesh, torch.ones(3), check_values=mesh.rank == 1)


@case(("RuntimeError", r"replicate in process 0 fails: process 1 has raised TypeError"), ("TypeError", "already"))
def replicate_of_a_replicated(mesh: Any) -> None:
    held = fdp.replicate(torch.ones(3), mesh)
    fdp.replicate(held if mesh.rank else torch.ones(3), mesh)


# ---- one process raises


def elsewhere(where: str, how: str, rank: int = 1) -> tuple[str, str]:
    return "RuntimeError", rf"{where}.* fails: process {rank} has raised {how}"


def odd(mesh: Any, rank: int = 1) -> None:
    if mesh.rank == rank:
        raise KeyError("odd")


@case(elsewhere("dp_apply", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_in_the_function(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: odd(mesh) or x, None, x_of(mesh), mesh)


@case(elsewhere("value_and_grad", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_in_the_loss(mesh: Any) -> None:
    fdp.value_and_grad(lambda p, x: (odd(mesh), mean(p, x))[1], devices=mesh)(torch.ones(3), x_of(mesh))


@case(elsewhere("parallel_apply", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_in_parallel_apply(mesh: Any) -> None:
    fdp.parallel_apply(lambda x: odd(mesh) or x, fdp.scatter(x_of(mesh), mesh))


@case(elsewhere("psum", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_before_a_collective(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: (odd(mesh), fdp.psum(x.sum()))[1], None, x_of(mesh), mesh, out_dims="mean")


@case(("KeyError", "odd"), elsewhere("dp_apply", "KeyError: 'odd'", 0), slots=2)
def raises_after_a_collective(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: (fdp.psum(x.sum()), odd(mesh, 0))[0], None, x_of(mesh), mesh, out_dims="mean")


@case(elsewhere("dp_apply", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_in_a_nested_call(mesh: Any) -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        return fdp.dp_apply(lambda p, x: odd(mesh) or fdp.psum(x.sum()) + x, p, x, fdp.virtual_devices(2))

    fdp.dp_apply(fn, None, x_of(mesh), mesh)


@case(elsewhere("value_and_grad", "KeyError: 'odd'"), ("KeyError", "odd"))
def raises_in_count(mesh: Any) -> None:
    fdp.value_and_grad(mean, devices=mesh, count=lambda p, x: odd(mesh) or 1)(torch.ones(3), x_of(mesh))


@case(elsewhere("value_and_grad", "ValueError: .*count"), ("ValueError", "count must return a finite number"))
def count_is_nan(mesh: Any) -> None:
    count = torch.nan if mesh.rank else 1.0
    fdp.value_and_grad(mean, devices=mesh, count=lambda p, x: count)(torch.ones(3), x_of(mesh))


@case(elsewhere("value_and_grad", "KeyError: 'odd'"), ("KeyError", "odd"), slots=2)
def raises_in_the_backward(mesh: Any) -> None:
    def loss(p: Tensor, x: Tensor) -> Tensor:
        y = p * 1
        y.register_hook(lambda grad: odd(mesh))
        return mean(y, x)

    fdp.value_and_grad(loss, devices=mesh)(torch.ones(3), x_of(mesh))


@case(elsewhere("dp_apply", "ValueError: .*rows differ"), ("ValueError", "rows differ: .*has 4.* has 3"))
def rows_that_differ(mesh: Any) -> None:
    x = x_of(mesh)
    fdp.dp_apply(lambda p, x, y: x, None, (x, x[: 4 - mesh.rank]), mesh)


@case(elsewhere("dp_apply", "ValueError: .*weights"), ("ValueError", "3 weights for 2 slots"), slots=2)
def bad_weights(mesh: Any) -> None:
    fdp.dp_apply(mean, torch.ones(3), x_of(mesh), mesh, out_dims="mean", weights=[1] * (2 + mesh.rank))


@case(elsewhere("dp_apply", "ValueError: .*0-dim"), ("ValueError", "0-dim tensor, which cannot be concatenated"))
def a_result_that_cannot_be_joined(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: x.sum() if mesh.rank else x, None, x_of(mesh), mesh)


@case(elsewhere("value_and_grad", r"TypeError: .*not args\[0\] \(torch\.int64\)"), ("TypeError", "int64"))
def an_integer_parameter(mesh: Any) -> None:
    p = torch.ones(3, dtype=torch.int64 if mesh.rank else torch.float32)
    fdp.value_and_grad(mean, devices=mesh)(p, x_of(mesh))


@case(elsewhere("dp_apply", "RuntimeError: .*wrote in place"), ("RuntimeError", "wrote in place to inputs"))
def a_write_in_place(mesh: Any) -> None:
    fdp.dp_apply(lambda p, x: x.add_(1) if mesh.rank else x + 1, None, x_of(mesh), mesh)


@case(elsewhere("gather", "ValueError: .*no dims"), ("ValueError", "carry no dims"))
def gather_without_dims(mesh: Any) -> None:
    held = fdp.scatter(x_of(mesh), mesh)
    fdp.gather(held.map(torch.sum) if mesh.rank else held)


@case(elsewhere("gather", "ValueError: .*weights"), ("ValueError", "2 weights for 1 slots"))
def gather_with_bad_weights(mesh: Any) -> None:
    fdp.gather(fdp.scatter(x_of(mesh), mesh), "mean", weights=[1] * (1 + mesh.rank))


@case(elsewhere("parallel_apply", "ValueError: .*is on a mesh, but"), ("ValueError", r"but args\[1\] is not on it"))
def parallel_apply_on_other_slots(mesh: Any) -> None:
    devices = fdp.virtual_devices(2) if mesh.rank else mesh
    fdp.parallel_apply(torch.add, fdp.scatter(x_of(mesh), mesh), fdp.scatter(x_of(mesh), devices))


@case(("ValueError", "there are no rows, and the mean over zero rows"))
def no_rows_anywhere(mesh: Any) -> None:
    fdp.value_and_grad(mean, devices=mesh)(torch.ones(3), x_of(mesh, 0))


@case(("KeyboardInterrupt|RuntimeError", ".*"), ("KeyboardInterrupt", "^$"))
def an_interrupt(mesh: Any) -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        if mesh.rank:
            raise KeyboardInterrupt
        return x

    fdp.dp_apply(fn, None, x_of(mesh), mesh)


@case(("RuntimeError", r"different places: the backward of dp_apply, call \d+ in process 0, the backward of dp_apply"))
def backwards_in_another_order(mesh: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    found = [fdp.dp_apply(mean, p * k, x_of(mesh), mesh, out_dims="mean") for k in (1, 10)]
    for each in reversed(found) if mesh.rank else found:
        each.backward()


@case(("RuntimeError", r"psum: the processes do not fit together: call \d+ in process 0, call \d+ in process 1"))
def backwards_that_meet_in_another_order(mesh: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    found = [fdp.dp_apply(lambda p, x: fdp.psum(x * p).sum(), p * k, x_of(mesh), mesh, out_dims=None) for k in (1, 10)]
    for each in reversed(found) if mesh.rank else found:
        each.backward()


@case(("RuntimeError", r"do not fit together: slots \(1, 1\) in process 0, slots \(3, 3\) in process 1"))
def another_mesh(mesh: Any) -> None:
    other = fdp.distributed.init(devices=fdp.virtual_devices(3), timeout=PATIENCE)
    fdp.value_and_grad(mean, devices=other if mesh.rank else mesh)(torch.ones(3), x_of(mesh))


@case(("RuntimeError", "do not fit together: aux_weight='rows' in process 0, aux_weight='count' in process 1"))
def another_weight_of_aux(mesh: Any) -> None:
    how: Any = {"has_aux": True, "count": lambda p, x: 1 + mesh.rank, "aux_weight": ("rows", "count")[mesh.rank]}
    fdp.value_and_grad(lambda p, x: (mean(p, x), x.mean()), devices=mesh, **how)(torch.ones(3), x_of(mesh))


@pytest.mark.parametrize("name", CASES)
def test_both_raise_and_the_next_call_works(two: Pool, name: str):
    check(two, name)


def test_an_own_error_has_notes(two: Pool):
    first, second = check(two, "raises_in_the_function")
    assert any("in shard 2 of 4" in note for note in second.notes), second.notes
    (note,) = first.notes  # the traceback of the other
    assert note.startswith("In process 1:\nTraceback"), note
