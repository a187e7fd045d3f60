"""Sample arguments, of which every run gets fresh copies: what a function writes to them is found by comparing bits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from fdp._placement.moves import is_inexact
from fdp._placement.partition import Partition
from fdp._placement.sharded import Slots
from fdp._placement.split_dims import flatten_args, plan_args
from fdp._transforms.arguments import Arg, keyword_args, positional_args
from fdp._trees.tree import Flat, flatten, is_array, tensors_in, tree_map, unflatten
from fdp._trees.types import Dims, Tree

Place = tuple[int, int]
"""Which argument, and which leaf of it."""


class Arguments(NamedTuple):
    """What the function is called with in one run, and the same leaves by place."""

    params: Tree
    inputs: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    leaves: list[list[Any]]


class Sample(NamedTuple):
    """Copies of the arguments that nobody has written to; `flats` are params, the inputs, then the keyword inputs."""

    flats: list[Flat]
    in_dims: tuple[Dims, ...]
    kwarg_dims: dict[str, Dims]
    rows: int
    device: torch.device

    @classmethod
    def of(
        cls,
        params: Tree,
        inputs: Tree,
        kwargs: Mapping[str, Tree],
        in_dims: Dims,
        kwarg_dims: Dims,
        dtype: torch.dtype | None,
        devices: Sequence[torch.device],
        where: str,
    ) -> Self:
        args = (
            positional_args(inputs, in_dims, "inputs", where)
            if type(inputs) is tuple
            else [Arg("inputs", inputs, in_dims)]
        )
        named = keyword_args(kwargs, kwarg_dims, where)
        flats = flatten_args([Arg("params", params, None), *args, *named.values()], where)
        if any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves):
            raise TypeError(
                f"{where}: expected plain trees, which it splits over several numbers of slots; pass "
                "fdp.gather(sharded), fdp.unreplicate(replicated)"
            )
        tensors = tensors_in([flat.leaves for flat in flats[1:]] + flats[0].leaves)
        device = devices[0] if devices else tensors[0].device if tensors else torch.device("cpu")
        rows = _rows_of(plan_args(flats, device, None, where)[1], where)
        in_dims = tuple(arg.dims for arg in args)
        kwarg_dims = {name: arg.dims for name, arg in named.items()}
        sample = cls(flats, in_dims, kwarg_dims, rows, device)
        return sample.map(lambda leaf, _: _copied(leaf, dtype, device if devices else None))

    def map(self, change: Callable[[Any, Any], Any]) -> Self:
        """The sample with each leaf changed by a function of the leaf and its dim."""
        return self._replace(
            flats=[flat._replace(leaves=list(map(change, flat.leaves, flat.specs))) for flat in self.flats]
        )

    def fresh(self, places: Collection[Place] = ()) -> Arguments:
        """Copies for one run, of which those at `places` require gradients."""
        leaves = [[_copied(leaf) for leaf in flat.leaves] for flat in self.flats]
        for i, k in places:
            leaves[i][k].requires_grad_()
        trees = [unflatten(flat.structure, part) for flat, part in zip(self.flats, leaves, strict=True)]
        n = 1 + len(self.in_dims)
        return Arguments(trees[0], tuple(trees[1:n]), dict(zip(self.kwarg_dims, trees[n:], strict=True)), leaves)

    def written(self, arguments: Arguments) -> list[str]:
        """Paths of the leaves that do not hold the bits that they came with."""
        found = []
        for flat, leaves in zip(self.flats, arguments.leaves, strict=True):
            for k, (before, after) in enumerate(zip(flat.leaves, leaves, strict=True)):
                one, other = (flatten(leaf, flat.path(k)) for leaf in (before, after))
                pairs = zip(one.leaves, other.leaves, strict=True)
                found += [one.path(i) for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        return found

    def places(self) -> list[Place]:
        """What gradients are compared in: parameters, and inputs that are split."""
        return [
            (i, k)
            for i, flat in enumerate(self.flats)
            for k, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
            if isinstance(leaf, torch.Tensor) and is_inexact(leaf) and (i == 0 or spec is not None)
        ]

    def name(self, place: Place) -> str:
        """What the gradient at a place is called: `grads['w']`, `grads of inputs[0]`."""
        i, k = place
        return f"grads of {self.flats[i].path(k)}" if i else self.flats[i]._replace(name="grads").path(k)

    def take(self, rows: Sequence[int]) -> Self:
        """The sample with these rows, in this order."""

        def rearranged(leaf: Any, dim: Any) -> Any:
            if dim is None:
                return leaf
            if dim == "items":
                return type(leaf)(leaf[row] for row in rows)
            return leaf.index_select(dim, torch.tensor(rows, device=leaf.device))

        return self.map(rearranged)


def _rows_of(plan: Partition, where: str) -> int:
    if plan.sizes is None:
        raise ValueError(f"{where}: in_dims splits none of the inputs, so every run would be the same")
    if sum(plan.sizes) < 2:
        raise ValueError(
            f"{where}: nothing was split: rows in the inputs: {sum(plan.sizes)}. Pass a few more rows than slots, "
            "and a number that the slots do not divide"
        )
    return sum(plan.sizes)


def _copied(leaf: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """A leaf of which nothing is shared; what is neither a tensor nor an array is passed as it is."""
    if isinstance(leaf, list | tuple):  # under "items"
        return tree_map(lambda part: _copied(part, dtype, device), leaf)
    if is_array(leaf):
        return leaf.copy()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if dtype is not None and is_inexact(leaf):
        leaf = leaf.to(dtype.to_complex() if leaf.is_complex() else dtype)
    return leaf.detach().clone().to(device)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two leaves hold the same bits; values that are neither tensors nor arrays are not looked at."""
    if is_array(a):
        return a.tobytes() == b.tobytes()
    if not isinstance(a, torch.Tensor) or a is b:
        return True
    if a.is_nested:
        return all(map(same_bits, a.unbind(), b.unbind()))
    one, other = (bits(tensor) for tensor in (a, b))
    return one.shape == other.shape and torch.equal(one, other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
