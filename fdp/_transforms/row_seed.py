"""The step in which rows draw what they would draw on one device: the function is run without data before."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdp._execution.executor import run_all
from fdp._execution.generators import check_same_numbers
from fdp._execution.seeds import Seed
from fdp._placement.partition import Partition
from fdp._placement.plan import Plan
from fdp._placement.slot import Slot
from fdp._placement.transfer_log import Watch
from fdp._rows.drawing import Draw, Draws, DrawsDiffer
from fdp._rows.row_dims import Notes, joined, two_numbers
from fdp._transforms.call import Known, State
from fdp._transforms.dry_run import Fakes, problem_of, without_data
from fdp._transforms.losses import Shard, aliases, loss_of, recording
from fdp._trees import torch_private
from fdp._trees.tree import map_tensors, tensors_in
from fdp._trees.types import Function, Tree

Do = Callable[[Plan, State], None]
_NOTED: "weakref.WeakKeyDictionary[Any, dict[Plan, tuple[Draw, ...]]]" = weakref.WeakKeyDictionary()
_CHANGED = (
    "if the function draws something else than in calls before, as a module does after .train(): fdp looks at it anew "
    "in the next call. In several processes, and in parallel_apply, it does not make a call twice. Take a function of "
    "its own for each"
)
_MOST = 64  # of a function; the oldest go first


def by_rows(known: Known, do: Do) -> Do:
    """The step that runs shards, or what runs it where each row is to draw its own."""
    seed = known.call.options.seed
    if seed is None or seed.randomness != "rows" or seed.draws is not None or known.around.is_compiling:
        return do
    return partial(draw_by_rows, do)


def draw_by_rows(do: Do, plan: Plan, state: State) -> None:
    """Run shards with a seed that knows all draws."""
    sizes, seed = state.partition.sizes, state.seed
    assert seed is not None
    if sizes is None:
        if len(state.partition.slots) > 1:
            raise ValueError(
                f"{state.where}: randomness='rows' needs to know which rows each slot has. Split the batch with "
                "fdp.scatter, or pass it whole"
            )
        do(plan, state)  # one slot draws all
        return
    check_same_numbers(state.partition.devices, state.where)
    rows = int(state.peers.rows(sum(sizes)))
    noted = {} if torch_private.is_transformed() else _noted(state.fn)  # vmap around the call may draw more
    found = noted.get(plan)
    if found is not None:
        try:
            state.seed = seed._replace(draws=Draws(found, rows))
            do(plan, state)
            return
        except DrawsDiffer as error:  # it has changed, as a module does by .train()
            noted.pop(plan, None)
            if not state.kind.may_repeat or state.peers.has_others():
                error.add_note(_CHANGED)
                raise
    draws = noted[plan] = _draws(plan, state)
    for old in list(noted)[:-_MOST]:
        noted.pop(old, None)
    state.seed = seed._replace(draws=Draws(draws, rows))
    do(plan, state)


def _noted(fn: Function) -> dict[Plan, tuple[Draw, ...]]:
    """What is kept for a function object. Not for its code: what it closes over may draw something else."""
    try:
        return _NOTED.setdefault(fn, {})
    except TypeError:  # without a hash, or something that nothing can refer to weakly
        return {}


def _draws(plan: Plan, state: State) -> tuple[Draw, ...]:
    """Run the function with two numbers of rows on one slot, and see what it draws."""
    each = list(zip(plan.leaves, state.values, strict=True))
    one, other = two_numbers(n for leaf, value in each for x in leaf.tensors(value) for n in x.shape)
    return joined(_notes(plan, state, one), _notes(plan, state, other), state.where)


def _notes(plan: Plan, state: State, rows: int) -> Notes:
    """What the function draws for so many rows: it is run on tensors without data."""
    notes, own = Notes(rows), Partition((0,), (state.device,), (rows,))
    slot = Slot(0, 1, range(rows), state.device, state.call.options.axis_name)
    with without_data(Watch()) as fakes:
        fakes.has_graph = not torch_private.is_transformed()
        make, item = partial(_made, state.where, notes, fakes, state.device), partial(_item, notes, fakes, state.device)
        try:
            each = zip(plan.leaves, state.values, strict=True)
            leaves = [leaf.parts(leaf.remade(value, rows, make, item), own)[0] for leaf, value in each]
            run_all([partial(_run, plan, state, leaves)], [slot], seed=Seed(0, "rows", notes))
        except Exception as error:
            if type(error) is RuntimeError and "randomness='rows'" in str(error):
                raise
            raise RuntimeError(
                f"{state.where}: randomness='rows': to see what it draws, the function was run on {rows} rows "
                f"without data, and there it fails: {problem_of(error, fakes)}"
            ) from error
    return notes


def _run(plan: Plan, state: State, leaves: list[Any]) -> None:
    """Run the function, and if it is differentiated, the backward too, which may draw."""
    if plan.gradients is None:
        state.run_shard(leaves)
        return
    shard = Shard(0, leaves, plan.gradients)

    def loss(*tensors: Tensor) -> Tensor:
        return loss_of(state, shard.leaves(tensors))[0]

    if plan.gradients.needs_func:  # which draws by other operations
        with recording(state.around):
            value, pull, *_ = torch.func.vjp(loss, *shard.tensors)
            pull(torch.ones_like(value))
        return
    with torch.enable_grad():
        tensors = aliases(shard.tensors, False)
        value = loss(*tensors)
        if value.requires_grad and tensors:
            torch.autograd.grad(value, tensors, allow_unused=True)


def _made(where: str, notes: Notes, fakes: Fakes, device: torch.device, tensor: Tensor, dim: int | None) -> Tensor:
    """A tensor without data, with so many rows."""
    if dim is None:
        return fakes.of(tensor).to(device)
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"{where}: randomness='rows': the rows of a tensor of layout {tensor.layout} are not known")
    shape = list(tensor.shape)
    shape[dim] = notes.rows
    fake = torch.empty(shape, dtype=tensor.dtype, device=device)
    return fake.requires_grad_() if tensor.requires_grad and fakes.has_graph else fake


def _item(notes: Notes, fakes: Fakes, device: torch.device, item: Tree, row: int) -> Tree:
    """The tree of a row, whose tensors are of no other."""
    own = map_tensors(lambda x: x.to(device).detach().requires_grad_(x.requires_grad), fakes.of(item))
    notes.items.update(dict.fromkeys(map(id, tensors_in(own)), row))
    return own
