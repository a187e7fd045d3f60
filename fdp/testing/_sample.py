"""Sample arguments, of which every run gets fresh copies: what a function writes to them is found by comparing bits."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Self

import torch

from fdp._placement.common_rows import partition_of
from fdp._placement.moves import is_inexact
from fdp._placement.sharded import Slots
from fdp._placement.split_dims import flatten_args
from fdp._transforms.arguments import Args
from fdp._trees.tree import Flat, map_tensors, tensors_in, unflatten
from fdp._trees.types import Dims, Tree


class Arguments(NamedTuple):
    """What the function is called with in one run, and its leaves one after the other."""

    params: Tree
    inputs: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    leaves: list[Any]


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
        args: Args,
        dtype: torch.dtype | None,
        devices: Sequence[torch.device],
        where: str,
    ) -> Self:
        flats = flatten_args(zip(args.names, args.trees, args.dims, args.choices, strict=True), where)
        if any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves):
            raise TypeError(
                f"{where}: expected plain trees, which it splits over several numbers of slots; pass "
                "fdp.gather(sharded), fdp.unreplicate(replicated)"
            )
        tensors = tensors_in([flat.leaves for flat in flats[1:]] + flats[0].leaves)
        device = devices[0] if devices else tensors[0].device if tensors else torch.device("cpu")
        sizes = partition_of(flats, device, None, where)[1].sizes
        if sizes is None:
            raise ValueError(f"{where}: in_dims splits none of the inputs, so every run would be the same")
        if sum(sizes) < 2:
            raise ValueError(
                f"{where}: nothing was split: rows in the inputs: {sum(sizes)}. Pass a few more rows than slots, and a "
                "number that the slots do not divide"
            )

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if dtype is not None and is_inexact(tensor):
                tensor = tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)
            return _copied(tensor).to(device if devices else None)

        n = args.positional
        by_name = dict(zip(args.keywords, args.dims[n:], strict=True))
        return cls(flats, args.dims[1:n], by_name, sum(sizes), device).map(lambda leaf, _: map_tensors(taken, leaf))

    def map(self, change: Callable[[Any, Any], Any]) -> Self:
        """The sample with each leaf changed by a function of the leaf and its dim."""
        return self._replace(
            flats=[flat._replace(leaves=list(map(change, flat.leaves, flat.specs))) for flat in self.flats]
        )

    def fresh(self, places: Collection[int] = ()) -> Arguments:
        """Copies for one run, of which those at `places` require gradients."""
        parts = [[map_tensors(_copied, leaf) for leaf in flat.leaves] for flat in self.flats]
        leaves = [leaf for part in parts for leaf in part]
        for i in places:
            leaves[i].requires_grad_()
        trees = [unflatten(flat.structure, part) for flat, part in zip(self.flats, parts, strict=True)]
        n = 1 + len(self.in_dims)
        return Arguments(trees[0], tuple(trees[1:n]), dict(zip(self.kwarg_dims, trees[n:], strict=True)), leaves)

    def leaves(self) -> list[tuple[str, Any, Any]]:
        """The path of each leaf, the leaf and its dim."""
        return [(flat.path(k), flat.leaves[k], flat.specs[k]) for flat in self.flats for k in range(len(flat.leaves))]

    def written(self, arguments: Arguments) -> list[str]:
        """Paths of the leaves that do not hold the bits that they came with."""
        pairs = zip(self.leaves(), arguments.leaves, strict=True)
        return [path for (path, leaf, _), now in pairs if not all(map(same_bits, tensors_in(leaf), tensors_in(now)))]

    def places(self) -> list[int]:
        """What gradients are compared in: the numbers of parameters, and of inputs that are split."""
        return [
            i
            for i, (_, leaf, dim) in enumerate(self.leaves())
            if isinstance(leaf, torch.Tensor) and is_inexact(leaf) and (dim is not None or self.is_param(i))
        ]

    def is_param(self, place: int) -> bool:
        return place < len(self.flats[0].leaves)

    def name(self, place: int) -> str:
        """What the gradient at a place is called: `grads['w']`, `grads of inputs[0]`."""
        path = self.leaves()[place][0]
        return f"grads{path.removeprefix('params')}" if self.is_param(place) else f"grads of {path}"

    def take(self, rows: Sequence[int]) -> Self:
        """The sample with these rows, in this order."""

        def rearranged(leaf: Any, dim: Any) -> Any:
            if dim is None:
                return leaf
            if dim == "items":
                return type(leaf)(leaf[row] for row in rows)
            return leaf.index_select(dim, torch.tensor(rows, device=leaf.device))

        return self.map(rearranged)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    one, other = (dense(each).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return one.shape == other.shape and torch.equal(one, other)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, to look at."""
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
