"""Law of compilation: a compiled call is the call."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_close, assert_same
from property_tests.functions import grads_of, sines, summary
from property_tests.places import cpu_only
from property_tests.strategies import Split, splits
from tests.common.containers import Frozen, Point, mapped
from tests.common.settings import fresh_compiler

pytestmark = cpu_only
# Compiling takes its time: few examples, and those that fail are not made smaller. The first is the simplest.
count = 1 + settings().max_examples // 40
few = settings(max_examples=count, phases=[Phase.explicit, Phase.reuse, Phase.generate])
several = splits(at_least=1, most_slots=2 if count == 1 else 3).filter(lambda split: split.slots > 1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def linear(params: Any, x: torch.Tensor) -> Any:
    y = torch.tanh(x @ params["w"] + params["b"].x)
    return {"rows": y, "more": (y.mean(0), [y.sum(0), "text"]), "point": Point(y.amax(0), None)}


OUT_DIMS = {"rows": 0, "more": ("mean", ["sum", 0]), "point": Point("max", None)}


def arguments(split: Split) -> tuple[Any, torch.Tensor]:
    params: dict[str, Any] = {"w": sines(3, 2).requires_grad_()}
    params["b"] = Frozen(torch.ones(2, dtype=torch.float64, requires_grad=True), None)
    return params, sines(split.rows, 3)


@few
@given(several)
def test_l10_dp_apply(split: Split):
    options = split.options | {"executor": "sequential", "out_dims": OUT_DIMS}
    params, x = arguments(split)

    def call(params: Any, x: torch.Tensor) -> Any:
        return fdp.dp_apply(linear, params, x, **options)

    want = call(params, x)  # first: a type of container cannot be met for the first time while compiling
    got = compiled(call)(params, x)
    assert_close(got, want, 1e-12)
    inputs = [params["w"], params["b"].x]
    assert_close(grads_of(summary(got), inputs), grads_of(summary(want), inputs), 1e-12)


@few
@given(several, st.sampled_from([1, 2]))
def test_l10_value_and_grad(split: Split, microbatches: int):
    params, x = mapped_detached(arguments(split))
    options = split.options | {"executor": "sequential", "microbatches": microbatches}
    call = fdp.value_and_grad(lambda params, x: linear(params, x)["rows"].square().mean(), **options)
    want = call(params, x)  # first, as above
    assert_close(compiled(call)(params, x), want, 1e-12)


@few
@given(several)
def test_l10_scatter_and_gather(split: Split):
    _, x = arguments(split)
    tree = {"x": x, "more": [x.mT, Point(x[:, 0], "text"), None, 3]}
    dims = {"x": 0, "more": [1, 0, None, 0]}

    def there_and_back(tree: Any) -> Any:
        return fdp.gather(fdp.scatter(tree, split.devices, dims, weights=split.weights))

    assert_same(compiled(there_and_back)(tree), tree)


def mapped_detached(trees: Any) -> Any:
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, trees)
