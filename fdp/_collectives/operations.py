"""Linear operations on the tensors of all slots, each beside its transpose.

An operation is given a list of tensors for each slot, leaf by leaf the same kind. Dims count from the end, so that they
hold under `vmap`, which adds a dimension in front.
"""

import abc
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._placement.moves import concat, total
from fdp._placement.partition import balanced

Sizes = tuple[int, ...]


class Kinds(NamedTuple):
    """Of tensors, what has to be the same on all slots: in two lists, which are quickly made and compared."""

    shapes: list[Any]
    dtypes: list[torch.dtype]


_SHAPE = operator.attrgetter("shape")


class Operation(abc.ABC):
    """What the tensors of all slots become; `elementwise` ones may be given several tensors as one."""

    name = ""
    elementwise = False

    def options(self) -> str:
        """What has to be the same on all slots, besides the tensors: as arguments are written."""
        return ""

    def kinds(self, tensors: Sequence[Tensor]) -> Kinds:
        """What of the tensors has to be the same on all slots."""
        one: dict[Any, Any] = {}  # of each shape: the garbage collector looks at all that there are
        return Kinds([one.setdefault(s, s) for s in map(_SHAPE, tensors)], [x.dtype for x in tensors])

    @abc.abstractmethod
    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        """One leaf of each slot: what becomes of it on each slot, all on the device of slot 0.

        `xs` brings each there when it is asked for. Slots may be given the same tensor.
        """

    @abc.abstractmethod
    def transpose(self) -> "Operation":
        """What gradients go through, once `results` has seen the tensors."""

    def reached(self, given: Sequence[bool]) -> list[bool]:
        """Which slots get something, where only some give something to it and the others zeros."""
        return [any(given)] * len(given)


class Sum(Operation):
    name = "psum"
    elementwise = True

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        return [_reduced(self.name, total, counted(xs))] * len(xs)

    def transpose(self) -> Operation:
        return Sum()


