"""A function and its sample arguments: run on one device, run on slots, and compared."""

import contextvars
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.slot import AXES, Axis, Slot
from fdp._transforms.apply import dp_apply
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.call import note_call
from fdp._transforms.grad import value_and_grad
from fdp._trees.tree import flatten
from fdp._trees.types import AUTO, Auto, Dims, Executor, Function, Tree
from fdp.testing._compare import Difference, Leaf, Tolerance, differing, leaves_of, magnitude
from fdp.testing._sample import Arguments, Sample

WHERE = "assert_data_parallel"


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
    """What is checked. `loss`: what `value_and_grad` is told of a loss; `places`: what gradients are compared in."""

    fn: Function
    sample: Sample
    loss: dict[str, Any] | None
    out_dims: Dims | Auto
    places: list[int]
    tolerance: Tolerance
    weights: Sequence[float] | None

    def whole(self, places: Sequence[int]) -> CheckedRun:
        """One call on the whole batch."""
        arguments = self.sample.fresh(places)
        context = contextvars.copy_context()
        slot = Slot(0, 1, range(self.sample.rows), self.sample.device, "data")
        context.run(AXES.set, (Axis(slot, None, threading.get_ident()),))  # collectives see one slot
        args, kwargs = (arguments.params, *arguments.inputs), arguments.kwargs
        try:
            return CheckedRun(arguments, self._named(context.run(self.fn, *args, **kwargs)))
        except Exception as error:
            note_call(error, args, kwargs)
            raise

    def split(self, way: Way) -> CheckedRun:
        """A call on slots."""
        arguments = self.sample.fresh(self.places)
        options: dict[str, Any] = {
            "devices": way.devices,
            "kwarg_dims": self.sample.kwarg_dims,
            "weights": None if self.weights is None else self.weights[: len(way.devices)],
            "executor": way.executor,
        }
        in_dims, (params, inputs, kwargs, _) = self.sample.in_dims, arguments
        if self.loss is None:
            out = dp_apply(self.fn, params, inputs, kwargs=kwargs, in_dims=in_dims, out_dims=self.out_dims, **options)
            return CheckedRun(arguments, self._named(out))
        step = value_and_grad(self.fn, in_dims=(None, *in_dims), **options, **self.loss)
        out, grads = step(params, *inputs, **kwargs)
        return CheckedRun(arguments, self._named(out), grads)

    def _named(self, out: Any) -> list[tuple[str, Tree, Dims]]:
        if self.loss is None:
            return [("out", out, getattr(self.fn, "out_dims", 0) if self.out_dims is AUTO else self.out_dims)]
        loss, *aux = out if self.loss["has_aux"] else [out]
        named = [("aux", tree, dims_of(tree, self.loss["aux_dims"], WHERE)) for tree in aux]
        return [("loss", loss, self.loss["reduction"]), *named]

    def differentiable(self) -> list[int]:
        """The places that the function can be differentiated in: tried one by one if it cannot in all."""
        if self._can_be_differentiated(self.places):
            return self.places
        is_loss = self.loss is not None  # value_and_grad needs all parameters
        return [i for i in self.places if (is_loss and self.sample.is_param(i)) or self._can_be_differentiated([i])]

    def _can_be_differentiated(self, places: list[int]) -> bool:
        case = self._replace(places=places)
        try:
            whole = case.whole(places)
            case.gradients(whole, whole)
        except RuntimeError:  # "not differentiable with respect to argument 'running_mean'"
            return False
        return True

    def differences(self, whole: CheckedRun, run: CheckedRun, *, bitwise: bool = False) -> list[Difference]:
        """Where the values of a run differ from those of one device; if nowhere, where its gradients do."""
        return differing(self.pairs(whole, run), self.tolerance, bitwise=bitwise) or self.gradients(whole, run)

    def gradients(self, whole: CheckedRun, run: CheckedRun) -> list[Difference]:
        """Where the gradients of a run differ, which has the values of one device."""
        ends = [leaf for leaf in self.pairs(whole, run) if self._is_end(leaf)]
        outputs, directions = [leaf.want for leaf in ends], [torch.ones_like(leaf.want) for leaf in ends]
        if self.loss is None:
            generator = torch.Generator().manual_seed(0)  # random directions, the same in every run
            directions = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in outputs]
        want = derivatives(outputs, directions, self.leaves(whole))
        # value_and_grad has taken the gradients of the parameters; those of the inputs go through its value.
        given = [] if self.loss is None else flatten(run.grads, "grads").leaves
        got = [*given, *derivatives([leaf.got for leaf in ends], directions, self.leaves(run)[len(given) :])]
        names = map(self.sample.name, self.places)
        pairs = [Leaf(name, AUTO, a, b) for name, a, b in zip(names, want, got, strict=True)]
        # Leaves of one gradient are commensurate: what is small beside the largest may be noise around zero.
        return differing(pairs, self.tolerance, max(0.01, magnitude(want)))

    def _is_end(self, leaf: Leaf) -> bool:
        return requires_grad(leaf.want) if self.loss is None else leaf.path == "loss"

    def pairs(self, whole: CheckedRun, run: CheckedRun) -> list[Leaf]:
        sides = zip(whole.results, run.results, strict=True)
        return [leaf for (name, a, dims), (_, b, _) in sides for leaf in leaves_of(name, a, dims, b, WHERE)]

    def leaves(self, run: CheckedRun) -> list[torch.Tensor]:
        """The tensors of a run that gradients are taken in."""
        return [run.arguments.leaves[i] for i in self.places]


def requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def derivatives(
    outputs: Sequence[Any], directions: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradient of the outputs along the directions in each leaf, zeros where there is none."""
    live = [(out, direction) for out, direction in zip(outputs, directions, strict=True) if requires_grad(out)]
    if not live or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    heads, along = zip(*live, strict=True)
    return list(torch.autograd.grad(heads, leaves, along, retain_graph=True, allow_unused=True, materialize_grads=True))
