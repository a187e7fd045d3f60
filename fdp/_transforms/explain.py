"""What a call will do, before anything runs: its `Plan`, and what the same code shows on tensors that have no data."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from fdp._execution.executor import how_run
from fdp._execution.seeds import seed_of
from fdp._placement.peers import ALONE, peers_of
from fdp._placement.plan import Plan
from fdp._placement.transfer_log import Collective, Transfer, Watch
from fdp._transforms.apply import Joining
from fdp._transforms.arguments import IN_ORDER, check_order, input_args
from fdp._transforms.around import look_around
from fdp._transforms.bind import decide, flat_of, held_in
from fdp._transforms.call import Call, Options, State, take_steps
from fdp._transforms.differentiate import Differentiation, settings_of
from fdp._transforms.dry_run import Fakes, Guard, has_autograd, problem_of, without_data
from fdp._trees import torch_private
from fdp._trees.tracebacks import OF_JAX, api_boundary, inside_boundary
from fdp._trees.tree import Flat
from fdp._trees.types import AUTO, Auto, DeviceLike, Devices, Dims, Executor, Function, Randomness, Tree


@api_boundary(OF_JAX | IN_ORDER)
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

    What `value_and_grad`, `grad` and `grad_and_value` return is explained with what it was told, and with no other
    options: `explain(value_and_grad(loss, devices=...), params, (x, y))`. Its gradients are among the outputs.

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
        fn, params, inputs, devices: As in `dp_apply`; for a gradient function, `params` is its first argument, and
            `inputs` are the others.
        kwargs, in_dims, kwarg_dims, out_dims, output_device, weights, executor: As in `dp_apply`.
        seed, randomness, axis_name: Likewise.

    Returns:
        The plan; it prints itself. Where `fn` depends on values (`x.item()`, `if x.sum() > 0`), or fails, `outputs` is
        None, `problem` says why, and what else there is holds for the arguments.

    Raises:
        ValueError, TypeError, RuntimeError: What `dp_apply` would raise for these arguments, or for outputs that
            cannot be joined; a mesh, or a transform of torch.func around the call.
    """
    where, options = "explain", locals()
    check_order(inputs, devices, where)
    given = {} if kwargs is None else kwargs
    settings = settings_of(fn)
    if settings is not None:
        _check_said(settings, options)
        own = (params, *inputs) if type(inputs) is tuple else (params, inputs)
        return _explained(dataclasses.replace(settings, where=where).call(own, dict(given)))
    how = Options(where, devices, weights, executor, seed_of(seed, randomness, where), axis_name)
    args = input_args(params, inputs, in_dims, given, kwarg_dims, where)
    return _explained(Call(fn, args, how, Joining(fn, out_dims, output_device, where)))


def _check_said(settings: Differentiation, options: Mapping[str, Any]) -> None:
    """Options of a gradient function are those that it was made with."""
    usual = {"devices": None, **inside_boundary(explain).__kwdefaults__}
    given = [name for name, value in usual.items() if name != "kwargs" and options[name] != value]
    if given:
        raise TypeError(
            f"explain: {', '.join(given)}: a gradient function is explained with what it was made with. Write "
            f"{settings.where}(loss, {given[0]}=...)"
        )


def _explained(call: Call) -> Plan:
    """What a call will do: its plan, and what its steps do with tensors without data."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("explain: inside torch.compile. Explain the call outside of it")
    if torch_private.is_transformed():
        raise RuntimeError("explain: inside a transform of torch.func. Explain the call outside of it")
    watch, problem, outputs = Watch(differences=[]), None, None
    with without_data(watch) as fakes:
        flat = flat_of(call)
        given, held = held_in(flat.leaves)
        for peers in (peers_of(call.options.devices), *(slots.peers for _, slots in held)):
            peers.refuse("explain", _ON_A_MESH)
        plan = decide(call, flat, look_around(given, is_compiling=False), ALONE)
        _check_layouts(flat, plan.devices)
        fakes.has_graph = has_autograd(plan.slots)
        dry = Dry(call.fn, watch.copies, fakes, plan.gradients is not None)
        own = call._replace(fn=dry, options=call.options._replace(seed=None))
        try:
            with contextlib.nullcontext() if fakes.has_graph else torch.no_grad():
                leaves = [fakes.of(leaf) for leaf in flat.leaves]
                given = held_in(leaves)[0]
                around = look_around(given, is_compiling=False)
                made = decide(own, flat._replace(leaves=leaves, specs=list(plan.specs)), around, ALONE)
                state = State(own, made, leaves, flat.structure, given)
                take_steps(made, state)
                outputs = tuple(own.kind.outputs(plan, flat.leaves, state, dry.joins()))
        except Exception as error:
            if not dry.has_failed and not isinstance(error, fakes.unknown):
                raise
            problem = problem_of(error, fakes)
            del watch.copies[dry.before :], watch.collectives[:]
    copies = tuple(watch.copies)
    arguments = [
        planned.with_copies(copies[: dry.before])
        for leaf, value in zip(plan.leaves, flat.leaves, strict=True)
        for planned in leaf.planned(value, plan.partition)
    ]
    return dataclasses.replace(
        plan,
        executor=_executor(watch.collectives, how_run(call.options.executor, call.options.seed, len(plan.places))),
        arguments=tuple(arguments),
        outputs=outputs,
        differences=tuple(dict.fromkeys(watch.differences or ())),
        collectives=tuple(watch.collectives),
        copies=copies,
        problem=problem,
    )


_ON_A_MESH = "devices=mesh.devices, and shards that are not on the mesh, explain the part of this process"


def _executor(collectives: Sequence[Collective], how: str) -> str:
    """How shards run, and where they meet."""
    return f"{how}; they wait for each other in {collectives[0].name}" if collectives else how


def _check_layouts(flat: Flat, devices: Sequence[torch.device]) -> None:
    """Nested tensors have no shape that could be planned with, and sparse ones none that could be copied."""
    for i, leaf in enumerate(flat.leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise ValueError(f"explain: {flat.path(i)} is a nested tensor, which cannot be planned with")
        is_sparse = isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided
        if is_sparse and any(device != leaf.device for device in devices):
            raise ValueError(
                f"explain: {flat.path(i)} is a sparse tensor on {leaf.device}, whose copies to others cannot be "
                "planned. Explain the call with it on the device of all slots"
            )


@final
class Dry:
    """The function, with where the log stood when it was called.

    Attributes:
        before: How many entries of the log are of the arguments.
        has_failed: What it has raised is what the call raises.
    """

    def __init__(self, fn: Function, log: list[Transfer], fakes: Fakes, differentiates: bool) -> None:
        self._fn, self._log, self._fakes = fn, log, fakes
        self._is_refused = differentiates and not fakes.has_graph
        self.before: int | None = None
        self._inside: set[int] = set()
        self.has_failed = False

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        start = len(self._log)
        self.before = start if self.before is None else self.before
        try:
            if self._is_refused:
                raise RuntimeError(
                    "gradients cannot be explained on devices that are not here. Explain them on fdp.virtual_devices(n)"
                )
            with Guard(has_graph=self._fakes.has_graph):
                return self._fn(*args, **kwargs)
        except Exception:
            self.has_failed = True
            raise
        finally:
            self._inside.update(range(start, len(self._log)))

    def joins(self) -> list[Transfer]:
        """The copies of what comes out: not those that the function makes."""
        return [copy for i, copy in enumerate(self._log) if i >= (self.before or 0) and i not in self._inside]
