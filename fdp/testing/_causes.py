"""The most usual causes of other numbers on slots, each tried on the sample before it is named."""

import contextlib

import torch

from fdp._placement.join import mean
from fdp._placement.partition import balanced
from fdp.testing._case import Case, CheckedRun, Way, derivatives
from fdp.testing._compare import NODES, Leaf, differing, wide

_MEET = (
    "batch statistics (BatchNorm in train mode, a mean, softmax, sort or cumulative sum over dim 0) or pairs of rows "
    "(contrastive losses, in-batch negatives)"
)


def cause_of(case: Case, whole: CheckedRun, leaf: Leaf, way: Way) -> str:
    """What to say of a difference: its cause if one of the usual ones fits, else where to look."""
    if leaf.spec == NODES:
        return "Usual cause: a container with a part for each row: stack it to a tensor, or give it the out_dim 'items'"
    is_gradient = leaf.path.startswith("grads")
    with contextlib.suppress(Exception):  # the function is called in ways that it was never meant for
        text = agrees_in_sequence(case, whole, way)
        if not text and len(way.devices) > 1 and not is_gradient:
            text = _of_loss(case, leaf) if leaf.path == "loss" else _of_output(case, leaf)
        if text:
            return f"Usual cause: {text}"
    if is_gradient:
        return (
            "The values agree and the gradients do not: look for a backward that uses other rows, or their number, in "
            "an autograd.Function, a hook on a tensor, or a detach"
        )
    return (
        "No usual cause fits: look for what depends on how many rows there are, on where they stand, or on "
        "state. If the difference is small, pass dtype=torch.float64: what agrees there is rounding"
    )


def agrees_in_sequence(case: Case, whole: CheckedRun, way: Way) -> str | None:
    """What is usual if the same shards agree one after the other."""
    if way.executor == "sequential" or len(way.devices) == 1:
        return None
    with contextlib.suppress(Exception):
        if not case.differences(whole, case.split(way._replace(executor="sequential"))):
            text = "state that calls share, or that belongs to one thread: one after the other its shards agree"
            return f"{text}. Call modules by fdp.functional, write to no object outside, set nothing for one thread"
    return None


def _of_loss(case: Case, leaf: Leaf) -> str | None:
    """How the loss, with its gradients, is made of those of two parts of the batch."""
    if leaf.got.isnan() and not leaf.want.isnan():
        return "a mean over nothing (0/0) on some slot, such as one whose rows are all padding: pass count="
    batch, first, second = (_loss_and_gradients(part) for part in (case, *_parts(case)))
    exact = 1e-6 if leaf.want.dtype is torch.float64 else 1e-3

    def is_made_of(a: float, b: float) -> bool:
        return bool((a * first + b * second - batch).norm() <= exact * batch.norm())

    m, n = balanced(case.sample.rows, 2)
    if is_made_of(1, 1):
        return "a sum over rows, taken for a mean. Pass reduction='sum'"
    if is_made_of(m / (m + n), n / (m + n)):
        return "a mean over rows, taken for something else: leave out reduction= and count="
    share = ((batch - second) @ (first - second) / (first - second).square().sum()).item()
    if not is_made_of(share, 1 - share):
        return f"rows that see each other: no weights of its parts give the loss. Look for {_MEET}, or a root of a mean"
    if len(batch) == 2:  # no gradients: any number is a mean of two
        return None
    return (
        f"a mean over something else than rows, such as tokens that are not padding: parts of {m} and {n} rows have "
        f"shares of {share:.3g} and {1 - share:.3g} in it; pass a count= that returns how many"
    )


def _loss_and_gradients(case: Case) -> torch.Tensor:
    run = case.whole(case.places)
    loss, params = run.results[0][1], [run.arguments.leaves[i] for i in case.places if case.sample.is_param(i)]
    found = [loss, *derivatives([loss], [torch.ones_like(loss)], params)]
    return torch.view_as_real(torch.cat([wide(each).reshape(-1).to(torch.complex128) for each in found])).view(-1)


def _of_output(case: Case, leaf: Leaf) -> str | None:
    """Which other way to join two parts of the batch gives the whole, or whether rows see each other."""
    if isinstance(leaf.spec, int) and leaf.want.shape == leaf.got.shape:
        return _rows_that_meet(case, leaf)
    both = torch.stack(parts := [_at(part, leaf.path) for part in _parts(case)])
    ways = {"sum": both.sum(0), "mean": mean(parts, balanced(case.sample.rows, 2)), "max": both.amax(0)}
    ways |= {"min": both.amin(0), 0: both.reshape(-1, *both.shape[2:])}
    right = [how for how, value in ways.items() if how != leaf.spec and _agree(case, leaf.want, value)]
    if right:
        return f"another way to join: of two parts of the batch, {right[0]!r} gives it right"
    return _rows_that_meet(case, leaf)


def _rows_that_meet(case: Case, leaf: Leaf) -> str | None:
    """Whether a row is another when all rows are like it."""
    for row in (0, case.sample.rows - 1):
        alike = _at(case._replace(sample=case.sample.take([row] * case.sample.rows)), leaf.path)
        if alike.shape[leaf.spec] != case.sample.rows:
            return None
        if not _agree(case, leaf.want.select(leaf.spec, row), alike.select(leaf.spec, row)):
            return f"rows that see each other: a row changes when the others are replaced. Look for {_MEET}"
    return None


def _agree(case: Case, want: torch.Tensor, got: torch.Tensor) -> bool:
    return not differing([Leaf("", None, want, got)], case.tolerance)


def _at(case: Case, path: str) -> torch.Tensor:
    run = case.whole(())
    return next(leaf.want for leaf in case.pairs(run, run) if leaf.path == path)


def _parts(case: Case) -> list[Case]:
    rows, half = range(case.sample.rows), balanced(case.sample.rows, 2)[0]
    return [case._replace(sample=case.sample.take(part)) for part in (rows[:half], rows[half:])]
