"""The seed of a call whose rows draw what they would draw on one device: its function is run without data before."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fdp._execution.seeds import Seed
from fdp._placement.peers import ALONE
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.transfers import only
from fdp._rows.drawing import Draw, Draws, DrawsDiffer
from fdp._rows.noting import Notes, joined, two_numbers
from fdp._transforms.dry_run import APART, Fakes, problem_of
from fdp._trees import torch_private
from fdp._trees.tree import Flat, flatten, tensors_in, tree_map, unflatten
from fdp._trees.types import AUTO, Function, Tree

T = TypeVar("T")
_NOTED: "weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Draw, ...]]]" = weakref.WeakKeyDictionary()
_CHANGED = (
    "if the function draws something else than in calls before, as a module does after .train(): fdp looks at it anew "
    "in the next call. In several processes, and in parallel_apply, it does not make a call twice. Take a function of "
    "its own for each"
)
_MOST = 64  # of a function; the oldest go first


class RowCall(NamedTuple):
    """A call as far as its draws depend on it.

    `again` makes the same call on one device with other arguments and another seed. `repeats`: it may be made twice.
    """

    where: str
    fn: Function
    flats: Sequence[Flat]
    rows: int | None
    key: Hashable
    again: Callable[[Sequence[Tree], Seed], object]
    repeats: bool


def with_rows(seed: Seed | None, row_call: Callable[[], RowCall], run: Callable[[Seed | None], T]) -> T:
    """Run a call; where each row is to draw its own, with a seed that knows all draws."""
    if seed is None or seed.randomness != "rows" or seed.draws is not None or torch.compiler.is_compiling():
        return run(seed)
    call = row_call()
    if call.rows is None:  # nothing is split, and one slot draws all
        return run(seed)
    key = call.key, torch.is_grad_enabled(), *map(_kinds, call.flats)
    noted = {} if torch_private.is_transformed() else _noted(call.fn)  # vmap around the call may draw more
    found = noted.get(key)
    if found is not None:
        try:
            return run(seed._replace(draws=Draws(found, call.rows)))
        except DrawsDiffer as error:  # it has changed, as a module does by .train()
            noted.pop(key, None)
            if not call.repeats:
                error.add_note(_CHANGED)
                raise
    draws = noted[key] = _draws(call)
    for old in list(noted)[:-_MOST]:
        noted.pop(old, None)
    return run(seed._replace(draws=Draws(draws, call.rows)))


def _noted(fn: Function) -> dict[Hashable, tuple[Draw, ...]]:
    """What is kept for a function object. Not for its code: what it closes over may draw something else."""
    try:
        return _NOTED.setdefault(fn, {})
    except TypeError:  # without a hash, or something that nothing can refer to weakly
        return {}


def _kinds(flat: Flat) -> Hashable:
    """What draws may depend on of an argument: all but rows."""
    return str(flat.structure), str([_kind(*pair) for pair in zip(flat.leaves, flat.specs, strict=True)])


def _kind(leaf: Any, spec: Any) -> Any:
    if isinstance(leaf, Slots):
        return _kinds(flatten(leaf.shards[0], "a shard", None if spec is None else 0))
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    rows = None if spec is None or spec == "items" else spec % max(leaf.ndim, 1)
    return leaf.dtype, leaf.device, [n for i, n in enumerate(leaf.shape) if i != rows]


def _draws(call: RowCall) -> tuple[Draw, ...]:
    """Run the function with two numbers of rows, and see what it draws."""
    found = []
    for rows in two_numbers(n for flat in call.flats for x in _tensors(flat) for n in x.shape):
        notes, log = Notes(rows), []
        with _apart(call.where), Fakes() as fakes, only(log):
            fakes.has_graph = not torch_private.is_transformed()
            try:
                trees = [_tree(flat, notes, fakes, call.where) for flat in call.flats]
                call.again(trees, Seed(0, "rows", notes))
            except Exception as error:
                if type(error) is RuntimeError and "randomness='rows'" in str(error):
                    raise
                raise RuntimeError(
                    f"{call.where}: randomness='rows': to see what it draws, the function was run on {rows} rows "
                    f"without data, and there it fails: {problem_of(error, fakes)}"
                ) from error
        found.append(notes)
    return joined(found[0], found[1], call.where)


def _tensors(flat: Flat) -> list[torch.Tensor]:
    return tensors_in([leaf.shards if isinstance(leaf, Slots) else leaf for leaf in flat.leaves])


def _item(item: Tree, row: int, notes: Notes, fakes: Fakes) -> Tree:
    """The tree of a row, whose tensors are of no other."""
    own = tree_map(
        lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x, fakes.of(item)
    )
    notes.items.update(dict.fromkeys(map(id, tensors_in(own)), row))
    return own


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


def _tree(flat: Flat, notes: Notes, fakes: Fakes, where: str) -> Tree:
    """An argument with so many rows, without data."""
    pairs = zip(flat.leaves, flat.specs, strict=True)
    return unflatten(flat.structure, [_leaf(leaf, spec, notes, fakes, where) for leaf, spec in pairs])


def _leaf(leaf: Any, spec: Any, notes: Notes, fakes: Fakes, where: str) -> Any:
    if isinstance(leaf, Slots):
        known = isinstance(leaf, Sharded) and (leaf.sizes is not None or spec is not None)
        dims = spec if leaf.dims is AUTO else leaf.dims
        flat = flatten(leaf.shards[0], "shard", dims if known else None)
        one = {"shards": (_tree(flat, notes, fakes, where),), "devices": leaf.devices[:1], "peers": ALONE}
        return dataclasses.replace(leaf, **one, sizes=(notes.rows,) if known else None)
    if spec == "items":
        return type(leaf)([_item(leaf[i % len(leaf)], i, notes, fakes) for i in range(notes.rows)])
    if spec is None or not isinstance(leaf, torch.Tensor):
        return fakes.of(leaf)
    if leaf.layout is not torch.strided:
        raise RuntimeError(f"{where}: randomness='rows': the rows of a tensor of layout {leaf.layout} are not known")
    shape = list(leaf.shape)
    shape[spec] = notes.rows
    fake = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return fake.requires_grad_() if leaf.requires_grad and fakes.has_graph else fake
