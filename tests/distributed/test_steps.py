"""Gradient steps one after the other: what is sent, what may change from step to step, and who is not in one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree
from tests.distributed.pool import Failure, Pool

PARAMS = {"w": torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3), "b": torch.ones(3, dtype=torch.float64)}


def loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().sum(1).mean()


def rows(first: int, count: int) -> Tensor:
    return torch.arange(first * 2.0, (first + count) * 2, dtype=torch.float64).reshape(count, 2).sin()


def own(mesh: Any, count: int = 4) -> Tensor:
    return rows(mesh.rank * count, count)


def oracle(count: int) -> Any:
    grads, value = torch.func.grad_and_value(loss)(PARAMS, rows(0, count))
    return value, grads


def messages(step: Callable[[], Any]) -> list[tuple[str, list[list[int]]]]:
    """The operations of torch.distributed in a step, and the shapes that they were given."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    events = [event for event in profile.events() or () if event.name.startswith("gloo:")]
    return [(event.name, event.input_shapes) for event in events]


# ---- what is sent


TAIL = 7  # numbers: weights and marks


def sent(mesh: Any, dtype: torch.dtype) -> Any:
    params = {name: p.to(dtype) for name, p in PARAMS.items()}
    step = fdp.value_and_grad(loss, devices=mesh)
    x = own(mesh).to(dtype)
    step(params, x)
    return messages(lambda: step(params, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
def test_a_step_sends_one_message(two: Pool, four: Pool, count: int, dtype: torch.dtype):
    for found in (two if count == 2 else four)(sent, 1, dtype):
        assert [name for name, _ in found] == ["gloo:all_reduce"]
        assert found[-1][1] == [[10 + TAIL]]  # the gradients and the value


def sent_with_aux(mesh: Any) -> Any:
    def with_aux(p: Any, x: Tensor) -> Any:
        value = loss(p, x)
        return value, {"mean": x.mean(0), "rows": x, "sum": value.detach() * len(x)}

    dims = {"mean": "mean", "rows": 0, "sum": "sum"}
    step = fdp.value_and_grad(with_aux, has_aux=True, devices=mesh, microbatches=2, aux_dims=dims, seed=3)
    found: list[Any] = []
    step(PARAMS, own(mesh))
    said = messages(lambda: found.append(step(PARAMS, own(mesh))))
    return said, found[0]


def test_aux_goes_with_it(two: Pool):
    value, grads = oracle(8)
    for rank, (said, ((found, aux), found_grads)) in enumerate(two(sent_with_aux, 2)):
        assert [name for name, _ in said] == ["gloo:all_gather", "gloo:all_reduce"]  # slots, as it has a seed
        assert_close_tree((found, found_grads), (value, grads))
        assert_close_tree(aux, {"mean": rows(0, 8).mean(0), "rows": rows(4 * rank, 4), "sum": value * 8})


def in_bfloat16(mesh: Any, size: int) -> Any:
    params = {"w": torch.linspace(-1, 1, 2 * size).reshape(2, size), "b": torch.ones(size)}
    step = fdp.value_and_grad(loss, devices=mesh, reduce_dtype=torch.bfloat16)
    exact = fdp.value_and_grad(loss, devices=mesh)(params, own(mesh).float())
    found = [step(params, own(mesh).float()) for _ in range(2)]
    said = messages(lambda: found.append(step(params, own(mesh).float())))
    return found, exact, [torch.Size(shapes[0]).numel() for name, shapes in said if name == "gloo:all_reduce"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("size", [3, 300_000])
def test_sums_in_bfloat16_take_half_the_bytes(two: Pool, four: Pool, size: int, count: int):
    for found, (value, grads), numbers in (two if count == 2 else four)(in_bfloat16, 1, size):
        assert sum(numbers) == 3 * size + 1 + TAIL  # and the value, which is sent in float32
        for each, each_grads in found:
            assert torch.equal(each, value)  # which is not rounded
            for name, grad in each_grads.items():
                assert grad.dtype is torch.float32
                largest = (grad - grads[name]).abs().max() / grads[name].abs().max()
                assert 0 < largest < 2**-8 * count  # half a unit for each process, and for each addition


def many_numbers(mesh: Any) -> Any:
    """More than travel at once."""
    params = [torch.linspace(-1, 1, 1_500_000) for _ in range(3)]
    step = fdp.value_and_grad(lambda p, x: sum((q * q).sum() for q in p) * x.mean(), devices=mesh)
    value, grads = [step(params, torch.full((2 + mesh.rank, 1), 1.0 + mesh.rank)) for _ in range(2)][1]
    sent = messages(lambda: step(params, torch.ones(2, 1)))
    return len(sent), value.item(), [(g / (2 * p))[[0, -1]].tolist() for g, p in zip(grads, params, strict=True)]


def test_large_sums_go_in_parts(two: Pool):
    mean = (2 * 1.0 + 3 * 2.0) / 5
    for count, value, factors in two(many_numbers):
        assert count == 3
        assert value == pytest.approx(1_500_000 * mean, rel=1e-3)  # three sums of squares, each a third of the numbers
        assert factors == [pytest.approx([mean, mean])] * 3


# ---- what changes from step to step


SIZES = [(6, 6), (6, 5), (6, 5), (2, 6), (6, 0), (6, 6), (6, 6)]


def masked(p: Any, x: Tensor) -> Tensor:
    losses, mask = torch.tanh(x @ p["w"] + p["b"]).square().sum(1), x[:, 0] > 0.1
    return (losses * mask).sum() / mask.sum()


def count(p: Any, x: Tensor) -> Tensor:
    return (x[:, 0] > 0.1).sum()


def changing(mesh: Any, is_masked: bool) -> Any:
    step = fdp.value_and_grad(masked if is_masked else loss, devices=mesh, count=count if is_masked else None)
    return [step(PARAMS, rows(mesh.rank * 6, sizes[mesh.rank])) for sizes in SIZES]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("slots", [1, (1, 3)])
def test_rows_and_counts_may_change(two: Pool, slots: Any, is_masked: bool):
    step = torch.func.grad_and_value(masked if is_masked else loss)
    each = two(changing, slots, is_masked)
    for i, (a, b) in enumerate(SIZES):
        grads, value = step(PARAMS, torch.cat([rows(0, a), rows(6, b)]))
        for found in each:
            assert_close_tree(found[i], (value, grads))


def in_half(mesh: Any) -> Any:
    """float16 has no room for gradients that are too large or too small by as much as rows change."""
    step = fdp.value_and_grad(lambda p, x: (x * p).sum(1).float().mean() * 100, devices=mesh)
    return [step(torch.ones(2).half(), torch.ones(size, 2).half())[1].tolist() for size in (1, 2048, 1, 2048)]


def test_rows_may_change_much(two: Pool):
    assert two(in_half) == [[[100.0, 100.0]] * 4] * 2


def large_means(mesh: Any) -> Any:
    most = torch.finfo(torch.float32).max
    step = fdp.value_and_grad(lambda p, x: (p * 0 + 1e308, {"most": torch.tensor(most)}), devices=mesh, has_aux=True)
    found = [step(torch.ones((), dtype=torch.float64), own(mesh, count))[0] for count in (4, 4, 8)]
    return [(value.item(), aux["most"].item() == most) for value, aux in found]


def test_means_of_large_numbers(two: Pool):
    assert two(large_means) == [[(1e308, True)] * 3] * 2


def by_kind(mesh: Any) -> Any:
    """What a function returns changes while it goes, in all processes."""
    kind = ["plain"]

    def with_aux(p: Any, x: Tensor) -> Any:
        if kind[0] == "meets":
            return loss(p, x) + 0 * fdp.psum(x.sum()), {"a": x.mean()}
        return loss(p, x), {"a": x.mean()} if kind[0] == "plain" else {"b": x.amax(), "c": 3}

    step = fdp.value_and_grad(with_aux, has_aux=True, devices=mesh, aux_dims=None)
    sums = fdp.value_and_grad(with_aux, has_aux=True, devices=mesh, aux_dims="mean")
    found = []
    for kind[0] in ("plain", "plain", "meets", "plain", "meets", "plain", "plain"):
        found.append(sums(PARAMS, own(mesh)))
    for kind[0] in ("plain", "other", "plain", "other", "other"):
        found.append(step(PARAMS, own(mesh)))
    return found


def test_what_it_returns_may_change(two: Pool):
    value, grads = oracle(8)
    for found in two(by_kind, 1):
        for (each, _), each_grads in found:
            assert_close_tree((each, each_grads), (value, grads))


def widths(mesh: Any, dim: Any) -> list[str]:
    """Rows of process 1 are wider than those of process 0, from the first step on, and from a later one."""
    step = fdp.value_and_grad(lambda p, x: ((p * x).mean(), {"a": x if dim == 0 else x[0]}), has_aux=True, aux_dims=dim)
    same, odd = torch.ones(2, 3), torch.ones(2, 3 + mesh.rank)
    found = []
    for x in (odd, same, same, odd, same):
        try:
            found.append(str(step(torch.ones(()), fdp.scatter(x, mesh))[0][0].item()))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("dim", ["mean", "sum", "max", None, 0, "stack", "list"])
def test_results_of_other_widths_are_refused_but_in_lists(two: Pool, dim: Any):
    for first, *works, later, last in two(widths, 1, dim):
        assert [*works, last] == ["1.0"] * 3
        for text in (first, later):
            named = r"do not fit together: aux\['a'\] float32\[.*3\] .*process 0, aux\['a'\] float32\[.*4\] .*process 1"
            assert text == "1.0" if dim == "list" else re.search(named, text), text


# ---- one process is not in the step


def fails(mesh: Any, how: str, rank: int) -> Any:
    odd = [False]

    def fn(p: Any, x: Tensor) -> Tensor:
        if how == "forward" and odd[0]:
            raise KeyError("odd")
        y = p["b"] * 1
        if how == "backward" and odd[0]:
            y.register_hook(lambda grad: [][1])
        return loss({"w": p["w"], "b": y}, x)

    def count(p: Any, x: Tensor) -> float:
        if how == "count" and odd[0]:
            raise KeyError("odd")
        return len(x)

    step = fdp.value_and_grad(fn, devices=mesh, count=count)
    before = [step(PARAMS, own(mesh)) for _ in range(2)]
    odd[0] = mesh.rank == rank
    with pytest.raises((RuntimeError, KeyError, IndexError), match=r"odd|list index out of range") as caught:
        step(PARAMS, own(mesh))
    odd[0] = False
    after = [step(PARAMS, own(mesh)) for _ in range(2)]
    return f"{type(caught.value).__name__}: {caught.value}", before, after


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["forward", "backward", "count"])
def test_one_that_fails_is_named(two: Pool, how: str, rank: int):
    expected = oracle(8)
    kind = "IndexError" if how == "backward" else "KeyError"
    for process, (error, before, after) in enumerate(two(fails, 1, how, rank)):
        assert error.startswith(kind) if process == rank else f"process {rank} has raised {kind}" in error, error
        for found in before + after:
            assert_close_tree(found, expected)


def test_one_of_four_that_fails_is_named(four: Pool):
    for process, (error, _, after) in enumerate(four(fails, 1, "forward", 2)):
        assert error == "KeyError: 'odd'" if process == 2 else "process 2 has raised KeyError: 'odd'" in error, error
        assert_close_tree(after[0], oracle(16))


Odd = dict[str, tuple[Callable[[Any], Any], str]]


def step_of(mesh: Any, params: Any = None, **options: Any) -> Any:
    how = {"devices": mesh} | options
    return fdp.value_and_grad(loss, **how)(PARAMS if params is None else params, own(mesh))


def single(mesh: Any) -> Any:
    return fdp.value_and_grad(loss, devices=mesh)({name: p.float() for name, p in PARAMS.items()}, own(mesh).float())


ODD: Odd = {
    "another dtype": (single, r"\['b'\] float64\[3\] in process 0, args\[0\]\['b'\] float32\[3\] in process 1"),
    "one more leaf": (
        lambda mesh: step_of(mesh, PARAMS | {"c": torch.ones(2)}),
        r"\['w'\] .*process 0.*'c'.*process 1",
    ),
    "a sum": (
        lambda mesh: step_of(mesh, reduction="sum"),
        "reduction='mean' in process 0, reduction='sum' in process 1",
    ),
    "a seed": (lambda mesh: step_of(mesh, seed=1), "seed=None in process 0, seed=1 in process 1"),
    "a gather": (lambda mesh: fdp.gather(fdp.scatter(own(mesh), mesh)), "value_and_grad in process 0, gather in pro"),
}


def differs(mesh: Any, name: str, has_been: bool) -> Any:
    """Process 1 does something else, which all have done before or nobody has."""
    odd, named = ODD[name]
    expected = [step_of(mesh) for _ in range(2)]
    if has_been:
        for _ in range(2):
            odd(mesh)
    with pytest.raises(RuntimeError, match=named):
        (odd if mesh.rank else step_of)(mesh)
    return expected, [step_of(mesh) for _ in range(2)]


@pytest.mark.parametrize("has_been", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("name", ODD)
def test_one_that_does_something_else_is_named(two: Pool, name: str, has_been: bool):
    found = two.outcomes(differs, 1, name, has_been)
    for each in found:
        assert not isinstance(each, Failure), each
        before, after = each
        assert_close_tree(after, before)


def both_fail(mesh: Any) -> Any:
    """Process 1 fails before the step, and process 0 in it: nobody waits."""
    odd = [False]

    def fn(p: Any, x: Tensor) -> Tensor:
        if odd[0]:
            raise KeyError("odd")
        return loss(p, x)

    step = fdp.value_and_grad(fn, devices=mesh)
    for _ in range(2):
        step(PARAMS, own(mesh))
    for _ in range(3):
        odd[0] = True
        with pytest.raises((KeyError, ValueError, RuntimeError), match=r"argnums is 7|odd"):
            (fdp.value_and_grad(fn, 7, devices=mesh) if mesh.rank else step)(PARAMS, own(mesh))
        odd[0] = False
    step(PARAMS, own(mesh))
    return messages(lambda: step(PARAMS, own(mesh))), step(PARAMS, own(mesh))


def test_both_may_fail_in_other_ways(two: Pool):
    for said, found in two(both_fail, 1):
        assert [name for name, _ in said] == ["gloo:all_reduce"]
        assert_close_tree(found, oracle(8))


def cannot_begin(mesh: Any) -> str:
    """Process 1 fails before its shards run: its parameters are not where all want the gradients."""
    step = fdp.value_and_grad(loss, devices=mesh, output_device="cpu")
    before = step(PARAMS, own(mesh))
    device = "meta" if mesh.rank else "cpu"
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor") as caught:
        step({name: p.to(device) for name, p in PARAMS.items()}, own(mesh))
    assert_close_tree(step(PARAMS, own(mesh)), before)
    return str(caught.value)


def test_a_process_that_fails_before_its_shards_run_is_not_waited_for(two: Pool):
    first, second = two(cannot_begin, 2)
    assert "process 1 has raised NotImplementedError: Cannot copy out of meta tensor" in first
    assert second.startswith("Cannot copy")


# ---- and collectives


def meets_in_process_1(mesh: Any, known: bool) -> Any:
    """Process 0 is at the end of the call, and has begun to add, when process 1 comes to a collective."""

    def uneven(p: Any, x: Tensor) -> Tensor:
        value = loss(p, x)
        return value + fdp.psum(value.detach()) if met[0] or mesh.rank else value

    met = [known]
    step = fdp.value_and_grad(uneven, devices=mesh)
    if known:
        step(PARAMS, own(mesh))
        met[0] = False
    elsewhere = "(psum|the slots of value_and_grad) in process 1"
    with pytest.raises(RuntimeError, match=f"different places: .*end of value_and_grad in process 0, {elsewhere}"):
        step(PARAMS, own(mesh))
    met[0] = True
    found = step(PARAMS, own(mesh))
    return found, sorted(name for name, _ in messages(lambda: step(PARAMS, own(mesh))))


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_collective_in_one_process_only_fails_in_both(two: Pool, slots: int, known: bool):
    (first, said), (second, _) = two(meets_in_process_1, slots, known)
    assert_close_tree(first, second)
    assert said == ["gloo:all_gather"] * 2 + ["gloo:all_reduce"] * 2  # the slots, and that of psum; the sums
