"""Replicate and unreplicate: the same tree on every slot."""

from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import tensors_of
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(3)


def addresses(tree: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(tree)]


def test_every_slot_has_storage_of_its_own():
    tree = {"w": numbers(2), "b": [numbers(3)]}
    replicated = fdp.replicate(tree, SLOTS)
    places = [addresses(tree), *map(addresses, replicated.shards)]
    assert len({address for place in places for address in place}) == 8
    with unharmed(tree):
        for i, shard in enumerate(replicated.shards):
            shard["w"].fill_(i)
    assert [float(shard["w"][0]) for shard in replicated.shards] == [0, 1, 2]


def test_without_copy_what_is_there_is_used():
    tree = {"w": numbers(2), "b": [numbers(3)]}
    for shard in fdp.replicate(tree, SLOTS, copy=False).shards:
        assert shard["w"] is tree["w"]
        assert shard["b"][0] is tree["b"][0]
        assert shard is not tree


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_are_on_their_slots_devices(copy: bool):
    replicated = fdp.replicate([numbers(2), 3], ["cpu", "meta"], copy=copy)
    assert [shard[0].device.type for shard in replicated.shards] == ["cpu", "meta"]
    assert replicated.devices == (torch.device("cpu"), torch.device("meta"))


@pytest.mark.parametrize("copy", [True, False])
def test_the_adjoint_is_the_sum(copy: bool):
    w = numbers(2).requires_grad_()
    replicated = fdp.replicate({"w": w}, SLOTS, copy=copy)
    torch.stack([(i + 1) * shard["w"] for i, shard in enumerate(replicated.shards)]).sum().backward()
    assert_same_tree(w.grad, torch.full((2,), 6.0, dtype=torch.float64))


def test_under_transforms():
    def total(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([shard**2 for shard in fdp.replicate(w, SLOTS).shards]).sum()

    w = numbers(2)
    torch.testing.assert_close(torch.func.grad(total)(w), 6 * w)
    torch.testing.assert_close(torch.func.hessian(total)(w), 6 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(torch.func.vmap(total)(numbers(4, 2)), 3 * (numbers(4, 2) ** 2).sum(1))
    assert torch.autograd.gradgradcheck(total, w.requires_grad_())


def test_unreplicate_takes_a_slot_without_a_copy():
    replicated = fdp.replicate({"w": numbers(2)}, SLOTS)
    assert fdp.unreplicate(replicated)["w"] is replicated[0]["w"]
    assert fdp.unreplicate(replicated, slot=2)["w"] is replicated[2]["w"]
    assert fdp.unreplicate(replicated, slot=-1)["w"] is replicated[2]["w"]


def test_unreplicate_of_something_else():
    value: Any
    for value in (fdp.scatter(numbers(2), SLOTS), numbers(2)):
        with pytest.raises(TypeError, match=f"unreplicate: expected a Replicated, got {type(value).__name__}"):
            fdp.unreplicate(value)
    with pytest.raises(IndexError, match="slot 3 of a Replicated with 3 slots"):
        fdp.unreplicate(fdp.replicate(numbers(2), SLOTS), slot=3)


def test_replicate_of_what_is_replicated():
    for value, name in ((fdp.replicate(numbers(2), SLOTS), "Replicated"), (fdp.scatter(numbers(2), SLOTS), "Sharded")):
        with pytest.raises(TypeError, match=rf"replicate: the tree is a {name} already"):
            fdp.replicate(value, SLOTS)
        with pytest.raises(TypeError, match=rf"scatter: the tree is a {name} already"):
            fdp.scatter(value, SLOTS)
