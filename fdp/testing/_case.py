"""A function and its sample arguments: run on one device, run on slots, and compared."""

import contextvars
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.slot import AXES, Axis, Slot
from fdp._transforms.apply import dp_apply
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.call import Shard, call_shard
from fdp._transforms.grad import value_and_grad
from fdp._trees.tree import flatten
from fdp._trees.types import AUTO, Auto, AuxWeight, Dims, Executor, Function, Reduction, Tree
from fdp.testing._compare import Difference, Leaf, Tolerance, first_of, leaves_of, magnitude
from fdp.testing._sample import Arguments, Place, Sample

WHERE = "assert_data_parallel"


@dataclasses.dataclass(frozen=True)
class Loss:
    """What `value_and_grad` is told of a loss."""

    reduction: Reduction
    count: Function | None
    has_aux: bool
    aux_dims: Dims | Auto
    aux_weight: AuxWeight


class Way(NamedTuple):
    """How a call is split."""

    devices: tuple[torch.device, ...]
    executor: Executor

    def __str__(self) -> str:
        n = len(self.devices)
        where = ", ".join(map(str, self.devices)) if len(set(self.devices)) > 1 else f"{n} slot{'s' * (n > 1)}"
        return f"on {where}, executor {self.executor!r}"


class CheckedRun(NamedTuple):
    """One run: its fresh arguments, its named results with the dims they are joined by, gradients if it made any."""

    arguments: Arguments
    results: list[tuple[str, Tree, Dims]]
    grads: Tree = None


class Case(NamedTuple):
    """What is checked. `places`: what gradients are compared in."""

    fn: Function
    sample: Sample
    loss: Loss | None
    out_dims: Dims | Auto
    places: list[Place]
    order: int
    tolerance: Tolerance
    weights: Sequence[float] | None

    def whole(self, places: Sequence[Place]) -> CheckedRun:
        """One call on the whole batch."""
        arguments = self.sample.fresh(places)
        context = contextvars.copy_context()
        slot = Slot(0, 1, range(self.sample.rows), self.sample.device, "data")
        context.run(AXES.set, (Axis(slot, None, threading.get_ident()),))  # collectives see one slot
        shard = Shard((arguments.params, *arguments.inputs), arguments.kwargs)
        out = context.run(call_shard, self.fn, shard)
        return CheckedRun(arguments, self._named(out))

    def split(self, way: Way) -> CheckedRun:
        """A call on slots."""
        devices, executor = way
        weights = None if self.weights is None else self.weights[: len(devices)]
        arguments = self.sample.fresh(self.places)
        if self.loss is None:
            out = dp_apply(
                self.fn,
                arguments.params,
                arguments.inputs,
                devices,
                kwargs=arguments.kwargs,
                in_dims=self.sample.in_dims,
                kwarg_dims=self.sample.kwarg_dims,
                out_dims=self.out_dims,
                weights=weights,
                executor=executor,
            )
            return CheckedRun(arguments, self._named(out))
        step = value_and_grad(
            self.fn,
            devices=devices,
            in_dims=(None, *self.sample.in_dims),
            kwarg_dims=self.sample.kwarg_dims,
            weights=weights,
            executor=executor,
            **vars(self.loss),
        )
        out, grads = step(arguments.params, *arguments.inputs, **arguments.kwargs)
        return CheckedRun(arguments, self._named(out), grads)

    def differentiable(self) -> list[Place]:
        """The places that the function can be differentiated in: tried one by one if it cannot in all."""
        if self._can_be_differentiated(self.places):
            return self.places
        if self.loss is not None:  # value_and_grad needs all parameters
            return [place for place in self.places if place[0] == 0 or self._can_be_differentiated([place])]
        return [place for place in self.places if self._can_be_differentiated([place])]

    def _can_be_differentiated(self, places: list[Place]) -> bool:
        case = self._replace(places=places)
        try:
            whole = case.whole(places)
            case.gradients(whole, whole)
        except RuntimeError:  # "not differentiable with respect to argument 'running_mean'"
            return False
        return True

    def values(self, whole: CheckedRun, run: CheckedRun, *, bitwise: bool) -> Difference | None:
        """Where the values of a run differ from those of one device."""
        return first_of(self.pairs(whole, run), self.tolerance, None, bitwise=bitwise)

    def gradients(self, whole: CheckedRun, run: CheckedRun) -> Difference | None:
        """Where the gradients of a run differ, which has the values of one device."""
        leaves = [leaf for leaf in self.pairs(whole, run) if self._is_differentiated(leaf)]
        want, got = [leaf.want for leaf in leaves], [leaf.got for leaf in leaves]
        for order in range(1, self.order + 1):
            first_of_loss = order == 1 and self.loss is not None
            directions = [torch.ones_like(loss) for loss in want] if first_of_loss else cotangents(want)
            again = order < self.order
            want = derivatives(want, directions, self.leaves(whole), create_graph=again)
            # value_and_grad has taken the gradients of the parameters; those of the inputs go through its value.
            given = flatten(run.grads, "grads").leaves if first_of_loss else []
            rest = self.leaves(run)[len(given) :]
            got = [*given, *derivatives(got, directions, rest, create_graph=again)]
            prefix = "" if order == 1 else "second-order "
            names = [prefix + self.sample.name(place) for place in self.places]
            pairs = [Leaf(name, AUTO, a, b) for name, a, b in zip(names, want, got, strict=True)]
            # Leaves of one gradient are commensurate: what is small beside the largest may be noise around zero.
            scale = max(0.01, magnitude(want))
            found = first_of(pairs, self.tolerance, scale, bitwise=False)
            if found is not None:
                return found
        return None

    def pairs(self, whole: CheckedRun, run: CheckedRun) -> list[Leaf]:
        sides = zip(whole.results, run.results, strict=True)
        return [leaf for (name, a, dims), (_, b, _) in sides for leaf in leaves_of(name, a, dims, b, WHERE)]

    def _named(self, out: Any) -> list[tuple[str, Tree, Dims]]:
        if self.loss is None:
            return [("out", out, getattr(self.fn, "out_dims", 0) if self.out_dims is AUTO else self.out_dims)]
        if not self.loss.has_aux:
            return [("loss", out, self.loss.reduction)]
        return [("loss", out[0], self.loss.reduction), ("aux", out[1], dims_of(out[1], self.loss.aux_dims, WHERE))]

    def _is_differentiated(self, leaf: Leaf) -> bool:
        return requires_grad(leaf.want) if self.loss is None else leaf.path == "loss"

    def leaves(self, run: CheckedRun) -> list[torch.Tensor]:
        """The tensors of a run that gradients are taken in."""
        return [run.arguments.leaves[i][k] for i, k in self.places]


def requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def cotangents(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Random directions, the same in every run, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for tensor in tensors:
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        direction = torch.randn(tensor.shape, generator=generator, dtype=dtype)
        made.append(direction.to(tensor.device, tensor.dtype))
    return made


def derivatives(
    outputs: Sequence[Any], directions: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], *, create_graph: bool
) -> list[torch.Tensor]:
    """The gradient of the outputs along the directions in each leaf, zeros where there is none."""
    live = [(out, direction) for out, direction in zip(outputs, directions, strict=True) if requires_grad(out)]
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if live and leaves:
        heads, along = zip(*live, strict=True)
        found = torch.autograd.grad(
            heads, leaves, along, create_graph=create_graph, retain_graph=True, allow_unused=True
        )
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]
