"""How a collective goes through the slots of a call, and how its gradient does."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fdp._context import AXES, IN_PLACE, Axis
from fdp._gang import Gang, Together, What
from fdp._guards import is_forward_mode
from fdp._operations import Extreme, Operation
from fdp._tensor import copy, is_inexact
from fdp._tree import flatten, unflatten
from fdp._typing import Tree

functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def axis_of(where: str, name: str) -> Axis:
    """The innermost axis of a name."""
    axes = AXES.get()
    for axis in reversed(axes):
        if axis.slot.axis_name == name:
            return axis
    known = ", ".join(repr(axis.slot.axis_name) for axis in axes) or "none: this code runs in no mapped function"
    raise NameError(f"{where}: there is no axis {name!r} here. There is {known}")


def on_tree(
    where: str, tree: Tree, axis_name: str, make: Callable[[Sequence[int]], Operation], *, numbers: bool = True
) -> Tree:
    """Apply an operation to all tensors of a tree, and to its numbers if it has a meaning for them."""
    axis = axis_of(where, axis_name)
    flat = flatten(tree, "tree", where=where)
    kinds = (Tensor, int, float) if numbers else (Tensor,)
    wrong = [flat.path(i) for i, leaf in enumerate(flat.leaves) if not isinstance(leaf, kinds)]
    if wrong:
        kind = "tensors and numbers" if numbers else "tensors"
        raise TypeError(f"{where}: only {kind} can be exchanged, not {', '.join(wrong)}")
    tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
    operation = make([tensor.ndim for tensor in tensors])
    operation.name = where
    same = flat.structure, [isinstance(x, Tensor) for x in flat.leaves], operation.options()
    found = iter(_exchange(axis, operation, tensors, same))
    plain = [leaf for leaf in flat.leaves if not isinstance(leaf, Tensor)]
    rest = iter(_of_numbers(axis, where, plain, same))
    return unflatten(flat.structure, [next(found) if isinstance(leaf, Tensor) else next(rest) for leaf in flat.leaves])


def _of_numbers(axis: Axis, where: str, numbers: list[Any], same: Any) -> list[Any]:
    reduce: Callable[[Any], Any] = {"psum": sum, "pmax": max, "pmin": min}.get(where, sum)
    if not numbers or axis.slot.count == 1:
        return numbers

    def combine(values: list[list[Any]]) -> list[list[Any]]:
        return [[reduce(column) for column in zip(*values, strict=True)]] * len(values)

    gang = _gang_of(axis, where)
    index = axis.slot.index
    key = gang.number(index, gang.number(index, ("forward", _inside(axis))))
    what = What(
        where, ("numbers", same), lambda: f"{len(numbers)} numbers as {str(same[0]).removeprefix('PyTreeSpec')}"
    )
    return gang.meet(index, key, what, numbers, combine)


def _exchange(axis: Axis, operation: Operation, tensors: list[Tensor], same: Any) -> Sequence[Tensor]:
    if not tensors:
        return ()
    if isinstance(operation, Extreme):
        tensors = list(Undifferentiable.apply(operation.name, *tensors))
    if axis.slot.count == 1:
        found = [operation.results([x], i)[0] for i, x in enumerate(tensors)]
        return [y.clone() if y is x else y for x, y in zip(tensors, found, strict=True)]  # as with several
    gang = _gang_of(axis, operation.name)
    index, forward = axis.slot.index, ("forward", _inside(axis))
    if gang.settings.joint:
        if depth() > gang.settings.depth:
            raise RuntimeError(
                f"{operation.name}: inside a transform of torch.func, in a function whose call is transformed from "
                "outside too, is not supported. Transform on one side only"
            )
        found, _ = _meet(gang, index, gang.number(index, gang.number(index, forward)), operation, tensors, same)
        return Fence.apply(gang.token, *found)
    if is_forward_mode():
        raise RuntimeError(
            f"{operation.name}: inside forward-mode differentiation (jvp, jacfwd, hessian) in a mapped function is not "
            "supported: its state is one for all threads. Differentiate outside, or by vjp, jacrev"
        )
    key = gang.number(index, forward)
    handle = Handle(gang.token, axis.slot.axis_name, key, same)
    if depth() > 0:
        return Linear.apply(handle, operation, *tensors)
    found, is_differentiated = _meet(gang, index, gang.number(index, key), operation, tensors, same)
    if not is_differentiated:
        return found
    # On all slots, if on one: a gradient meets the others as the collective did.
    return Known.apply(handle, operation, found, *_attached(tensors))


def _attached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, as leaves where they have no part in a gradient yet."""
    return [x.detach().requires_grad_() if is_inexact(x) and not x.requires_grad else x for x in tensors]


