"""The step in which rows draw what they would draw on one device: the function is run without data before."""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdp._execution.generators import check_same_numbers
from fdp._execution.seeds import Seed
from fdp._placement.plan import Plan
from fdp._placement.transfers import Watch, watched
from fdp._rows.drawing import Draw, Draws, DrawsDiffer
from fdp._rows.noting import Notes, joined, two_numbers
from fdp._transforms.bind import planned
from fdp._transforms.call import Known, State, take_steps
from fdp._transforms.dry_run import APART, Fakes, problem_of
from fdp._trees import torch_private
from fdp._trees.tree import tensors_in, tree_map
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
    found: list[Notes] = []
    for rows in two_numbers(
        n for x in tensors_in([leaf.tensors(v) for leaf, v in _pairs(plan, state)]) for n in x.shape
    ):
        notes = Notes(rows)
        one = {"devices": state.device, "weights": None, "executor": "sequential", "seed": Seed(0, "rows", notes)}
        call = state.call._replace(options=state.call.options._replace(**one), kind=state.kind.on_one())
        with _apart(state.where), Fakes() as fakes, watched(Watch(), alone=True):
            fakes.has_graph = not torch_private.is_transformed()
            make, item = partial(_made, state.where, notes, fakes), partial(_item, notes, fakes)
            try:
                leaves = [leaf.remade(value, rows, make, item) for leaf, value in _pairs(plan, state)]
                take_steps(*planned(call, state.flat(plan)._replace(leaves=leaves)))
            except Exception as error:
                if type(error) is RuntimeError and "randomness='rows'" in str(error):
                    raise
                raise RuntimeError(
                    f"{state.where}: randomness='rows': to see what it draws, the function was run on {rows} rows "
                    f"without data, and there it fails: {problem_of(error, fakes)}"
                ) from error
        found.append(notes)
    return joined(found[0], found[1], state.where)


def _pairs(plan: Plan, state: State) -> Any:
    return zip(plan.leaves, state.values, strict=True)


def _apart(where: str) -> contextlib.AbstractContextManager[object]:
    try:
        APART.__enter__()
    except RuntimeError as error:  # torch refuses to be asked for eager code where it compiles
        raise RuntimeError(
            f"{where}: randomness='rows' cannot be used inside torch.compile: compile the function of a shard instead"
        ) from error
    stack = contextlib.ExitStack()
    stack.push(APART)
    return stack


def _made(where: str, notes: Notes, fakes: Fakes, tensor: Tensor, dim: int | None) -> Tensor:
    """A tensor without data, with so many rows."""
    if dim is None:
        return fakes.of(tensor)
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"{where}: randomness='rows': the rows of a tensor of layout {tensor.layout} are not known")
    shape = list(tensor.shape)
    shape[dim] = notes.rows
    fake = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_() if tensor.requires_grad and fakes.has_graph else fake


def _item(notes: Notes, fakes: Fakes, item: Tree, row: int) -> Tree:
    """The tree of a row, whose tensors are of no other."""
    own = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, fakes.of(item))
    notes.items.update(dict.fromkeys(map(id, tensors_in(own)), row))
    return own
