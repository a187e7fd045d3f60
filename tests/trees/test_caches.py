"""Outputs with a cache of keys and values in an object that no pytree library knows, as language models return it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.containers import Output
from tests.common.numbers import numbers

CPUS = ["cpu"] * 3


class Layer:
    """Keys and values: (rows, heads, tokens, width)."""

    def __init__(self, window: int = 4) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.seen, self.window, self.device = 0, torch.tensor(window), None

    def update(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        self.values = values if self.values is None else torch.cat([self.values, values], 2)
        self.seen, self.device = self.seen + keys.shape[2], keys.device


class Cache:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.by_name = layers, {"first": layers[0]}
        self.owner = self

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((layer.keys, layer.values) for layer in self.layers)


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config
        self.qkv, self.head = nn.Linear(4, 12).double(), nn.Linear(4, 5).double()

    def forward(self, x: Tensor, past: Any = None, *, use_cache: bool = True) -> Output:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        cache = Cache([Layer(), Layer()]) if past is None else copy.deepcopy(past)
        for layer in cache.layers:
            layer.update(k, v)
        mixed = nn.functional.scaled_dot_product_attention(q, cache.layers[0].keys, cache.layers[0].values)
        cache.layers[1].seen += self.config.get("differs", 0) * len(x)
        if "extra" in self.config:
            cache.layers[1].window = self.config["extra"]
        return Output(logits=self.head(mixed[:, 0]), hidden=cache if use_cache else None)


def contents(cache: Cache) -> Any:
    return [(layer.keys, layer.values, layer.seen, layer.window, layer.device) for layer in cache.layers]


@pytest.mark.parametrize("rows", [7, 9, 2, 1])
def test_a_cache_is_joined_as_it_is_on_one_device(rows: int):
    module, x = Model(), numbers(rows, 6, 4)
    got, want = DataParallel(module, CPUS)(x), module(x)
    assert_close_tree(got.logits, want.logits)
    assert type(got.hidden) is Cache
    assert_close_tree(contents(got.hidden), contents(want.hidden))
    assert got.hidden.by_name["first"] is got.hidden.layers[0]
    assert got.hidden.owner is got.hidden
    one, other = (torch.autograd.grad(out.hidden.layers[1].keys.square().sum(), module.qkv.bias) for out in (got, want))
    assert_close_tree(one, other)


def test_the_next_token_follows_from_it():
    module, x = Model(), numbers(7, 6, 4)
    with torch.no_grad():
        got, want = (module(x[:, :1], call(x).hidden) for call in (DataParallel(module, CPUS), module))
    assert_close_tree(got.logits, want.logits)


def test_the_caches_of_the_replicas_stay_as_they_are():
    outputs = [Model()(numbers(rows, 6, 4)) for rows in (3, 2)]
    before = [contents(out.hidden) for out in outputs]
    joined = fdp.nn.gather(outputs, "cpu")
    assert [contents(out.hidden) for out in outputs] == before
    assert joined.hidden is not outputs[0].hidden
    assert len(joined.hidden.layers[0].keys) == 5


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "numbers": ({"differs": 1}, r"\.layers\[1\]\.seen is 9 in replica 0, 9 in replica 1, 7 in replica 2"),
    "tensors without rows": ({"extra": numbers(1)}, r"\.layers\[1\]\.window is \(1,\) in replica 0"),
}


@pytest.mark.parametrize(("config", "message"), WRONG.values(), ids=WRONG)
def test_a_cache_that_cannot_be_joined(config: dict[str, Any], message: str):
    module = Model(**config)
    with pytest.raises(ValueError, match=rf"DataParallel: the Cache in the output .*{message}.* use_cache=False"):
        DataParallel(module, CPUS)(numbers(7, 6, 4))
    assert_close_tree(DataParallel(module, CPUS)(numbers(7, 6, 4), use_cache=False).hidden, None)


def test_a_cache_in_some_replicas_only():
    class Sometimes(Model):
        def forward(self, x: Tensor, past: Any = None, *, use_cache: bool = True) -> Any:
            out = super().forward(x)
            return {"out": out.logits, "cache": out.hidden if len(x) > 1 else "none"}

    with pytest.raises(
        ValueError, match=r"output\['cache'\] differs between shards: a Cache in shard 0.*override gather"
    ):
        DataParallel(Sometimes(), CPUS)(numbers(7, 6, 4))


def test_an_object_that_is_no_iterable_is_refused():
    class Plain(Model):
        def forward(self, x: Tensor, past: Any = None, *, use_cache: bool = True) -> Any:
            out = super().forward(x)
            return out.logits, out.hidden.layers[0]

    with pytest.raises(TypeError, match=r"DataParallel: output\[1\] is a Layer, which holds tensors"):
        DataParallel(Plain(), CPUS)(numbers(7, 6, 4))


def test_tensors_that_are_one_in_some_replicas_only():
    class Sharing(Model):
        def forward(self, x: Tensor, past: Any = None, *, use_cache: bool = True) -> Output:
            out = super().forward(x)
            if len(x) < 3:
                out.hidden.layers[1].keys = out.hidden.layers[0].keys.clone()
            return out

    with pytest.raises(ValueError, match=r"the Cache in the output cannot be joined: \.layers\[1\]\.keys is"):
        DataParallel(Sharing(), CPUS)(numbers(7, 6, 4))


def test_a_cache_that_is_a_dict_with_attributes():
    class Kept(dict):
        def __init__(self, **parts: Any) -> None:
            super().__init__(parts)
            self.last = parts["keys"]

        def __iter__(self) -> Iterator[Any]:
            return iter([self.last])

    class Keeping(Model):
        def forward(self, x: Tensor, past: Any = None, *, use_cache: bool = True) -> Any:
            return Kept(keys=self.qkv(x))

    module, x = Keeping(), numbers(7, 6, 4)
    got = DataParallel(module, CPUS)(x)
    assert_close_tree([got.last, dict.__getitem__(got, "keys")], [module.qkv(x)] * 2)


def test_a_cache_in_a_function():
    """It is no tree: the error says how a model of transformers returns none."""
    module, x = Model(), numbers(7, 6, 4)
    apply, state = fdp.functional(module)
    message = r"out\[0\]\['hidden'\] is a Cache, which holds tensors .* with use_cache=False$"
    with pytest.raises(TypeError, match=message):
        fdp.dp_apply(apply, state, x, fdp.virtual_devices(3))
    got, _ = fdp.dp_apply(apply, state, x, fdp.virtual_devices(3), kwargs={"use_cache": False})
    assert_close_tree(got, module(x, use_cache=False))
