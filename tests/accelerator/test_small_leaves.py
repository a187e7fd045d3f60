"""Small leaves travel together: few copies between devices, and each leaf stays a tensor of its own."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.virtual import VirtualTensor, record_copies, traffic

DEVICES = [torch.device("virtual", i) for i in range(4)]
LAYERS = 5


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
    return nn.Sequential(*layers, nn.Linear(4, 2)).double()


def test_a_step_of_a_model_with_buffers(monkeypatch: pytest.MonkeyPatch):
    waits: Counter[str] = Counter()
    dispatch: Any = VirtualTensor.__torch_dispatch__

    def counting(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits[func.name()] += func.name() in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
        return dispatch(func, types, args, kwargs)

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        out, new = apply((params, buffers), x)
        return out.square().mean(), new

    apply, (params, buffers) = fdp.functional(model())
    x, options = numbers(16, 4), {"has_aux": True, "in_dims": (None, None, 0), "aux_dims": "mean"}
    want = fdp.value_and_grad(loss, devices=fdp.virtual_devices(4), **options)(params, buffers, x)
    there: Any = tree_map(lambda t: t.to(DEVICES[0]), (params, buffers, x))
    monkeypatch.setattr(VirtualTensor, "__torch_dispatch__", classmethod(counting))
    with fdp.transfers() as log, record_copies() as real:
        found = fdp.value_and_grad(loss, devices=DEVICES, **options)(*there)
    assert_close_tree(tree_map(lambda t: t.cpu(), found), want)
    assert traffic(log) == traffic(real)
    # Each parameter and buffer goes there and comes back, as a gradient or new; then there are the batch and the loss.
    assert len(log) == 3 * (2 * len(params) + 2 * len(buffers) + 2)
    # For each other device: the batch, the loss, parameters and float buffers, their gradients, new buffers, integers.
    assert len(real) == 3 * 7
    assert sum(waits.values()) == 1


def test_a_write_to_one_leaf_is_named():
    params = {"a": numbers(2), "b": numbers(2), "c": numbers(2, 2)}

    def writes(params: Any, x: Tensor) -> Tensor:
        params["b"].add_(1)
        return x

    with pytest.raises(RuntimeError, match=r"wrote in place to params\['b'\]\. It must be pure"):
        fdp.dp_apply(writes, params, numbers(4), DEVICES)


def test_what_has_strides_or_a_graph_travels_alone():
    params: Any = {"t": numbers(2, 3).T, "w": numbers(3), "v": numbers(3).requires_grad_(), "u": numbers(3)}
    strides: list[Any] = []

    def fn(params: Any, x: Tensor) -> Tensor:
        strides.append([params[name].stride() for name in "tw"])
        return x * params["v"].sum() * params["w"].sum()

    with record_copies() as real:
        out = fdp.dp_apply(fn, params, numbers(4), DEVICES[:1])
    assert strides == [[(1, 3), (1,)]]
    assert sorted(copied.nbytes for copied in real) == [24, 32, 48, 48]
    out.sum().backward()
    torch.testing.assert_close(params["v"].grad, (numbers(4).sum() * params["w"].sum()).expand(3))
