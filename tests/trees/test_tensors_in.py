"""All tensors of a tree, of which nothing is known yet."""

import dataclasses
from typing import Any

import pytest
import torch

import fdp
from fdp._trees.tree import tensors_of_new


@pytest.mark.parametrize("depth", [0, 2, 600])
def test_tensors_in_builtin_and_in_other_containers(depth: int):
    @dataclasses.dataclass
    class Fresh:  # a class that no call has met
        x: Any
        y: Any

    each = [torch.tensor(float(i)) for i in range(5)]
    tree: Any = {"b": (each[0], torch.nn.Parameter(each[1], requires_grad=False)), "a": [None, 3, "x", each[2]], 0: {}}
    known = tree
    for _ in range(depth):
        tree = [tree]
    assert sorted(map(float, tensors_of_new(tree))) == [0.0, 1.0, 2.0]
    tree = [tree, Fresh([each[3]], {"y": each[4]})]
    assert sorted(map(float, tensors_of_new(tree))) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(tensors_of_new([known, known])) == 6


def test_tensors_of_a_tree_without_end():
    tree: Any = [torch.ones(1)]
    tree.append(tree)
    with pytest.raises(ValueError, match="a list that contains itself"):
        tensors_of_new(tree)


class Own(torch.Tensor):
    """A tensor of the user's."""


def test_a_class_of_tensors_that_a_call_has_met():
    own = torch.ones(2).as_subclass(Own)
    fdp.dp_apply(lambda w, x: x, own, torch.ones(2))
    assert [x is own for x in tensors_of_new([own, {"a": (own,)}])] == [True, True]
