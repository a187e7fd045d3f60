"""A function run once per slot: `dp_apply` is `gather ∘ run ∘ (replicate, scatter)`."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from fdp._execution.seeds import seed_of
from fdp._placement.devices import as_device
from fdp._placement.join import join
from fdp._placement.peers import ALONE, Joined
from fdp._placement.plan import Plan, Step
from fdp._placement.planned_leaf import PlannedLeaf, of_outputs
from fdp._placement.transfer_log import Transfer
from fdp._transforms.arguments import IN_ORDER, check_function, check_order, input_args, star_args
from fdp._transforms.bind import run
from fdp._transforms.call import Call, CallKind, Known, Options, State
from fdp._transforms.signatures import MapOptions, Mapped
from fdp._transforms.steps import begin, end, running, says
from fdp._trees.tracebacks import OF_JAX, api_boundary
from fdp._trees.types import AUTO, Auto, DeviceLike, Devices, Dims, Executor, Function, Randomness, Tree

P = ParamSpec("P")
T = TypeVar("T")
OfAll: TypeAlias = int | Literal["mean", "sum", "max", "min"] | None
"""A spec that makes one tensor of those of all slots."""


@api_boundary(OF_JAX | IN_ORDER)
def dp_apply(
    fn: Function,
    params: Tree,
    inputs: Tree,
    devices: Devices = None,
    *,
    kwargs: Mapping[str, Tree] | None = None,
    in_dims: Dims = 0,
    kwarg_dims: Dims = 0,
    out_dims: Dims | Auto = AUTO,
    output_device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Tree:
    """Run a pure function of parameters and a batch on several devices, each with a part of the batch.

    For a row-wise `fn`, `dp_apply(fn, params, x, devices) == fn(params, x)`, values and gradients.

    >>> import fdp, torch
    >>> def predict(w, x):
    ...     return x @ w
    >>> w, x = torch.tensor([1.0, 2.0]), torch.eye(2).repeat(2, 1)
    >>> fdp.dp_apply(predict, w, x, fdp.virtual_devices(3))
    tensor([1., 2., 1., 2.])

    Args:
        fn: Called as `fn(params, inputs, **kwargs)` on each slot, `fn(params, *inputs, **kwargs)` if `inputs` is a
            tuple. It must not write to its arguments.
        params: Any tree, whole on every slot; a `Replicated` is used as it is.
        inputs: Any tree; a tuple means several arguments. A list is one: of a loader's `[x, y]` make `tuple(batch)`. A
            `Sharded` is used as it is; `sharded.unzip()` makes several of one that holds tuples or lists.
        devices: One device per slot: None (all accelerators, else the CPU; inside a mapped function its own device), a
            device or a sequence of them, in which an int is an accelerator and repeats are slots.
        kwargs: Keyword inputs, split like the others.
        in_dims: Which dimension holds the rows, as a prefix tree of `inputs`: see `scatter`.
        kwarg_dims: The same for `kwargs`; a dict may leave out names, which are then split along 0.
        out_dims: How outputs are joined, as a prefix tree of the output: see `gather`. By default the attribute
            `fn.out_dims`, else 0.
        output_device: Where outputs go, by default the device of slot 0.
        weights: Relative rows of each slot. By default sizes differ by at most one; slots without rows are left out.
        executor: `"sequential"`: one shard after the other, until one comes to a collective. `"threads"`: side by side,
            on the CPU as many at once as there are cores. `"auto"`: `"sequential"`.
        seed: Draw random numbers from this seed, and leave the caller's generators alone. Seeded shards take turns.
        randomness: Who draws what from the seed. `"different"`: slot i draws from `fold_in(seed, i)`. `"same"`: all
            slots draw the same. `"rows"`: each row draws what it draws on one device, whatever the devices, weights
            and executor.
        axis_name: Name of this set of slots, for collectives and messages where calls nest.

    Returns:
        What `fn` returns on one device. With one slot its tensors are returned without a copy.

    Raises:
        ValueError: Rows, dims, devices or outputs do not fit; the message says which and where.
        TypeError: A module instead of a function, or an object that is no tree.
        RuntimeError: `fn` wrote in place to an argument.
    """

    def call() -> Call:
        check_order(inputs, devices, where)
        options = Options(where, devices, weights, executor, seed_of(seed, randomness, where), axis_name)
        args = input_args(params, inputs, in_dims, {} if kwargs is None else kwargs, kwarg_dims, where)
        return Call(fn, args, options, Joining(fn, out_dims, output_device, where))

    where = "dp_apply"
    return run(call, where, devices, (params, inputs, *(inputs if type(inputs) is tuple else ())))


@overload
def shard_map(
    fn: Callable[P, T],
    *,
    out_dims: OfAll | Auto = AUTO,
    **options: Unpack[MapOptions],
) -> Mapped[P, T]: ...
@overload
def shard_map(
    fn: Callable[P, Any], *, out_dims: Dims | Auto = AUTO, **options: Unpack[MapOptions]
) -> Mapped[P, Any]: ...
@api_boundary(OF_JAX)
def shard_map(
    fn: Function,
    *,
    devices: Devices = None,
    in_dims: Dims = 0,
    kwarg_dims: Dims = 0,
    out_dims: Dims | Auto = AUTO,
    output_device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Function:
    """Turn a function into one that runs once per slot: `dp_apply` for any number of arguments.

    `shard_map(fn, in_dims=(None, 0))(params, x) == dp_apply(fn, params, x)`.

    >>> import fdp, torch
    >>> scaled = fdp.shard_map(lambda a, x: a * x, devices=fdp.virtual_devices(2), in_dims=(None, 0))
    >>> scaled(torch.tensor(10.0), torch.arange(3.0))
    tensor([ 0., 10., 20.])

    Args:
        fn: The function of one shard; it must not write to its arguments.
        in_dims: One spec for all positional arguments, or a tuple with a prefix tree for each; None for what every
            slot gets whole.
        devices, kwarg_dims, out_dims, output_device, weights, executor, seed, randomness, axis_name: As in `dp_apply`.

    Returns:
        A function with the arguments of `fn`.

    Raises:
        TypeError: A module instead of a function. Calling the result raises what `dp_apply` does.
    """
    where = "shard_map"
    check_function(fn, where)
    options = Options(where, devices, weights, executor, seed_of(seed, randomness, where), axis_name)

    @api_boundary()
    @functools.wraps(fn, updated=())  # not fn.out_dims: that is about one shard
    def mapped(*args: Tree, **kwargs: Tree) -> Tree:
        def call() -> Call:
            own = star_args(args, in_dims, kwargs, kwarg_dims, where)
            return Call(fn, own, options, Joining(fn, out_dims, output_device, where))

        return run(call, where, devices, (*args, *kwargs.values()))

    return mapped


class Joining(CallKind):
    """A call whose outputs are joined. By default the function says how."""

    def __init__(self, fn: Any, out_dims: Dims | Auto, target: DeviceLike | None, where: str) -> None:
        self.out_dims: Dims = getattr(fn, "out_dims", 0) if out_dims is AUTO else out_dims
        self.target = None if target is None else as_device(target, where)

    def steps(self, known: Known) -> tuple[Sequence[Step], None]:
        joining = join_outputs if known.peers is ALONE else join_over_processes
        return [*begin(known), running(known), *end(known), Step(joining, says("join outputs"))], None

    def outputs(
        self, plan: Plan, values: Sequence[Any], state: State, copies: Sequence[Transfer]
    ) -> Iterator[PlannedLeaf]:
        return of_outputs(state.outputs, state.result, self.out_dims, copies)


def join_outputs(plan: Plan, state: State) -> None:
    """What the shards have returned, weighted by their rows."""
    sizes, outputs, kind = plan.partition.sizes, state.outputs, state.kind
    weights = sizes or (None if len(outputs) > 1 else (1,))
    state.result = join(outputs, kind.out_dims, weights, kind.target or state.device, "out", state.where)


def join_over_processes(plan: Plan, state: State) -> None:
    """The same in all processes."""
    sizes, outputs, peers = state.partition.sizes, state.outputs, state.peers
    if sizes is None:
        joined = Joined(outputs, state.kind.out_dims, None if len(outputs) > 1 else (1,), "out")
    else:
        joined = Joined(outputs, state.kind.out_dims, sizes, "out")
    state.result = peers.join(joined, state.kind.target or state.device, state.where)
