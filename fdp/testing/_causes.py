"""What usually makes a function give other numbers on slots: guesses, each tried on the sample before it is made."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fdp._dims import balanced
from fdp._join import mean
from fdp._tensor import is_inexact
from fdp._typing import Executor
from fdp.testing._case import Case, Run
from fdp.testing._compare import Difference, Leaf, Tolerance, first_of, wide
from fdp.testing._loss_causes import MEET, loss_cause, parts_of


def cause_of(case: Case, whole: Run, found: Difference, n: int, executor: Executor) -> str:
    """The usual cause of a difference, in words."""
    looks: list[Callable[[], str | None]] = [
        lambda: _one_slot(n),
        lambda: _side_by_side(case, whole, n, executor),
        lambda: _rounding(case, found, n, executor),
        lambda: _random(case),
        lambda: _nothing_to_average(case, found),
        lambda: loss_cause(case, whole, found),
        lambda: _shape(case, found),
        lambda: _backward(found),
        lambda: _reduced(case, found),
        lambda: _rows(case, found),
    ]
    return _first(looks) or (
        "not found by trying; look for what depends on how many rows there are, or on which ones come together"
    )


def cause_of_error(case: Case, whole: Run, error: Exception, n: int, executor: Executor) -> str:
    """The usual cause of an error that one slot does not give."""
    if text := _first([lambda: _side_by_side(case, whole, n, executor)]):
        return text
    if str(error).startswith(("dp_apply: ", "value_and_grad: ")):
        return "an output that is not made row by row, or is joined in another way than it is made"
    return (
        "a fixed batch size, or a tensor that every slot gets whole although it has a row for each of the batch (None "
        "in in_dims, or closed over)"
    )


def _first(looks: Iterable[Callable[[], str | None]]) -> str | None:
    for look in looks:
        with contextlib.suppress(Exception):  # these call the function in ways that it was never meant for
            if (text := look()) is not None:
                return text
    return None


def _one_slot(n: int) -> str | None:
    if n > 1:
        return None
    return "on one slot it gets the same numbers as without; it must depend on something beside them, such as state"


def _side_by_side(case: Case, whole: Run, n: int, executor: Executor) -> str | None:
    """Threads, if the same shards agree one after the other."""
    if executor == "sequential":
        return None
    run = case.split(n, "sequential")
    if case.values(whole, run, bitwise=False) or case.gradients(whole, run):
        return None
    return (
        "state that calls share, or that belongs to one thread: run one after the other ('sequential') its shards "
        "agree. Call modules by fdp.functional, write to no object outside, and make no thread-local settings"
    )


def _rounding(case: Case, found: Difference, n: int, executor: Executor) -> str | None:
    """Rounding, if the same check passes in double precision."""
    want = found.leaf.want
    if not isinstance(want, torch.Tensor) or not is_inexact(want) or want.dtype in (torch.float64, torch.complex128):
        return None
    precise = case._replace(sample=case.sample.to(torch.float64), tolerance=Tolerance())
    whole, run = precise.whole(case.places), precise.split(n, executor)
    if precise.values(whole, run, bitwise=False) or precise.gradients(whole, run):
        return None
    return "rounding: in float64 it agrees. Pass dtype=torch.float64, or larger rtol and atol"


def _random(case: Case) -> str | None:
    before = torch.get_rng_state()
    case.whole(())
    if torch.equal(before, torch.get_rng_state()):
        return None
    return (
        "random numbers: it seeds and draws its own, the same ones on every slot. Draw them outside, and pass them as "
        "an input with a row for each of the batch"
    )


def _nothing_to_average(case: Case, found: Difference) -> str | None:
    want, got = found.leaf.want, found.leaf.got
    if want.shape != got.shape or not (got.isnan() & ~want.isnan()).any():
        return None
    advice = (
        "return sums, with out_dims='sum', and divide after"
        if case.loss is None
        else "pass count=, which gives such a slot no weight"
    )
    return f"a mean over nothing (0/0) on some slot, such as one whose rows are all padding: {advice}"


def _at(case: Case, path: str) -> Any:
    """The value that a case has for the leaf at a path, on one device."""
    run = case.whole(())
    return next(leaf.want for leaf in case.pairs(run, run) if leaf.path == path)


def _shape(case: Case, found: Difference) -> str | None:
    leaf = found.leaf
    if leaf.want.shape == leaf.got.shape:
        return None
    part = _at(parts_of(case)[0], leaf.path)
    grow = [i for i, (a, b) in enumerate(zip(leaf.want.shape, part.shape, strict=True)) if a != b]
    if isinstance(leaf.spec, int) and leaf.spec % leaf.want.ndim not in grow:
        return (
            f"one result for the whole batch, of which each slot has its own: its size along dim {leaf.spec} does not "
            f"grow with the rows. Choose 'mean', 'sum', 'max' or 'min' in {_choices(leaf)}"
        )
    if not isinstance(leaf.spec, int) and len(grow) == 1:
        return f"rows along dim {grow[0]}, joined as {leaf.spec!r}: choose {grow[0]} in {_choices(leaf)}"
    return f"a shape that depends on how many rows come together, along dims {grow}, as for a matrix of pairs"


def _backward(found: Difference) -> str | None:
    if "grads" not in found.leaf.path:
        return None
    want, got = wide(found.leaf.want), wide(found.leaf.got)
    large = want.abs() > 1e-6 * want.abs().max()
    ratios = got[large] / want[large]
    constant = ratios.numel() > 0 and bool(((ratios - ratios[0]).abs() < 1e-4 * ratios[0].abs()).all())
    times = f", {ratios[0].item():.4g} times those of one device" if constant else ""
    return (
        f"a backward that uses other rows, or their number: the values agree and the gradients do not{times}. Look for "
        "a custom autograd.Function, a hook on a tensor, or a detach that depends on the rows"
    )


def _reduced(case: Case, found: Difference) -> str | None:
    """For a leaf that is one value a slot: which reduction of two parts gives that of the batch."""
    leaf = found.leaf
    if isinstance(leaf.spec, int) or leaf.spec == "items":
        return None
    parts = [_at(part, leaf.path) for part in parts_of(case)]
    halves = balanced(case.sample.rows, 2)
    stacked = torch.stack(parts)
    results = {"max": stacked.amax(0), "min": stacked.amin(0), "sum": sum(parts), "mean": mean(parts, halves)}
    right = [how for how, value in results.items() if how != leaf.spec and _agrees(case, leaf.want, value)]
    if right:
        return f"another way to join: of two parts of the batch, {' and '.join(map(repr, right))} gives it right"
    return (
        f"a value that is neither sum, mean, 'max' nor 'min' over rows, joined as {leaf.spec!r}: return sums (and a "
        f"count) under 'sum' in {_choices(leaf)}, and finish after"
    )


def _rows(case: Case, found: Difference) -> str | None:
    """For a leaf with rows: what else a row depends on."""
    leaf, rows = found.leaf, case.sample.rows
    if not isinstance(leaf.spec, int) or leaf.want.shape[leaf.spec] != rows:
        return None
    if any(_sees_others(case, leaf, row) for row in (0, rows - 1)):
        return f"rows that see each other: a row changes when the others are replaced. Look for {MEET}"
    rolled = _at(case._replace(sample=case.sample.take([rows - 1, *range(rows - 1)])), leaf.path)
    if not _agrees(case, leaf.want.roll(1, leaf.spec), rolled):
        return (
            "a row depends on its position in the batch, as with torch.arange(len(x)) or a tensor that is not split. "
            "Pass what belongs to a row as an input"
        )
    return "a row depends on how many there are, as in x / len(x)"


def _sees_others(case: Case, leaf: Leaf, row: int) -> bool:
    """Whether a row's result is another when all rows are like it."""
    alike = _at(case._replace(sample=case.sample.take([row] * case.sample.rows)), leaf.path)
    return not _agrees(case, leaf.want.select(leaf.spec, row), alike.select(leaf.spec, row))


def _agrees(case: Case, want: Any, got: Any) -> bool:
    return first_of([Leaf("", None, want, got)], case.tolerance, None, bitwise=False) is None


def _choices(leaf: Leaf) -> str:
    return "aux_dims" if leaf.path.startswith("aux") else "out_dims"
