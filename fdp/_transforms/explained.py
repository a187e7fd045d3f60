"""A call run on tensors without data: what becomes its `Plan`, for `dp_apply` and for the gradient functions."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from fdp._execution.executor import how_run
from fdp._placement.peers import ALONE, peers_of
from fdp._placement.plan import Plan
from fdp._placement.transfers import Collective, Transfer, Watch
from fdp._transforms.around import look_around
from fdp._transforms.bind import decide, flat_of, held_in
from fdp._transforms.call import Call, State, take_steps
from fdp._transforms.dry_run import Fakes, Guard, has_autograd, problem_of, without_data
from fdp._trees import torch_private
from fdp._trees.tree import Flat
from fdp._trees.types import Function, Tree


def explained(call: Call) -> Plan:
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