def _inside(axis: Axis) -> tuple[int, ...]:
    """Where in the calls inside of an axis this code runs: it meets those who are at the same place."""
    axes = AXES.get()
    return tuple(other.slot.index for other in axes[axes.index(axis) + 1 :])


def depth() -> int:
    """How many transforms of torch.func are active here."""
    stack = functorch.get_interpreter_stack()
    return 0 if stack is None else len(stack)


def _gang_of(axis: Axis, where: str) -> Gang:
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{where}: collectives over several slots cannot be compiled; compile what is between them")
    if IN_PLACE.get():
        raise RuntimeError(
            f"{where}: in a module that is called in place, because something in it leads back to it (a hook that "
            "closes over the module, a compiled module, ...), slots would wait for each other. Remove what leads back"
        )
    if axis.gang is None:
        raise Together(where)
    return axis.gang


def _meet(
    gang: Gang, index: int, key: Any, operation: Operation, tensors: Sequence[Tensor], same: Any
) -> tuple[list[Tensor], bool]:
    """The results for a slot, and whether some slot needs a gradient."""
    kinds = [operation.kind(x, i) for i, x in enumerate(tensors)]
    packs = not gang.settings.joint and operation.elementwise and len(tensors) > 1
    layout = _layout(tensors) if packs else None
    sent = tensors if layout is None else _packed(tensors, layout)

    names = _Leaves(operation.name)
    first = [(x.dtype, x.shape) for x in tensors[:8]]

    def say() -> str:
        shown = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in first)
        structure = same
        while isinstance(structure, tuple):
            structure = structure[-1] if structure[0] == _OF else structure[0]
        tree = "" if structure.is_leaf() else f" as {str(structure).removeprefix('PyTreeSpec')}"
        return shown + ", ..." * (len(kinds) > len(first)) + tree

    needs = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def combine(values: list[tuple[Operation, Sequence[Tensor], bool]]) -> list[tuple[list[Tensor], bool]]:
        devices = [slot.device for slot in gang.slots]
        operations, columns, needed = zip(*values, strict=True)
        results: list[list[Tensor]] = [[] for _ in values]
        for leaf, xs in enumerate(zip(*columns, strict=True)):
            made = operations[0].results([copy(x, devices[0], names, leaf) for x in xs], leaf)
            for result, x, device in zip(results, made, devices, strict=True):
                result.append(copy(x, device, names, leaf))
        for other in operations[1:]:
            vars(other).update(vars(operations[0]))  # the sizes that it has seen
        return [(result, any(needed)) for result in results]

    value = operation, [x.detach() for x in sent] if not gang.settings.joint and depth() == 0 else sent, needs
    found, is_needed = gang.meet(index, key, What(operation.name, (same, kinds), say), value, combine)
    return (found if layout is None else _unpacked(found, tensors, layout)), is_needed


_SMALL = 2**16  # bytes
_OF = "gradient of"


class _Leaves(NamedTuple):
    """What the log of `transfers` calls what is exchanged."""

    name: str

    def path(self, index: int, /) -> str:
        return f"{self.name}[{index}]"


