"""What the gradient functions will do, for `explain`."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fdp._placement.plan import Plan, PlannedLeaf
from fdp._placement.planned_leaves import of_gradients as of_gradient_leaves
from fdp._placement.planned_leaves import of_outputs
from fdp._placement.transfers import Transfer
from fdp._transforms.arguments import check_several, keyword_args, positional_args
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.differentiate import Differentiation
from fdp._transforms.dry_run import Fakes
from fdp._transforms.explained import Dry, Explained
from fdp._trees.tree import Flat
from fdp._trees.types import Tree


def of_gradients(settings: Differentiation, args: tuple[Tree, ...], kwargs: Mapping[str, Tree]) -> Explained:
    """A call of a gradient function with these arguments."""

    def run(dry: Dry, fakes: Fakes) -> Tree:
        # A count is a value, and says nothing of what moves where.
        count = None if settings.count is None else lambda *args, **kwargs: 1
        same = dataclasses.replace(settings, fn=dry, count=count, seed=None, randomness="different")
        return same.compute(fakes.of(args), {name: fakes.of(value) for name, value in kwargs.items()})

    def outputs(
        flats: Sequence[Flat], plan: Plan, results: Sequence[Any], joined: Any, joins: Sequence[Transfer]
    ) -> Iterator[PlannedLeaf]:
        value, aux, _ = joined
        losses = [result[0] for result in results] if settings.has_aux else results
        yield from _by(settings.count is not None, of_outputs(losses, value, settings.reduction, joins, "loss"))
        if settings.has_aux:
            auxes = [result[1] for result in results]
            leaves = of_outputs(auxes, aux, dims_of(auxes[0], settings.aux_dims, settings.where), joins, "aux")
            yield from _by(settings.aux_weight == "count", leaves)
        for i in settings.positions(len(args)):
            yield from of_gradient_leaves(flats[i], plan.partition, joins)

    named = positional_args(args, settings.in_dims_of(len(args)), "args", "explain")
    keywords = keyword_args(kwargs, settings.kwarg_dims, "explain")
    check_several(settings.fn, named, kwargs, "explain")
    every = [*named, *keywords.values()]
    return Explained(
        settings.fn, every, len(args), settings.options, run, outputs, settings.microbatches, differentiates=True
    )


def _by(count: bool, leaves: Iterable[PlannedLeaf]) -> Iterator[PlannedLeaf]:
    """Leaves with what their means are weighted by."""
    for leaf in leaves:
        yield dataclasses.replace(leaf, how="mean by count") if count and leaf.how == "mean by rows" else leaf
