"""Types that a call meets for the first time work as they do ever after."""

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import fdp
from property_tests.comparing import assert_same
from property_tests.strategies import Split, splits


def new_dataclass() -> Any:
    return dataclasses.make_dataclass("New", ["x", "y"])


def new_frozen_dataclass() -> Any:
    return dataclasses.make_dataclass("New", ["x", "y"], frozen=True, slots=True)


def new_torch_node() -> Any:
    cls = type("New", (), {"__init__": lambda self, x, y: self.__dict__.update(x=x, y=y)})
    torch_pytree.register_pytree_node(cls, lambda obj: ([obj.x, obj.y], None), lambda parts, _: cls(*parts))
    return cls


NEW = (new_dataclass, new_frozen_dataclass, new_torch_node)
PLACES = {
    "alone": lambda cls, x, y: cls(x, y),
    "in a list": lambda cls, x, y: [cls(x, y)],
    "in a dict": lambda cls, x, y: {"a": x, "b": cls(y, x)},
    "in itself": lambda cls, x, y: cls(cls(x, y), y),
}


def parts(tree: Any) -> Any:
    """The tree as lists, which need no registration."""
    if type(tree) is dict:
        return [parts(tree[key]) for key in tree]
    if isinstance(tree, list):
        return [parts(part) for part in tree]
    return [parts(tree.x), parts(tree.y)] if hasattr(tree, "x") else tree


@given(splits(), st.sampled_from(NEW), st.sampled_from(list(PLACES)), st.data())
def test_first_use_of_a_type(split: Split, new: Any, place: str, data: st.DataObject):
    cls = new()
    x, y = torch.arange(split.rows), torch.ones(2, split.rows)
    tree = PLACES[place](cls, x, y)
    dims = PLACES[place](cls, 0, -1)
    options = {"weights": split.weights}
    match data.draw(st.sampled_from(["scatter", "dp_apply", "out_dims", "params", "replicate"])):
        case "scatter":
            got = fdp.gather(fdp.scatter(tree, split.devices, dims, **options))
        case "dp_apply":
            got = fdp.dp_apply(lambda _, t: t, None, tree, in_dims=dims, out_dims=dims, **split.options)
        case "out_dims":
            got = fdp.dp_apply(
                lambda _, x, y: PLACES[place](cls, x, y), None, (x, y), in_dims=(0, 1), out_dims=dims, **split.options
            )
        case "params":
            got = fdp.dp_apply(lambda p, _: p, tree, x, out_dims=None, **split.options)
        case _:
            got = fdp.unreplicate(fdp.replicate(tree, split.devices))
    assert_same(parts(got), parts(tree))


@dataclasses.dataclass
class Halved:
    """A dataclass that changes a field when it is made."""

    x: Any
    y: Any

    def __post_init__(self) -> None:
        self.x = self.x / 2 if isinstance(self.x, torch.Tensor) else self.x


@dataclasses.dataclass
class HalvedOutput(OrderedDict):
    """The same, that is a dict of its fields as well."""

    x: Any
    y: Any

    def __post_init__(self) -> None:
        self.x = self.x / 2 if isinstance(self.x, torch.Tensor) else self.x
        self.update(x=self.x, y=self.y)


@dataclasses.dataclass
class Checked:
    """A dataclass that checks its fields when it is made."""

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.x, torch.Tensor) or not isinstance(self.y, torch.Tensor):
            raise TypeError("x and y must be tensors")


@given(splits(), st.sampled_from([Halved, HalvedOutput, Checked]))
def test_a_dataclass_that_looks_at_its_fields(split: Split, cls: Any):
    tree = cls(torch.arange(split.rows) * 2.0, torch.ones(2, split.rows))
    dims = {"y": 1}
    sharded = fdp.scatter(tree, split.devices, dims, weights=split.weights)
    joined = fdp.gather(sharded)
    assert_same(parts(joined), parts(tree))
    assert cls is not HalvedOutput or joined["x"] is joined.x
    out = fdp.dp_apply(lambda p, t: [p, t], tree, tree, in_dims=dims, out_dims=[None, dims], **split.options)
    assert_same([parts(part) for part in out], [parts(tree), parts(tree)])


@given(splits(at_least=1), st.sampled_from([Halved, Checked]), st.booleans())
def test_parameters_in_a_dataclass_that_looks_at_its_fields(split: Split, cls: Any, replicated: bool):
    params = cls(torch.ones((), dtype=torch.float64), torch.ones(2))
    x = torch.arange(split.rows, dtype=torch.float64)
    given_params = fdp.replicate(params, split.devices) if replicated else params
    grads = fdp.grad(lambda p, x: (p.x * x).mean(), **split.options)(given_params, x)
    each = grads.shards if replicated else [grads]
    for grad in each:
        torch.testing.assert_close(grad.x.cpu(), x.mean(), rtol=1e-12, atol=0)
        assert_same(grad.y, torch.zeros(2))
