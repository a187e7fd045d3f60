"""How a loss over a batch is differentiated: checked settings, and the call that they describe."""

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdp._execution.seeds import Seed, seed_of
from fdp._placement.devices import as_device
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.peers import ALONE, Peers
from fdp._placement.plan import Plan, Step
from fdp._placement.planned_leaf import PlannedLeaf, of_outputs
from fdp._placement.transfer_log import Transfer
from fdp._transforms.arguments import check_function, star_args
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.bind import run
from fdp._transforms.call import Begun, Call, CallKind, Known, Options, State
from fdp._transforms.counts import ask_count, count_rows, each_is_one
from fdp._transforms.row_seed import by_rows
from fdp._transforms.shards import (
    differentiate_by_autograd,
    differentiate_by_func,
    join_losses,
    sum_over_processes,
    warn_of_unused,
)
from fdp._transforms.steps import begin, end, numbers_text, says, shards_text
from fdp._transforms.sums import GradientPlan, Unused, gradient_plan
from fdp._trees.message_lists import listed
from fdp._trees.printed import count_text
from fdp._trees.tracebacks import api_boundary, inside_boundary
from fdp._trees.tree import Flat
from fdp._trees.types import (
    AUTO,
    Auto,
    AuxWeight,
    DeviceLike,
    Devices,
    Dims,
    Executor,
    Function,
    Randomness,
    Reduction,
    Tree,
)