def _layout(tensors: Sequence[Tensor]) -> list[list[int]] | None:
    """Which small tensors travel as one: groups of the same dtype and device. None if there are none."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        small = x.layout is torch.strided and x.nbytes < _SMALL
        groups.setdefault((x.dtype, x.device) if small else i, []).append(i)
    return None if len(groups) == len(tensors) else list(groups.values())


def _packed(tensors: Sequence[Tensor], layout: list[list[int]]) -> list[Tensor]:
    return [
        tensors[group[0]] if len(group) == 1 else _flatten_dense_tensors([tensors[i] for i in group])
        for group in layout
    ]


def _unpacked(packed: Sequence[Tensor], like: Sequence[Tensor], layout: list[list[int]]) -> list[Tensor]:
    found: list[Any] = [None] * len(like)
    for group, x in zip(layout, packed, strict=True):
        parts = [x] if len(group) == 1 else _unflatten_dense_tensors(x, [like[i] for i in group])
        for i, part in zip(group, parts, strict=True):
            # `.data`: each has a version of its own, so that a write to one is none to the others.
            found[i] = part if part is x else part.data
    return found


class Handle:
    """Which collective of which call a gradient belongs to."""

    def __init__(self, token: object, axis_name: str, key: Any, same: Any) -> None:
        self.token, self.axis_name, self.key, self.same = token, axis_name, key, same

    def gang(self, name: str) -> tuple[Gang, int]:
        """Where the slots of that call are now: still running, or running its backward."""
        for axis in reversed(AXES.get()):
            if axis.gang is not None and axis.gang.token is self.token:
                return axis.gang, axis.slot.index
        raise RuntimeError(
            f"{name}: its gradient was asked for where the slots of its call do not run. Differentiate inside the "
            "mapped function, or what the call returned"
        )

    def of_transpose(self) -> "Handle":
        """That of the gradient, which is a collective too."""
        return Handle(self.token, self.axis_name, (_OF, self.key), (_OF, self.same))


class Linear(torch.autograd.Function):
    """A collective of slots that run: its gradient is its transpose, by another meeting of the same slots."""

    @staticmethod
    def forward(handle: Handle, operation: Operation, *tensors: Tensor) -> Any:
        gang, index = handle.gang(operation.name)
        found, _ = _meet(gang, index, gang.number(index, handle.key), operation, tensors, handle.same)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.handle, ctx.operation, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *Linear.apply(ctx.handle.of_transpose(), ctx.operation.transpose(), *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.operation.name}: forward-mode differentiation inside a mapped function")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        handle, operation, *tensors = args
        moved = [
            x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        found = Linear.apply(handle, operation, *moved)
        return found, (0,) * len(moved)


class Known(torch.autograd.Function):
    """`Linear`, for results that are known."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, operation: Operation, found: Sequence[Tensor], *tensors: Tensor) -> Any:
        ctx.handle, ctx.operation = handle, operation
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.handle.of_transpose()
        gang, index = back.gang(ctx.operation.name)
        operation = ctx.operation.transpose()
        found, is_differentiated = _meet(gang, index, gang.number(index, back.key), operation, grads, back.same)
        if is_differentiated:
            found = Known.apply(back, operation, found, *_attached(grads))
        return None, None, None, *found


class Identity(torch.autograd.Function):
    """The tensors as they are, with something that the gradient is to know."""

    generate_vmap_rule = True

    @staticmethod
    def forward(known: Any, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.known, *_ = inputs


class Undifferentiable(Identity):
    """What has no gradient, by the name of the collective."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.known} cannot be differentiated; detach its argument")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.known} cannot be differentiated; detach its argument")


class Fence(Identity):
    """No gradient goes through while the slots of a call run: the graph behind it is that of all of them."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if any(axis.gang is not None and axis.gang.token is ctx.known for axis in AXES.get()):
            raise RuntimeError(
                "a gradient was asked for inside a mapped function, through a collective, while the call is "
                "transformed by torch.func from outside, which is not supported. Transform on one side only"
            )
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(x.view_as(x) for x in tangents[1:])
