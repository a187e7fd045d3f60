"""One warning where batch norms see the rows of their slot only."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import fdp
from fdp.nn import BatchNormWarning
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SLOTS, X = fdp.virtual_devices(3), numbers(12, 4).float()


def network(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *(norms or (nn.BatchNorm1d(4),)))


def by_dp_apply(module: nn.Module, devices: Any, **options: Any) -> None:
    apply, state = fdp.functional(module)
    fdp.dp_apply(apply, state, X, devices, **options)


def by_gradient(module: nn.Module, devices: Any, **options: Any) -> None:
    apply, (params, buffers) = fdp.functional(module)

    def loss(params: Any, x: Tensor) -> tuple[Tensor, Any]:
        out, new = apply((params, buffers), x)
        return out.square().mean(), new

    fdp.value_and_grad(loss, has_aux=True, aux_dims="mean", devices=devices, **options)(params, X)


def by_parallel_apply(module: nn.Module, devices: Any, **options: Any) -> None:
    apply, state = fdp.functional(module)
    fdp.parallel_apply(apply, state, fdp.scatter(X, devices), **options)


def by_functional_call(module: nn.Module, devices: Any, **options: Any) -> None:
    state = dict(module.named_parameters())
    fdp.dp_apply(lambda p, x: fdp.functional_call(module, dict(p), x), state, X, devices, **options)


def with_a_hook(module: nn.Module) -> nn.Module:
    """One that is called in place."""
    module.register_forward_hook(lambda *_: module.training and None)
    return module


CALLS: dict[str, Callable[..., None]] = {
    "dp_apply": by_dp_apply,
    "gradient": by_gradient,
    "parallel_apply": by_parallel_apply,
    "functional_call": by_functional_call,
}


def said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    texts = {each.category: str(each.message) for each in found}
    assert all(text.startswith("Calls of this") for kind, text in texts.items() if kind is not BatchNormWarning)
    return [str(each.message) for each in found if each.category is BatchNormWarning]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("change", "executor"),
    [(lambda module: module, "sequential"), (lambda module: module, "threads"), (with_a_hook, "sequential")],
    ids=["clone", "clone-threads", "in place"],
)
def test_one_warning_a_module(name: str, change: Callable[[nn.Module], nn.Module], executor: Any):
    call, module = CALLS[name], change(network(nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    with many_cores():
        (text,) = said(lambda: call(module, SLOTS, executor=executor))
        assert text == (
            "Batch norm in train mode on 3 slots: ['1', '2'] of a Sequential takes the statistics of each slot's own "
            "rows, so loss and gradients are not those of one device. fdp.nn.convert_sync_batchnorm(module) takes "
            "those of all rows. If each slot is to have its own, write "
            "warnings.simplefilter('ignore', fdp.nn.BatchNormWarning)"
        )
        assert said(lambda: call(module, SLOTS, executor=executor)) == []
        assert len(said(lambda: call(network(), SLOTS[:2]))) == 1


class Pooled(nn.BatchNorm1d):
    """With a forward of its own, which may do the right thing."""

    def forward(self, input: Tensor) -> Tensor:
        return input - fdp.pmean(input.mean(0), weight="rows")


QUIET: dict[str, Callable[[], nn.Module]] = {
    "eval": lambda: network().eval(),
    "frozen": lambda: network(nn.BatchNorm1d(4).eval()),
    "synchronised": lambda: fdp.nn.convert_sync_batchnorm(network()),
    "forward of its own": lambda: network(Pooled(4)),
    "rows by themselves": lambda: network(nn.GroupNorm(2, 4), nn.LayerNorm(4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_warning_where_numbers_are_those_of_one_device(name: str):
    for make in QUIET.values():
        assert said(lambda make=make: CALLS[name](make(), SLOTS)) == []
    for one in ("cpu", ["cpu"]):
        assert said(lambda one=one: CALLS[name](network(), one)) == []
    assert said(lambda: fdp.functional(network())[0](fdp.functional(network())[1], X)) == []


def test_modes_are_those_of_the_call():
    module = network().eval()
    apply, state = fdp.functional(module)
    assert said(lambda: fdp.dp_apply(apply, state, X, SLOTS)) == []
    assert said(lambda: apply(state, X)) == []
    module.train()
    assert said(lambda: fdp.dp_apply(apply, state, X, "cpu")) == []
    assert len(said(lambda: fdp.dp_apply(apply, state, X, SLOTS))) == 1
    without = network(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    assert len(said(lambda: by_dp_apply(without, SLOTS))) == 1


def test_calls_within_calls():
    """The outer one splits the rows."""
    apply, state = fdp.functional(network())
    inner = fdp.shard_map(apply, in_dims=(None, 0))
    assert len(said(lambda: fdp.dp_apply(inner, state, X, SLOTS, out_dims=(0, "mean")))) == 1


@pytest.mark.parametrize("name", CALLS)
def test_it_points_at_the_users_line_for_each_module(name: str):
    """Python shows a line's warning once: if that were a line of fdp, no second module would be heard of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            CALLS[name](network(), SLOTS, executor="sequential")
    assert [each.filename for each in found] == [__file__] * 2


def test_silence_and_errors():
    module = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(BatchNormWarning, match="convert_sync_batchnorm") as caught:
                by_dp_apply(module, SLOTS)
            assert any("in shard 0 of 3" in note for note in caught.value.__notes__)
        warnings.simplefilter("ignore", BatchNormWarning)
        by_dp_apply(module, SLOTS)
