"""Gradients that are differentiated again, by autograd: the numbers are those of one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.transforms.test_transforms import INSIDE, SLOTS, W, X, each_executor, rows

pytestmark = pytest.mark.usefixtures("switching")


@few()
@each_executor
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("orders", [2, 3])
def test_backward_of_gradients(orders: int, microbatches: int, executor: Any):
    def differentiate(of: Callable[[Tensor, Tensor], Any]) -> list[Tensor]:
        """The gradient penalty, differentiated in the parameters, the batch, and what is captured; again and again."""
        leaves = [W.clone().requires_grad_(), X.clone().requires_grad_(), scale.detach().requires_grad_()]
        scale_of.append(leaves[2])
        value, grads = of(leaves[0], leaves[1])
        penalty = value + (grads.norm() - 1) ** 2
        found = leaves
        for _ in range(orders - 1):
            found = torch.autograd.grad(penalty, leaves, create_graph=True)
            penalty = torch.stack([f.sin().sum() for f in found]).sum()
        return [value, grads, *found]

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return rows(w * scale_of[-1], x).pow(2).mean()

    def plain(w: Tensor, x: Tensor) -> Any:
        value = loss(w, x)
        return value, torch.autograd.grad(value, w, create_graph=True)[0]

    scale, scale_of = torch.tensor(1.3, dtype=torch.float64), []
    options: Any = {"devices": SLOTS, "executor": executor, "microbatches": microbatches, "create_graph": True}
    want = differentiate(plain)
    assert all(tensor.abs().max() > 1e-3 for tensor in want)
    for _ in range(3):
        assert_close_tree(differentiate(fdp.value_and_grad(loss, **options)), want)


@few()
@each_executor
@pytest.mark.parametrize("name", ["grad", "jvp", "jacrev", "per-sample"])
def test_gradgradcheck_of_mapped_transforms(name: str, executor: Any):
    inputs = (W.clone().requires_grad_(), X[:3].clone().requires_grad_())
    apply = fdp.shard_map(INSIDE[name], devices=SLOTS, in_dims=(None, 0), executor=executor)
    if executor == "threads" and name == "jvp":
        with pytest.raises(RuntimeError, match=r"executor='threads': the function calls .*forward mode"):
            apply(*inputs)
        return
    assert torch.autograd.gradcheck(apply, inputs)
    assert torch.autograd.gradgradcheck(apply, inputs)