@dataclasses.dataclass(kw_only=True)  # frozen ones are slow to make
class Differentiation(CallKind):
    """The arguments of `value_and_grad`, checked when built."""

    where: str
    fn: Function
    argnums: int | tuple[int, ...]
    has_aux: bool
    devices: Devices = None
    in_dims: Dims | Auto = AUTO
    kwarg_dims: Dims = 0
    reduction: Reduction = "mean"
    count: Function | None = None
    aux_dims: Dims | Auto = AUTO
    aux_weight: AuxWeight = "rows"
    create_graph: bool | None = None
    microbatches: int = 1
    reduce_dtype: torch.dtype | None = None
    output_device: DeviceLike | None = None
    weights: Sequence[float] | None = None
    executor: Executor = "auto"
    seed: int | Seed | None = None
    randomness: Randomness = "different"
    axis_name: str = "data"
    unused: Unused = "zeros"
    options: Options = dataclasses.field(init=False, repr=False)
    target: torch.device | None = dataclasses.field(init=False, repr=False)
    key: Hashable = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_function(self.fn, self.where)
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"{self.where}: reduction must be 'mean' or 'sum', got {self.reduction!r}")
        if self.reduction == "sum" and self.count is not None:
            raise ValueError(f"{self.where}: count says what a mean is over; reduction='sum' has no use for it")
        if self.aux_weight not in ("rows", "count"):
            raise ValueError(f"{self.where}: aux_weight must be 'rows' or 'count', got {self.aux_weight!r}")
        if self.aux_weight == "count" and self.count is None:
            raise ValueError(f"{self.where}: aux_weight='count' needs count=, which says what a shard counts")
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(f"{self.where}: microbatches must be a positive int, got {self.microbatches!r}")
        if self.reduce_dtype not in (None, torch.bfloat16):
            raise ValueError(f"{self.where}: reduce_dtype must be None or torch.bfloat16, got {self.reduce_dtype!r}")
        if self.count is not None:
            check_function(self.count, f"{self.where}: count")
        if self.create_graph not in (None, True, False):
            raise TypeError(f"{self.where}: create_graph must be None, True or False, got {self.create_graph!r}")
        numbers = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if not numbers or any(isinstance(i, bool) or not isinstance(i, int) for i in numbers):
            hint = ". Devices are given by name: devices=..." if any(map(_is_device, numbers)) else ""
            raise TypeError(f"{self.where}: argnums must be an int or a tuple of ints, got {self.argnums!r}{hint}")
        self.target = None if self.output_device is None else as_device(self.output_device, self.where)
        seed = seed_of(self.seed, self.randomness, self.where)
        self.options = Options(self.where, self.devices, self.weights, self.executor, seed, self.axis_name)
        own = self.argnums, self.has_aux, self.reduction, self.count is not None, self.aux_weight, self.create_graph
        self.key = *own, self.microbatches, self.reduce_dtype, self.unused, self.target

    def transform(self, arrange: Callable[[Any, Any], Any]) -> Function:
        @api_boundary()
        @functools.wraps(self.fn, updated=())  # not fn.out_dims: that is about the loss
        def differentiated(*args: Tree, **kwargs: Tree) -> Any:
            value, aux, grads = self.compute(args, kwargs)
            return arrange((value, aux) if self.has_aux else value, grads)

        vars(inside_boundary(differentiated))[_SETTINGS] = self
        return differentiated

    def in_dims_of(self, n_args: int) -> Dims:
        """The specs of so many positional arguments."""
        if self.in_dims is not AUTO:
            return self.in_dims
        if self.argnums == 0 and n_args:
            return (None, *(0,) * (n_args - 1))
        positions = self.positions(n_args)
        return tuple([None if i in positions else 0 for i in range(n_args)])

    def compute(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[Tensor, Tree, Any]:
        """The value, aux and gradients."""
        held = (*args, *kwargs.values())
        value, aux, grads = run(partial(self.call, args, kwargs), self.where, self.devices, held)
        return value, aux, tuple(grads) if isinstance(self.argnums, tuple) else grads[0]

    def call(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Call:
        """A call with these arguments."""
        own = star_args(args, self.in_dims_of(len(args)), kwargs, self.kwarg_dims, self.where)
        return Call(self.fn, own, self.options, self)

    def begin(self, peers: Peers, plan: Plan, flats: Sequence[Flat], where: str, same: dict[str, Any]) -> Begun:
        same |= {"argnums": self.argnums, "reduction": self.reduction, "counts": self.count is not None}
        code = getattr(self.fn, "__code__", None)
        same["function"] = getattr(self.fn, "__qualname__", type(self.fn).__name__), code and code.co_firstlineno
        same |= {"has_aux": self.has_aux, "create_graph": self.create_graph}
        same |= {"aux_weight": self.aux_weight, "reduce_dtype": self.reduce_dtype}
        return super().begin(peers, plan, flats, where, same)

    def steps(self, known: Known) -> tuple[Sequence[Step], GradientPlan]:
        around, where = known.around, self.where
        if self.create_graph and not around.is_tracking:
            raise ValueError(f"{where}: create_graph=True needs grad mode, which is off here")
        own = self._gradients(known)
        if known.peers is not ALONE and (self.create_graph or own.needs_func):
            known.peers.refuse(where, _ON_A_MESH)
        counting = each_is_one if self.reduction == "sum" else count_rows if self.count is None else ask_count
        weigh = Step(counting, says("weigh shards " + ("by count" if self.count else f"for the {self.reduction}")))
        how = by_rows(known, differentiate_by_func if own.needs_func else differentiate_by_autograd)
        steps = [*begin(known), weigh, Step(how, partial(_differentiated, numbers_text(known))), *end(known)]
        if self.create_graph is None and not around.is_compiling and not around.is_nested:
            steps.append(Step(warn_of_unused, says("look for a loss that uses nothing")))
        join = join_losses if known.peers is ALONE else sum_over_processes
        return [*steps, Step(join, says(f"{self.reduction} of loss"))], own

    def _gradients(self, known: Known) -> GradientPlan:
        """Which leaves are differentiated, the arguments in the order of `argnums`."""
        children, first = known.flat.structure.children(), 0
        ranges: list[range] = []
        for child in children:
            ranges.append(range(first, first + child.num_leaves))
            first += child.num_leaves
        positions = self.positions(known.call.args.positional)
        at = [i for p in positions for i in ranges[p]]
        leaves, values = [known.leaves[i] for i in at], [known.flat.leaves[i] for i in at]
        check_differentiable(leaves, values, self.where)
        around = known.around
        is_attached = around.needs_grad and around.is_tracking and self.create_graph is not False
        return gradient_plan(
            leaves,
            values,
            [children[p] for p in positions],
            self.target,
            needs_func=around.needs_func,
            is_attached=is_attached and known.peers is ALONE,
        )

    def outputs(
        self, plan: Plan, values: Sequence[Any], state: State, copies: Sequence[Transfer]
    ) -> Iterator[PlannedLeaf]:
        value, aux, _ = state.result
        losses, auxes = zip(*state.outputs, strict=True)
        yield from _by(self.count is not None, of_outputs(losses, value, self.reduction, copies, "loss"))
        if self.has_aux:
            leaves = of_outputs(auxes, aux, dims_of(auxes[0], self.aux_dims, self.where), copies, "aux")
            yield from _by(self.aux_weight == "count", leaves)
        own = plan.gradients
        for leaf, i in zip(own.leaves, own.at, strict=True):
            for planned in leaf.planned(values[i], plan.partition):
                yield planned.as_gradient().with_copies(copies)

    def positions(self, n_args: int) -> tuple[int, ...]:
        """Which of so many positional arguments it is differentiated in."""
        if type(self.argnums) is int and 0 <= self.argnums < n_args:
            return (self.argnums,)
        numbers = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if any(not -n_args <= i < n_args for i in numbers):
            raise ValueError(f"{self.where}: argnums is {self.argnums}, but there are {n_args} positional arguments")
        positions = tuple(i % n_args for i in numbers)
        if len(set(positions)) < len(positions):
            raise ValueError(f"{self.where}: argnums {self.argnums} names an argument twice")
        return positions


def check_differentiable(leaves: Sequence[LeafPlan], values: Sequence[Any], where: str) -> None:
    """All leaves of the differentiated arguments are tensors that can carry a gradient."""
    wrong = [text for leaf, value in zip(leaves, values, strict=True) for text in leaf.wrong(value, where)]
    if wrong:
        raise TypeError(
            f"{where}: only floating-point and complex tensors can be differentiated in, not {listed(wrong)}. Pass "
            "the others, such as a module's buffers, in an argument that argnums does not name"
        )


_ON_A_MESH = (
    "There gradients are not differentiated again (create_graph=True), nor taken inside of torch.func's transforms, of "
    "inference mode or of torch.compile: write inner derivatives inside of the loss, with torch.func.grad, and use "
    "torch.no_grad()"
)


def _differentiated(numbers: str, plan: Plan) -> str:
    how = "torch.func" if plan.gradients.needs_func else "autograd"
    leaves = count_text(len(plan.gradients.leaves), "leaf", "leaves")
    return f"run {shards_text(plan)}{numbers}, gradients in {leaves} by {how}, summed as they come"


def _by(count: bool, leaves: Iterable[PlannedLeaf]) -> Iterator[PlannedLeaf]:
    """Leaves with what their means are weighted by."""
    for leaf in leaves:
        yield dataclasses.replace(leaf, how="mean by count") if count and leaf.how == "mean by rows" else leaf


_SETTINGS = "_fdp_settings"


def settings_of(fn: Function) -> Differentiation | None:
    """Those of what `value_and_grad` and its like have returned; `functools.wraps` may copy them to other functions."""
    inner = inside_boundary(fn) if isinstance(fn, types.FunctionType) else fn
    return None if inner is fn else vars(inner).get(_SETTINGS)


def _is_device(value: Any) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(x, torch.device | str) for x in each)
