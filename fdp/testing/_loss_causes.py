"""What usually makes a loss differ on slots: how the losses of two parts make up that of the batch."""

import torch

from fdp._dims import balanced
from fdp.testing._case import Case, Run, derivatives
from fdp.testing._compare import Difference, wide

MEET = (
    "batch statistics (BatchNorm in train mode, a mean, softmax, sort or cumulative sum over dim 0) or pairs of rows "
    "(contrastive losses, in-batch negatives)"
)


def loss_cause(case: Case, whole: Run, found: Difference) -> str | None:
    """How the losses of two parts make up that of the batch: `whole = a * first + b * second`, with its gradients."""
    if case.loss is None or found.leaf.path != "loss":
        return None
    first, second = (_with_gradients(part, part.whole(case.places)) for part in parts_of(case))
    of_batch, matrix = _with_gradients(case, whole), torch.stack([first, second], 1)
    fit = torch.linalg.lstsq(matrix, of_batch.unsqueeze(1), rcond=1e-6, driver="gelsd")
    if fit.rank.item() < 2:
        return None
    (a,), (b,) = fit.solution.tolist()
    sizes = balanced(case.sample.rows, 2)
    exact = 1e-6 if whole.results[0][1].dtype is torch.float64 else 1e-3
    if (matrix @ fit.solution[:, 0] - of_batch).norm() > exact * of_batch.norm():
        return (
            "rows that see each other: the loss is no weighted sum of the losses of two parts of the batch. Look for "
            f"{MEET}, a root or logarithm of a mean, or, in a sum, a term that belongs to no row, such as weight decay"
        )
    if _near((a, b), (1, 1), exact):
        return "a sum over rows, taken for a mean: it is the sum of the losses of its parts. Pass reduction='sum'"
    if _near((a, b), (sizes[0] / sum(sizes), sizes[1] / sum(sizes)), exact):
        given = "reduction='sum'" if case.loss.reduction == "sum" else "count=" if case.loss.count else None
        return given and f"a mean over rows, taken for something else: leave out {given}"
    if _near((a + b,), (1,), exact):
        how = "count= returns other numbers" if case.loss.count else "pass count=, which returns how many"
        return (
            f"a mean over something else than rows, such as tokens that are not padding: parts of {sizes[0]} and "
            f"{sizes[1]} rows have shares of {a:.3g} and {b:.3g} in it; {how}"
        )
    return (
        "a root, logarithm or the like of a sum or mean, or a factor that depends on the number of rows: the loss is "
        f"made of {a:.3g} and {b:.3g} times those of its two parts"
    )


def _with_gradients(case: Case, run: Run) -> torch.Tensor:
    """The loss and its gradients in the parameters, in one vector."""
    loss = run.results[0][1]
    params = [leaf for (i, _), leaf in zip(case.places, case.leaves(run), strict=True) if i == 0]
    grads = derivatives([loss], [torch.ones_like(loss)], params, create_graph=False)
    return torch.cat([_real(tensor).cpu() for tensor in (loss, *grads)])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    flat = wide(tensor).reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _near(found: tuple[float, ...], expected: tuple[float, ...], exact: float) -> bool:
    return all(abs(a - b) < exact for a, b in zip(found, expected, strict=True))


def parts_of(case: Case) -> list[Case]:
    """The case with the first and with the second half of the rows."""
    rows, half = range(case.sample.rows), balanced(case.sample.rows, 2)[0]
    return [case._replace(sample=case.sample.take(part)) for part in (rows[:half], rows[half:])]
