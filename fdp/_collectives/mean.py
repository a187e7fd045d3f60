"""The mean over slots: what each of them counts, and its share."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._collectives.axes import AxisName
from fdp._collectives.dispatch import reduced
from fdp._collectives.operations import Sum
from fdp._placement.moves import accumulator, is_inexact, layers
from fdp._trees import torch_private
from fdp._trees.message_lists import listed
from fdp._trees.tree import flatten, unflatten
from fdp._trees.types import Tree

WEIGHT = "weight of pmean"  # so that messages tell its meeting from that of the leaves


def mean(tree: Tree, axis_name: AxisName, count: int, weight: Any) -> Tree:
    """The mean over slots, each counting its `weight`; if that is None, the same as the others of `count`."""
    flat = flatten(tree, "tree", where="pmean")
    wrong = [i for i, leaf in enumerate(flat.leaves) if isinstance(leaf, Tensor) and not is_inexact(leaf)]
    if wrong:
        raise TypeError(f"pmean: integers have no mean: {listed(wrong, flat.path)}. Use psum, or floats")
    # Half precision stays wide until it is divided: sums and shares may overflow where the mean does not.
    leaves = [leaf.to(accumulator(leaf.dtype)) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
    whole: Any = count
    if weight is not None:
        weight = _checked(weight, [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)])
        whole = reduced(WEIGHT, weight, axis_name, Sum)
        value, sum_of_all = _values([weight, whole])
        _check_value(value)
        if sum_of_all == 0:
            raise ValueError("pmean: all weights are 0, and the mean over nothing is not defined")
        if isinstance(whole, float):  # 1e-60 is 0 in float32; scaled by a power of two, which is exact, it is not
            exponent = math.frexp(whole)[1]
            weight, whole = math.ldexp(weight, -exponent), math.ldexp(whole, -exponent)
        leaves = [_share(leaf, weight, value) for leaf in leaves]
    sums = flatten(reduced("pmean", unflatten(flat.structure, leaves), axis_name, Sum), "tree").leaves
    pairs = zip(flat.leaves, sums, strict=True)
    means = [(x / whole).to(leaf.dtype) if isinstance(leaf, Tensor) else x / float(whole) for leaf, x in pairs]
    return unflatten(flat.structure, means)


def _checked(weight: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """What a slot counts; a tensor in a dtype in which weights can be added up and multiplied with these."""
    is_tensor = isinstance(weight, Tensor)
    if not (is_tensor and weight.ndim == 0 and not weight.is_complex()) and not isinstance(weight, (int, float)):
        got = f"a tensor of {weight.dtype} with shape {tuple(weight.shape)}" if is_tensor else repr(weight)
        raise TypeError(f"pmean: weight must be a number, a 0-dim tensor or 'rows', got {got}")
    if not is_tensor:
        _check_value(weight)  # that of a tensor is read once, with the sum
        return weight
    reals = [dtype.to_real() for dtype in dtypes]
    wide = functools.reduce(torch.promote_types, reals, accumulator(weight.dtype))
    return weight.to(wide if is_inexact(weight) else torch.int64)


def _check_value(weight: Any) -> None:
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"pmean: weight must be finite and not negative, got {weight}")


def _share(leaf: Any, weight: Any, value: Any) -> Any:
    """What a slot adds to the sum. One of weight 0 adds nothing, by selection: NaN times 0 is NaN."""
    if not isinstance(leaf, Tensor):
        return leaf * float(weight) if value != 0 else 0.0
    if value == 0 and (not _is_differentiated(weight) or _values([leaf.isfinite().any()]) == [False]):
        return _Nothing.apply(leaf) * weight
    if value is None or value == 0:  # what is finite has a part in the gradient of the weight
        leaf = torch.where((weight == 0) & ~leaf.isfinite(), torch.zeros_like(leaf), leaf)
    return leaf * weight


def _values(xs: Sequence[Any]) -> list[Any]:
    """What numbers or tensors are, in one read; None where that cannot be told: under `vmap` it may be many."""
    if not isinstance(xs[0], Tensor):
        return list(xs)
    if torch.compiler.is_dynamo_compiling():
        return [None] * len(xs)
    wrapped = [layers(x) for x in xs]
    if any(torch_private.is_batched(layer) for each in wrapped for layer in each):
        return [None] * len(xs)
    return torch.stack([each[-1].detach() for each in wrapped]).tolist()


def _is_differentiated(weight: Any) -> bool:
    """Whether something differentiates through a weight. Forward mode cannot be asked, and counts as yes."""
    if not isinstance(weight, Tensor) or not is_inexact(weight):
        return False
    return torch_private.is_forward_mode() or any(layer.requires_grad for layer in layers(weight))


class _Nothing(torch.autograd.Function):
    """Zeros, in the graph of a tensor, since slots meet in the backward pass too, but with no gradient for it.

    None is not the same as zeros: torch hands it on as it is, and multiplies it with no NaN further back.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.zeros_like(tangents[0])
