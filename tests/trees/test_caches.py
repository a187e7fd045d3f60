"""Outputs with a cache of keys and values in an object that no pytree library knows, as language models return it."""

from collections.abc import Iterator

import pytest
from torch import Tensor, nn

import fdp
from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.containers import Output
from tests.common.numbers import numbers

CPUS = ["cpu"] * 3


class Cache:
    """Keys and values of each layer: (rows, tokens, width)."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.layers = layers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.layers)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv, self.head = nn.Linear(4, 8).double(), nn.Linear(4, 5).double()

    def forward(self, x: Tensor, *, use_cache: bool = True) -> Output:
        k, v = self.kv(x).chunk(2, -1)
        return Output(logits=self.head(k * v)[:, 0], hidden=Cache([(k, v)]) if use_cache else None)


def test_a_cache_is_refused_by_data_parallel():
    """As by all of fdp: the error says how a model of transformers returns none."""
    module, x = Model(), numbers(7, 6, 4)
    with pytest.raises(TypeError, match=r"DataParallel: output\['hidden'\] is a Cache, .* with use_cache=False$"):
        DataParallel(module, CPUS)(x)
    assert_close_tree(DataParallel(module, CPUS)(x, use_cache=False), module(x, use_cache=False))


def test_a_cache_in_a_function():
    """It is no tree: the error says how a model of transformers returns none."""
    module, x = Model(), numbers(7, 6, 4)
    apply, state = fdp.functional(module)
    message = r"out\[0\]\['hidden'\] is a Cache, which holds tensors .* with use_cache=False$"
    with pytest.raises(TypeError, match=message):
        fdp.dp_apply(apply, state, x, fdp.virtual_devices(3))
    got, _ = fdp.dp_apply(apply, state, x, fdp.virtual_devices(3), kwargs={"use_cache": False})
    assert_close_tree(got, module(x, use_cache=False))
