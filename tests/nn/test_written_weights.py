"""Modules whose forward writes to their weights: embeddings with max_norm, and the user's own."""

import copy
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


class Language(nn.Module):
    """The output layer has the weight of the embedding, and so what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embedding = nn.Linear(4, 7, bias=False), nn.Embedding(7, 4, max_norm=0.5)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).sin())


def hooked(module: nn.Module) -> nn.Module:
    def scaled(part: nn.Module, args: Any, out: Any, owner: nn.Module = module) -> Any:
        return out * len(owner._forward_hooks)

    module.register_forward_hook(scaled)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(7, 4, max_norm=0.5),
    "other norm": lambda: nn.Embedding(7, 4, max_norm=0.5, norm_type=1.0, padding_idx=2),
    "bag": lambda: nn.EmbeddingBag(7, 4, max_norm=0.5),
    "inside": lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2), nn.Sequential(nn.Tanh())),
    "tied": Language,
    "in place": lambda: hooked(nn.Embedding(7, 4, max_norm=0.5)),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().double()


def with_grads(call: Callable[[], Tensor], weights: Any) -> Any:
    out = call()
    return out.detach(), torch.autograd.grad((out * numbers(*out.shape)).sum(), list(weights))


@each_module
def test_apply_gives_what_the_module_gives_and_writes_nothing(make: Callable[[], nn.Module]):
    module = made(make)
    apply, (params, _) = functional(module, detach=False)
    before, versions = copy.deepcopy(dict(module.state_dict())), [tensor._version for tensor in params.values()]
    got = None
    for _ in range(2):
        got = with_grads(lambda: apply((params, {}), IDS)[0], params.values())
        assert_same_tree(dict(module.state_dict()), before)
        assert [tensor._version for tensor in params.values()] == versions
    assert_close_tree(got, with_grads(lambda: module(IDS), module.parameters()))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "tied"])
def test_slots_give_what_one_device_gives(name: str):
    """But for the tied weights: there the output of a row depends on which ids the other rows look up."""
    module = made(MODULES[name])
    apply, (params, buffers) = functional(module)
    assert_close_tree(fdp.dp_apply(apply, (params, buffers), IDS, CPUS)[0], copy.deepcopy(module)(IDS).detach())

    def loss(params: Any, ids: Tensor) -> Tensor:
        return apply((params, buffers), ids)[0].square().mean()

    value, grads = fdp.value_and_grad(loss, devices=CPUS)(params, IDS)
    want = module(IDS).square().mean()
    assert_close_tree(value, want.detach())
    assert_close_tree(list(grads.values()), list(torch.autograd.grad(want, list(module.parameters()))))


def test_a_norm_that_is_set_later():
    module = made(lambda: nn.Embedding(7, 4))
    apply, state = functional(module)
    for norm in (None, 0.5, 0.25, None):
        module.max_norm = norm
        before = module.weight.detach().clone()
        got = apply(state, IDS)[0]
        assert_same_tree(module.weight.detach(), before)
        assert_close_tree(got, copy.deepcopy(module)(IDS).detach())


def test_compiled_in_one_graph():
    module = made(Language)
    apply, (params, _) = functional(module)
    before = module.head.weight.detach().clone()
    got = torch.compile(lambda params, ids: apply((params, {}), ids)[0], backend="eager", fullgraph=True)(params, IDS)
    assert_same_tree(module.head.weight.detach(), before)
    assert_close_tree(got, module(IDS).detach())


def test_functional_call_writes_as_torch_s_does():
    weights = []
    for call in (functional_call, torch.func.functional_call):
        given = {"weight": numbers(7, 4)}
        call(made(MODULES["embedding"]), given, IDS)
        weights.append(given["weight"])
    assert_close_tree(weights[0], weights[1])
    assert not torch.equal(weights[0], numbers(7, 4))


def test_training_ends_with_the_weights_of_one_device():
    """If they are renormalised before each step, as the migration page says."""
    module, one = (made(MODULES["embedding"]) for _ in range(2))
    apply, (params, buffers) = functional(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (module, one)]

    def loss(params: Any, ids: Tensor) -> Tensor:
        return (apply((params, buffers), ids)[0] - 1).square().mean()

    for _ in range(3):
        with torch.no_grad():
            module.weight.copy_(module.weight.renorm(2, 0, module.max_norm))
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
def test_apply_refuses_what_a_forward_of_the_users_writes(prepare: Callable[[nn.Module], nn.Module]):
    apply, state = functional(prepare(Clamping(3, 2)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"apply: forward wrote in place to the parameters \['weight'\].*clamp"):
            apply(state, torch.ones(3))


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        module = made(MODULES["embedding"])
        apply, state = functional(module)
        before = module.weight.clone()
        got = apply(state, IDS)[0]
        assert_same_tree(module.weight, before)
    assert_close_tree(apply(state, IDS)[0], got)


def test_the_first_replica_writes_to_the_module():
    """As in torch: what the others write is lost, but every replica computes with what it has written."""
    module, one = (made(MODULES["embedding"]) for _ in range(2))
    before = module.weight.detach().clone()
    got = DataParallel(module, CPUS)(IDS)
    assert_close_tree(got, one(IDS))
    own = IDS[:2].unique()
    assert_close_tree(module.weight[own].detach(), one.weight[own].detach())
    others = [i for i in range(7) if i not in own]
    assert_same_tree(module.weight[others].detach(), before[others])
