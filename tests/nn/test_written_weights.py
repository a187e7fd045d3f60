"""Modules whose forward writes to their weights: embeddings with max_norm, and the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import DataParallel, functional, functional_call
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers

IDS = torch.arange(10).reshape(5, 2) % 7
CPUS = ["cpu"] * 3


def hooked(module: nn.Module) -> nn.Module:
    def scaled(part: nn.Module, args: Any, out: Any, owner: nn.Module = module) -> Any:
        return out * len(owner._forward_hooks)

    module.register_forward_hook(scaled)
    return module


def renormalising() -> Any:
    torch.manual_seed(0)
    return nn.Embedding(7, 4, max_norm=0.5).double()


@pytest.mark.parametrize("make", [renormalising, lambda: nn.Sequential(nn.EmbeddingBag(7, 4, max_norm=0.5))])
def test_a_norm_is_refused(make: Callable[[], nn.Module]):
    for where, call in (("functional", functional), ("backward", lambda module: fdp.backward(module, torch.sum))):
        with pytest.raises(ValueError, match=rf"^{where}: \['(it|0)'\]: forward writes to weights.*renorm"):
            call(make())


def test_a_norm_that_is_set_later():
    module = renormalising()
    module.max_norm = None
    apply, state = functional(module)
    module.max_norm = 0.5
    with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to params\[0\]\['weight'\]"):
        fdp.dp_apply(apply, state, IDS, CPUS)


def test_functional_call_writes_as_torch_s_does():
    weights = []
    for call in (functional_call, torch.func.functional_call):
        given = {"weight": numbers(7, 4)}
        call(renormalising(), given, IDS)
        weights.append(given["weight"])
    assert_close_tree(weights[0], weights[1])
    assert not torch.equal(weights[0], numbers(7, 4))


def test_training_ends_with_the_weights_of_one_device():
    """If they are renormalised before each step, as the migration page says."""
    module, one = (renormalising() for _ in range(2))
    norm, module.max_norm = module.max_norm, None
    apply, (params, buffers) = functional(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (module, one)]

    def loss(params: Any, ids: Tensor) -> Tensor:
        return (apply((params, buffers), ids)[0] - 1).square().mean()

    for _ in range(3):
        with torch.no_grad():
            module.weight.copy_(module.weight.renorm(2, 0, norm))
        (one(IDS) - 1).square().mean().backward()
        grads = fdp.grad(loss, devices=CPUS)(params, IDS)
        module.weight.grad = grads["weight"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close_tree(module.weight.detach(), one.weight.detach())


class Clamping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(input)


@pytest.mark.parametrize("prepare", [lambda module: module, hooked], ids=["clones", "in place"])
def test_calls_refuse_what_a_forward_of_the_users_writes(prepare: Callable[[nn.Module], nn.Module]):
    apply, state = functional(prepare(Clamping(3, 2)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to params\[0\]\['weight'\]"):
            fdp.dp_apply(apply, state, torch.ones(3, 3), CPUS)


def test_the_first_replica_writes_to_the_module():
    """As in torch: what the others write is lost, but every replica computes with what it has written."""
    module, one = (renormalising() for _ in range(2))
    before = module.weight.detach().clone()
    got = DataParallel(module, CPUS)(IDS)
    assert_close_tree(got, one(IDS))
    own = IDS[:2].unique()
    assert_close_tree(module.weight[own].detach(), one.weight[own].detach())
    others = [i for i in range(7) if i not in own]
    assert_same_tree(module.weight[others].detach(), before[others])