def counted(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """What is summed: bools are counted."""
    return [x.to(torch.int64) for x in xs] if xs[0].dtype is torch.bool else xs


class Extreme(Operation):
    """The largest or smallest value; it has no transpose."""

    elementwise = True

    def __init__(self, name: str) -> None:
        self.name = name

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        if xs[0].is_complex():
            raise TypeError(f"{self.name}: complex numbers have no order")
        extreme = torch.amax if self.name == "pmax" else torch.amin
        return [_reduced(self.name, lambda xs: extreme(torch.stack(list(xs)), 0), xs)] * len(xs)

    def transpose(self) -> Operation:
        raise RuntimeError(f"{self.name} cannot be differentiated; detach its argument")


class Gather(Operation):
    """All tensors joined, on every slot."""

    name = "all_gather"

    def __init__(self, dims: Sequence[int], stack: bool = False) -> None:
        self.dims, self.stack = dims, stack
        self.sizes: dict[int, Sizes] = {}

    def options(self) -> str:
        return f"dim={_each(self.dims)}, stack={self.stack}"

    def kinds(self, tensors: Sequence[Tensor]) -> Kinds:
        kinds = super().kinds(tensors)
        return kinds if self.stack else kinds._replace(shapes=_but(self.dims, tensors))

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        dim = self.dims[leaf]
        moved = list(xs)
        self.sizes[leaf] = (1,) * len(moved) if self.stack else tuple(x.shape[dim] for x in moved)
        joined = torch.stack(moved, dim) if self.stack else concat(moved, dim)
        return [joined] * len(moved)

    def transpose(self) -> Operation:
        return Scatter(self.dims, self.stack, self.sizes)


class Scatter(Operation):
    """A part of the sum for each slot."""

    name = "psum_scatter"

    def __init__(self, dims: Sequence[int], stack: bool = False, sizes: dict[int, Sizes] | None = None) -> None:
        self.dims, self.stack, self.sizes = dims, stack, sizes

    def options(self) -> str:
        return f"dim={_each(self.dims)}, stack={self.stack}"

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        return self.parts(_reduced(self.name, total, counted(xs)), len(xs), leaf)

    def parts(self, whole: Tensor, count: int, leaf: int) -> list[Tensor]:
        """Those of the sum."""
        dim = self.dims[leaf]
        sizes = balanced(whole.shape[dim], count) if self.sizes is None else self.sizes[leaf]
        parts = whole.split_with_sizes(sizes, dim)
        return [part.squeeze(dim) if self.stack else part for part in (part.clone() for part in parts)]

    def transpose(self) -> Operation:
        return Gather(self.dims, self.stack)


class Exchange(Operation):
    """A part from every slot to every other."""

    name = "all_to_all"

    def __init__(self, split: Sequence[int], join: Sequence[int], sizes: dict[int, list[Sizes]] | None = None) -> None:
        self.split, self.join, self.sizes = split, join, sizes
        self.joined: dict[int, list[Sizes]] = {}  # for each slot how much came from every other

    def options(self) -> str:
        return f"split_dim={_each(self.split)}, concat_dim={_each(self.join)}"

    def kinds(self, tensors: Sequence[Tensor]) -> Kinds:
        shapes = _but(self.join, tensors) if self.sizes is None else [x.ndim for x in tensors]
        return super().kinds(tensors)._replace(shapes=shapes)

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        split, join, n, xs = self.split[leaf], self.join[leaf], len(xs), list(xs)
        sizes = [balanced(x.shape[split], n) for x in xs] if self.sizes is None else self.sizes[leaf]
        pieces = [x.split_with_sizes(each, split) for x, each in zip(xs, sizes, strict=True)]
        arrived = [[pieces[i][j] for i in range(n)] for j in range(n)]
        self.joined[leaf] = [tuple(piece.shape[join] for piece in each) for each in arrived]
        return [torch.cat(each, join) for each in arrived]

    def transpose(self) -> Operation:
        return Exchange(self.join, self.split, self.joined)


class Permute(Operation):
    """Every tensor to another slot."""

    name = "ppermute"
    elementwise = True

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs = pairs

    def options(self) -> str:
        return f"perm={list(self.pairs)}"

    def results(self, xs: Sequence[Tensor], leaf: int) -> list[Tensor]:
        sources = {target: source for source, target in self.pairs}
        return [xs[sources[i]] if i in sources else torch.zeros_like(x) for i, x in enumerate(xs)]

    def transpose(self) -> Operation:
        return Permute([(target, source) for source, target in self.pairs])

    def reached(self, given: Sequence[bool]) -> list[bool]:
        sources = {target: source for source, target in self.pairs}
        return [i in sources and given[sources[i]] for i in range(len(given))]


def _but(dims: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    """The shapes of tensors, which may differ in one dim each."""
    shapes = [list(x.shape) for x in tensors]
    for shape, dim in zip(shapes, dims, strict=True):
        shape[dim] = -1
    return shapes


def _each(dims: Sequence[int]) -> str:
    return str(dims[0]) if len(set(dims)) == 1 else str(list(dims))


def _reduced(name: str, reduce: Callable[[Sequence[Tensor]], Tensor], xs: Sequence[Tensor]) -> Tensor:
    try:
        return reduce(xs)
    except NotImplementedError as error:  # it names a kernel
        raise TypeError(
            f"{name}: torch has no arithmetic for {xs[0].dtype} here; convert it first ({error})"
        ) from error


def from_end(dim: int, tensors: Sequence[Tensor], name: str, *, new: bool = False) -> list[int]:
    """A dim for each tensor, counted from the end; `new`: it is added to those that there are."""
    ndims = [x.ndim + new for x in tensors]
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name}: a dim must be an int, got {dim!r}")
    if any(not -ndim <= dim < ndim for ndim in ndims):
        raise ValueError(f"{name}: dim {dim} is out of range for a tensor of {min(ndims)} dimensions")
    return [dim - ndim if dim >= 0 else dim for ndim in ndims]
