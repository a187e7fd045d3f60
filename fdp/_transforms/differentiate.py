"""How a loss over a batch is differentiated: checked settings, and the call that they describe."""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp._execution.executor import Mode
from fdp._execution.seeds import Seed, seed_of
from fdp._placement.devices import as_device
from fdp._placement.moves import promoted
from fdp._placement.peers import Joined, peers_of
from fdp._placement.sharded import leaf_tensors
from fdp._placement.slot import AXES
from fdp._transforms.accumulate import Gradients, Unused, check_differentiable
from fdp._transforms.arguments import Options, check_function, keyword_args, positional_args
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.call import Call, bind
from fdp._transforms.counts import Counts, weights_of
from fdp._transforms.row_seed import with_rows
from fdp._transforms.shard_grad import Out, Problem, ShardResult, is_tracking
from fdp._transforms.shards import ShardGradients
from fdp._trees.tracebacks import api_boundary, inside_boundary, warn
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differentiation:
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
        counts = self.count is not None
        same = {"argnums": self.argnums, "reduction": self.reduction, "counts": counts, "function": self.fn}
        same |= {"aux_weight": self.aux_weight, "reduce_dtype": self.reduce_dtype}
        how = self.weights, self.executor, seed_of(self.seed, self.randomness, self.where), self.axis_name
        object.__setattr__(self, "options", Options(self.where, self.devices, self.output_device, *how, same))

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
        positions = self.positions(n_args)
        return tuple([None if i in positions else 0 for i in range(n_args)])

    def compute(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[torch.Tensor, Tree, Any]:
        """The value, aux and gradients."""
        with peers_of(self.devices, (*args, *kwargs.values())).begins(self.where):
            return self._compute_here(args, kwargs)

    def _compute_here(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[torch.Tensor, Tree, Any]:
        where = self.where
        positions = self.positions(len(args))
        target = None if self.output_device is None else as_device(self.output_device, where)
        call = bind(
            self.fn,
            positional_args(args, self.in_dims_of(len(args)), "args", where),
            keyword_args(kwargs, self.kwarg_dims, where),
            self.options,
            self.microbatches,
        )

        def again(trees: Sequence[Tree], seed: Seed) -> object:
            one = {"devices": call.device, "weights": None, "microbatches": 1, "executor": "sequential", "seed": seed}
            same = dataclasses.replace(self, **one, aux_dims="list", output_device=None)
            return same.compute(tuple(trees[: len(args)]), dict(zip(kwargs, trees[len(args) :], strict=True)))

        with call.peers.part():
            row_call = functools.partial(call.row_call, self.fn, self.options, again)
            found, gradients = with_rows(
                self.options.seed, row_call, functools.partial(self._step, call, positions, target)
            )
        value, rest = found()
        grads = gradients.finish()
        return value, rest, tuple(grads) if isinstance(self.argnums, tuple) else grads[0]

    def _step(
        self, call: Call, positions: tuple[int, ...], target: torch.device | None, seed: Seed | None
    ) -> tuple[Callable[[], tuple[torch.Tensor, Tree]], Gradients]:
        """Place, run, sum."""
        outs: list[Any] = [None] * len(call.partition.slots)
        aliases: list[torch.Tensor] = []
        own = [call.flats[i] for i in positions], [call.plan.args[i] for i in positions], call.partition
        gradients = Gradients(*own, target, self.reduce_dtype, self.unused)
        shards, check = call.place()
        check_differentiable(*own, self.where)

        is_unused = [True] * len(outs)

        def take(i: int, result: ShardResult) -> None:
            outs[i] = result.out
            is_unused[i] = is_unused[i] and all(grad is None for grads in result.grads for grad in grads)
            aliases.extend(result.aliases)
            gradients.add(i, result.grads, [shards[i].args[p] for p in positions])

        problem = Problem(self.where, self.fn, positions, self.has_aux)
        if self.create_graph and not is_tracking():
            raise ValueError(f"{self.where}: create_graph=True needs grad mode, which is off here")
        weights = weights_of(problem, call, shards, self.reduction, self.count)
        shares = [functools.partial(weights.share, i) for i in range(len(shards))]
        mode = Mode(self.executor, seed, call.peers)
        ShardGradients(problem, call.partition, shards, shares, call.places(), mode, self.create_graph).run(
            check.given, take
        )
        check.check(self.where)
        if self.create_graph is None and aliases and all(is_unused) and any(out.loss.requires_grad for out in outs):
            _say_unused([flat for i, flat in enumerate(call.flats) if i not in positions], self.where)
        loss, aux = self._joined(outs, call, weights)
        return call.peers.reduce(loss, aux, gradients, aliases, target or call.device, self.where), gradients

    def _joined(self, outs: Sequence[Out], call: Call, weights: Counts) -> tuple[Joined, Joined | None]:
        """How the losses become one, and what else the shards have returned."""
        sizes = call.partition.sizes
        losses = promoted([out.loss for out in outs]) if outs else []
        loss = Joined(losses, self.reduction, weights.own, weights.whole, "loss")
        if not self.has_aux:
            return loss, None
        rows, whole, hint = sizes, lambda: call.peers.rows(sum(sizes or ())), ""
        if self.aux_weight == "count" or (self.count is None and self.reduction == "mean"):
            rows, whole = weights.own, weights.whole
        if rows is None:
            hint = "aux_dims says how each leaf is joined; aux_weight='count' weights it as the loss is"
        dims = dims_of(outs[0].aux if outs else None, self.aux_dims, self.where)
        return loss, Joined([out.aux for out in outs], dims, rows, whole, "aux", hint)

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


def _say_unused(others: Sequence[Flat], where: str) -> None:
    """Say that a loss leads to nothing that it is differentiated in, unless it leads to other arguments."""
    if torch.compiler.is_compiling() or AXES.get():  # inside another call gradients may be those of other slots
        return
    if not any(tensor.requires_grad for flat in others for leaf in flat.leaves for tensor in leaf_tensors(leaf)):
        warn(_UNUSED.format(where))


_UNUSED = (
    "{}: all gradients are 0. The loss depends on no tensor that it is differentiated in, and on some that require "
    "gradients and are no arguments. With apply, (params, buffers) = fdp.functional(module), a loss of (params, x) "
    "calls apply((params, buffers), x), and not module(x)"
)
_SETTINGS = "_fdp_settings"


def settings_of(fn: Function) -> Differentiation | None:
    """Those of what `value_and_grad` and its like have returned; `functools.wraps` may copy them to other functions."""
    inner = inside_boundary(fn) if isinstance(fn, types.FunctionType) else fn
    return None if inner is fn else vars(inner).get(_SETTINGS)


def _is_device(value: Any) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(x, torch.device | str) for x in each)
