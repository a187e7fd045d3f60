"""The steps of every call: the leaves of each shard, writes in place, and running the function.

A step is a function of the plan and the state of a call. What is chosen, is chosen by the plan: no step asks again what
is around the call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch import Tensor

from fdp._execution.executor import run, traced
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.leaves import put
from fdp._placement.moves import layers
from fdp._placement.peers import ALONE
from fdp._placement.plan import Plan, Step
from fdp._transforms.call import Known, State
from fdp._transforms.row_seed import by_rows
from fdp._trees import torch_private
from fdp._trees.message_lists import listed
from fdp._trees.printed import count_text, runs_text


def begin(known: Known) -> list[Step]:
    """What comes before shards run."""
    steps: list[Step] = []
    if known.peers is not ALONE:
        steps.append(Step(enter, says("enter the call in all processes")))
    if any(not leaf.is_cut for leaf in known.leaves):
        steps.append(Step(replicate, _replicated, "replicate"))
    if any(leaf.is_cut for leaf in known.leaves):
        steps.append(Step(scatter, _scattered, "scatter"))
    if not known.around.is_compiling:  # reading versions breaks the graph
        is_plain = not (known.around.is_transformed or known.around.is_given_inference)
        note = note_versions if is_plain and not any(map(_is_copied, known.leaves)) else note_all_versions
        steps.append(Step(note, says("note versions")))
    return steps


def end(known: Known) -> list[Step]:
    """What comes after they have run."""
    return [] if known.around.is_compiling else [Step(check_writes, says("check writes"))]


def says(text: str) -> Callable[[Plan], str]:
    """The same of any plan."""
    return partial(_said, text)


def _said(text: str, plan: Plan) -> str:
    return text


def running(known: Known) -> Step:
    """Running the function on each shard."""
    do = by_rows(known, trace_shards if known.around.is_compiling else run_shards)
    return Step(do, partial(_ran, numbers_text(known)))


def _ran(numbers: str, plan: Plan) -> str:
    return f"run {shards_text(plan)}{numbers}"


def numbers_text(known: Known) -> str:
    """Which random numbers shards draw."""
    seed = known.call.options.seed
    return "" if seed is None else _NUMBERS[seed.randomness]


_NUMBERS = {
    "different": " with seeds of their own",
    "same": " with one seed",
    "rows": " with the random numbers of their rows",
}


def _replicated(plan: Plan) -> str:
    return f"replicate {count_text(sum(not leaf.is_cut for leaf in plan.leaves), 'leaf', 'leaves')}"


def _scattered(plan: Plan) -> str:
    said = listed(plan.cut, lambda leaf: f"{leaf.path} {_along(leaf)}", most=3)
    return f"split {said}" + ("" if plan.sizes is None else f" into {runs_text(plan.sizes)}")


def _along(leaf: LeafPlan) -> str:
    return f"dim {leaf.dim}" if isinstance(leaf.dim, int) else "items" if leaf.dim == "items" else "as it is"


def shards_text(plan: Plan) -> str:
    """How many there are."""
    return count_text(len(plan.places), "shard", "shards")


def enter(plan: Plan, state: State) -> None:
    """Other processes take part."""
    if state.peers.enter():
        state.values = [leaf for flat in state.flats for leaf in flat.leaves]
        state.given = [x for leaf in plan.leaves for x in leaf.tensors(state.values[leaf.index])]
        state.columns = [state.values.copy() for _ in state.columns]
    state.peers.begins_with(state.given)


def replicate(plan: Plan, state: State) -> None:
    """What is whole, on the devices where it is not yet."""
    if plan.moved:
        put(plan.moved, state.values, state.columns, state.memo)


def scatter(plan: Plan, state: State) -> None:
    """To each shard its rows."""
    put(plan.cut, state.values, state.columns, state.memo)


def note_versions(plan: Plan, state: State) -> None:
    """Remember the versions of the caller's tensors."""
    state.watched = state.given
    state.versions = list(map(torch_private.version, state.watched))


def note_all_versions(plan: Plan, state: State) -> None:
    """The same with the copies that were made of them. Parts on the same device share the version of the whole.

    A write under vmap shows in the version of what is batched. Tensors of inference mode have no version.
    """
    copies = [x for found in state.memo.values() for x in _each(found)]
    state.watched = [layer for x in [*state.given, *copies] if not x.is_inference() for layer in layers(x)]
    state.versions = list(map(torch_private.version, state.watched))


def _is_copied(leaf: LeafPlan) -> bool:
    """Whether shards have other tensors of it than parts of the whole."""
    return leaf.moves or (leaf.is_cut and leaf.dim == "items")


def _each(found: Any) -> Sequence[Tensor]:
    return (found,) if isinstance(found, Tensor) else found


def check_writes(plan: Plan, state: State) -> None:
    """Raise if the function wrote in place to an argument, as far as version counters tell."""
    versions = list(map(torch_private.version, state.watched))
    if versions == state.versions:
        return
    changes = zip(state.watched, state.versions, versions, strict=True)
    written = {id(tensor) for tensor, old, new in changes if old != new}

    def is_written(tensor: Tensor) -> bool:
        return any(id(layer) in written for layer in layers(tensor))

    owners = {id(x) for (x, _), found in state.memo.items() if any(map(is_written, _each(found)))}
    paths = [
        path
        for leaf in plan.leaves
        for tensor in leaf.tensors(state.values[leaf.index])
        if id(tensor) in owners or is_written(tensor)
        for path in leaf.paths_of(state.values[leaf.index], tensor)
    ]
    raise RuntimeError(
        f"{state.where}: the function wrote in place to {listed(list(dict.fromkeys(paths)))}. It must be pure: work on "
        "x.clone(), or return the new value. The tensors that were passed may hold the change already"
    )


def run_shards(plan: Plan, state: State) -> None:
    """Run the function on each shard."""
    state.outputs = outputs = [None] * len(state.columns)
    tasks = list(map(partial, repeat(state.run_shard), state.columns))
    run(tasks, state.places, outputs.__setitem__, state.call.options.executor, state.seed, state.peers)


def trace_shards(plan: Plan, state: State) -> None:
    """The same where torch.compile traces the call."""
    state.outputs = traced([partial(state.run_shard, column) for column in state.columns], state.seed)
