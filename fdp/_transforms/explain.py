"""What a call will do, before anything runs: its `Plan`, and what the same code shows on tensors that have no data."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

import torch

from fdp._execution.executor import Mode, check_executor, executor_of
from fdp._execution.seeds import seed_of
from fdp._placement.peers import peers_of
from fdp._placement.plan import Plan
from fdp._placement.planned_leaves import of_arguments, of_outputs
from fdp._placement.sharded import Slots
from fdp._placement.slot import current_slot
from fdp._placement.split_dims import flatten_args
from fdp._placement.timings import Timings
from fdp._placement.transfers import COLLECTIVES, Collective, Transfer, only
from fdp._transforms.apply import dp_apply
from fdp._transforms.arguments import Arg, Options, check_function, check_several, keyword_args, positional_args
from fdp._transforms.call import decide
from fdp._transforms.dry_run import APART, Fakes, Guard, has_autograd, problem_of
from fdp._transforms.plans import find, signature_of
from fdp._trees import torch_private
from fdp._trees.registry import flattened
from fdp._trees.tracebacks import OF_JAX, api_boundary
from fdp._trees.tree import Flat, flatten
from fdp._trees.types import AUTO, Auto, DeviceLike, Devices, Dims, Executor, Function, Randomness, Tree


@api_boundary(OF_JAX | {"": "Keyword inputs of the function go into kwargs={{{0!r}: ...}}"})
def explain(
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
) -> Plan:
    """Say what `dp_apply` with the same arguments would do: what is split, what is copied, what comes out.

    Nothing is computed and nothing moves: `fn` is called once per slot, with tensors that have a shape, a dtype and a
    device, and no data (torch's fake tensors). So are those that it takes from elsewhere; what it does to other objects
    is done. A tensor that it leaves in a cache has no data, and whoever uses it later gets an error. The devices need
    not exist, but where torch is built without their type, some operations and gradients inside `fn` are a `problem`:
    use `virtual_devices` there.

    `explain(fn, ...).copies` is what `transfers()` counts in `dp_apply(fn, ...)`.

    >>> import fdp, torch
    >>> def predict(w, x):
    ...     return x @ w
    >>> plan = fdp.explain(predict, torch.ones(3, 2), torch.ones(7, 3), ["cuda:0", "cuda:1"])
    >>> plan.sizes
    (4, 3)
    >>> [(copy.path, copy.nbytes, str(copy.target)) for copy in plan.copies]
    [('params', 24, 'cuda:0'), ('params', 24, 'cuda:1'),
     ('inputs', 48, 'cuda:0'), ('inputs', 36, 'cuda:1'), ('out', 24, 'cuda:0')]

    Args:
        fn, params, inputs, devices: As in `dp_apply`.
        kwargs, in_dims, kwarg_dims, out_dims, output_device, weights, executor: As in `dp_apply`.
        seed, randomness, axis_name: Likewise.

    Returns:
        The plan; it prints itself. Where `fn` depends on values (`x.item()`, `if x.sum() > 0`), or fails, `outputs` is
        None, `problem` says why, and what else there is holds for the arguments.

    Raises:
        ValueError, TypeError, RuntimeError: What `dp_apply` would raise for these arguments, or for outputs that
            cannot be joined; a mesh, or a transform of torch.func around the call.
    """
    options = {
        "in_dims": in_dims,
        "kwarg_dims": kwarg_dims,
        "out_dims": getattr(fn, "out_dims", 0) if out_dims is AUTO else out_dims,
        "output_device": output_device,
        "weights": weights,
        "executor": executor,
        "axis_name": axis_name,
    }
    _check(fn, devices, params, inputs, kwargs)
    check_executor(executor, "explain")
    named, n_args = _named(params, inputs, {} if kwargs is None else kwargs, in_dims, kwarg_dims)
    check_several(fn, named[:n_args], {} if kwargs is None else kwargs, "explain")
    how = Options("explain", devices, output_device, weights, executor, seed_of(seed, randomness, "explain"), axis_name)
    timings = _timings(fn, named, n_args, how)
    log: list[Transfer] = []
    with APART, Fakes() as fakes, only(log):
        flats = flatten_args(named, "explain")
        plan = decide(flats, how)
        _check_layouts(flats, plan.devices)
        fakes.has_graph = has_autograd(plan.slots)
        dry, problem, joined, collectives = _Dry(fn, log, fakes), None, None, list[Collective]()
        token = COLLECTIVES.set(collectives)
        try:
            with contextlib.nullcontext() if fakes.has_graph else torch.no_grad():
                kwargs = None if kwargs is None else {name: fakes.of(value) for name, value in kwargs.items()}
                joined = dp_apply(dry, fakes.of(params), fakes.of(inputs), devices, kwargs=kwargs, **options)
        except Exception as error:
            if not dry.has_failed and not isinstance(error, fakes.unknown):
                raise
            problem = problem_of(error, fakes)
            del log[dry.before :], collectives[:]
        finally:
            COLLECTIVES.reset(token)
    copies = tuple(log)
    arguments = tuple(leaf for flat in flats for leaf in of_arguments(flat, plan.partition, copies[: dry.before]))
    joins = copies[dry.after :]
    outputs = None if problem is not None else tuple(of_outputs(dry.results, joined, options["out_dims"], joins))
    return dataclasses.replace(
        plan,
        executor=_executor(collectives) or executor_of(Mode(executor, how.seed, fn, timings=timings), plan.places),
        timings=timings,
        arguments=arguments,
        outputs=outputs,
        collectives=tuple(collectives),
        copies=copies,
        problem=problem,
    )


def _executor(collectives: Sequence[Collective]) -> str:
    """How shards run that meet."""
    return f"all shards alive at once: they meet in {collectives[0].name}" if collectives else ""


def _check(fn: Function, devices: Devices, *trees: Tree) -> None:
    check_function(fn, "explain")
    if torch.compiler.is_compiling():
        raise RuntimeError("explain: inside torch.compile. Explain the call outside of it")
    if torch_private.is_transformed():
        raise RuntimeError("explain: inside a transform of torch.func. Explain the call outside of it")
    held = [leaf for tree in trees for leaf in flatten(tree, "tree", where="explain").leaves if isinstance(leaf, Slots)]
    for peers in (peers_of(devices), *(slots.peers for slots in held)):
        peers.refuse(
            "explain", "devices=mesh.devices, and shards that are not on the mesh, explain the part of this process"
        )


def _check_layouts(flats: Sequence[Flat], devices: Sequence[torch.device]) -> None:
    """Nested tensors have no shape that could be planned with, and sparse ones none that could be copied."""
    for flat in flats:
        for i, leaf in enumerate(flat.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_nested:
                raise ValueError(f"explain: {flat.path(i)} is a nested tensor, which cannot be planned with")
            is_sparse = isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided
            if is_sparse and any(device != leaf.device for device in devices):
                raise ValueError(
                    f"explain: {flat.path(i)} is a sparse tensor on {leaf.device}, whose copies to others cannot "
                    "be planned. Explain the call with it on the device of all slots"
                )


def _named(
    params: Tree, inputs: Tree, kwargs: Mapping[str, Tree], in_dims: Dims, kwarg_dims: Dims
) -> tuple[list[Arg], int]:
    """All arguments, and how many are positional."""
    if type(inputs) is tuple:
        args = positional_args(inputs, in_dims, "inputs", "explain")
    else:
        args = [Arg("inputs", inputs, in_dims)]
    named = keyword_args(kwargs, kwarg_dims, "explain")
    return [Arg("params", params, None), *args, *named.values()], 1 + len(args)


def _timings(fn: Function, named: Sequence[Arg], n_args: int, how: Options) -> Timings | None:
    """What calls like this one have taken."""
    trees = [flattened(arg.tree, arg.name) for arg in named]
    try:
        plan = find(fn, signature_of(fn, named, trees, n_args, how._replace(where="dp_apply"), 1))
    except (TypeError, ValueError):  # devices that are not here, as yet
        plan = None
    return None if plan is None else plan.timings


@final
class _Dry:
    """The function, with what it returns in each slot kept, and where the log stood when it was called.

    Attributes:
        before, after: The entries of the log that are no part of what the function itself does.
    """

    def __init__(self, fn: Function, log: list[Transfer], fakes: Fakes) -> None:
        self._fn, self._log, self._fakes = fn, log, fakes
        self.before: int | None = None
        self.after, self.has_failed = 0, False
        self.results: dict[int, Tree] = {}

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        slot = current_slot()
        if self.before is None:
            self.before = len(self._log)
        try:
            with Guard(has_graph=self._fakes.has_graph):
                result = self._fn(*args, **kwargs)
        except Exception:
            self.has_failed = True
            raise
        self.after = len(self._log)
        if slot is not None:
            self.results[slot.index] = result
        return result
