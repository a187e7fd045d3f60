"""torch.compile with fullgraph: what is compiled gives what it gives without, and needs no graph break."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.containers import Batch, KnownToTorch, Output, Point
from tests.common.depth import deep
from tests.common.numbers import numbers
from tests.common.settings import fresh_compiler

SLOTS = fdp.virtual_devices(2)  # tracing takes its time for each
W = numbers(2)
X = numbers(7, 2)
Y = numbers(7) / 2


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="eager")


def predict(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x * w).sum(1)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((predict(w, x) - y) ** 2).mean()


def loss_of_dict(w: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return loss(w, batch["x"], batch["y"])


def loss_of_batch(w: Tensor, batch: Batch) -> Tensor:
    return loss(w, batch.x, batch.y)


def loss_and_aux(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    return loss(w, x, y), {"out": predict(w, x), "mean": x.mean(), "tag": "tag"}


def first_of_items(w: Tensor, items: list[Tensor]) -> list[Tensor]:
    return [w * item for item in items]


dp_apply, shard_map, value_and_grad = fdp.dp_apply, fdp.shard_map, fdp.value_and_grad
AUX: Any = {"has_aux": True, "devices": SLOTS, "aux_dims": {"out": 0, "mean": "mean", "tag": None}}

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    # dp_apply
    "dp_apply": lambda w, x, y: dp_apply(predict, w, x, SLOTS),
    "dp_apply-kwargs": lambda w, x, y: dp_apply(
        lambda w, x, *, y, s: predict(w, x) * y[0] * s,
        w,
        x,
        SLOTS,
        kwargs={"y": y[None], "s": 2.0},
        kwarg_dims={"y": 1},
    ),
    "dp_apply-several": lambda w, x, y: dp_apply(loss, w, (x, y), SLOTS, out_dims="mean"),
    "dp_apply-prefix": lambda w, x, y: dp_apply(
        lambda w, b: {"a": predict(w, b["x"][0]), "l": (b["x"].mean(), b["y"][0])},
        *(w, {"x": x[None], "y": [y, w]}, SLOTS),
        in_dims={"x": 1, "y": [0, None]},
        out_dims={"a": 0, "l": ("mean", 0)},
    ),
    "dp_apply-function-dims": lambda w, x, y: dp_apply(
        lambda w, x: predict(w, x[0]), w, x[None], SLOTS, in_dims=lambda t: 1
    ),
    "dp_apply-attribute": lambda w, x, y: dp_apply(lambda w, x: predict(w, x.T), w, x.T, SLOTS, in_dims=1),
    "dp_apply-dataclass": lambda w, x, y: dp_apply(
        lambda w, b: Batch(predict(w, b.x), b.y.sum(), b.tag), w, Batch(x, y, "tag"), SLOTS, out_dims={"y": "sum"}
    ),
    "dp_apply-namedtuple": lambda w, x, y: dp_apply(lambda w, b: Point(predict(w, b.x), b.y), w, Point(x, y), SLOTS),
    "dp_apply-output": lambda w, x, y: dp_apply(
        lambda w, x, y: Output(loss=loss(w, x, y), logits=predict(w, x)), w, (x, y), SLOTS, out_dims={"loss": "mean"}
    ),
    "dp_apply-registered": lambda w, x, y: dp_apply(
        lambda w, b: KnownToTorch(predict(w, b.left), b.right), w, KnownToTorch(x, y), SLOTS
    ),
    "dp_apply-weights": lambda w, x, y: dp_apply(predict, w, x, ["cpu"] * 3, weights=(1, 0, 5)),
    "dp_apply-zero-rows": lambda w, x, y: dp_apply(predict, w, x[:0], SLOTS),
    "dp_apply-reductions": lambda w, x, y: dp_apply(
        lambda w, x: [x.sum(0), x.amax(0), x.amin(0), x.mean(), x.mean(), torch.tensor(3)],
        *(w, x, SLOTS),
        out_dims=["sum", "max", "min", "stack", "list", "mean"],
    ),
    "dp_apply-items": lambda w, x, y: dp_apply(
        first_of_items, w, [x, x * 2, x[:3]], SLOTS, in_dims="items", out_dims="items"
    ),
    "dp_apply-nested": lambda w, x, y: dp_apply(lambda w, x: dp_apply(predict, w, x, ["cpu"] * 2), w, x, SLOTS),
    # shard_map
    "shard_map": lambda w, x, y: shard_map(loss, devices=SLOTS, in_dims=(None, 0, 0), out_dims="mean")(w, x, y),
    "shard_map-kwargs": lambda w, x, y: shard_map(
        lambda w, *, b: predict(w, b.x), devices=SLOTS, in_dims=None, kwarg_dims={"b": {"y": None}}
    )(w, b=Batch(x, w)),
    # value_and_grad
    "value_and_grad": lambda w, x, y: value_and_grad(loss, devices=SLOTS)(w, x, y),
    "grad_and_value": lambda w, x, y: fdp.grad_and_value(loss, devices=SLOTS)(w, x, y),
    "value_and_grad-aux": lambda w, x, y: value_and_grad(loss_and_aux, **AUX)(w, x, y),
    "value_and_grad-weights": lambda w, x, y: value_and_grad(loss_and_aux, **AUX, weights=(1, 5))(w, x, y),
    "value_and_grad-prefix": lambda w, x, y: value_and_grad(
        loss_of_dict, devices=SLOTS, in_dims=(None, {"x": 0, "y": 0})
    )(w, {"x": x, "y": y}),
    "value_and_grad-dataclass": lambda w, x, y: value_and_grad(loss_of_batch, devices=SLOTS)(w, Batch(x, y)),
    "grad-kwargs": lambda w, x, y: fdp.grad(lambda w, x, *, y: loss(w, x, y), devices=SLOTS)(w, x, y=y),
    "value_and_grad-argnums": lambda w, x, y: value_and_grad(loss, (0, 1), devices=SLOTS, in_dims=(None, 0, 0))(
        w, x, y
    ),
    "value_and_grad-tree": lambda w, x, y: value_and_grad(
        lambda p, x, y: loss(p["w"] + p["b"][0], x, y), devices=SLOTS
    )({"w": w, "b": (w, w * 2), "unused": x}, x, y),
    "value_and_grad-microbatches": lambda w, x, y: value_and_grad(loss_and_aux, **AUX, microbatches=2)(w, x, y),
    "value_and_grad-sum": lambda w, x, y: value_and_grad(
        lambda w, x: predict(w, x).sum(), devices=SLOTS, reduction="sum"
    )(w, x),
    "value_and_grad-count": lambda w, x, y: value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: x.shape[0])(
        w, x, y
    ),
    # placement
    "scatter-gather": lambda w, x, y: fdp.gather(fdp.scatter({"x": x, "y": [y]}, SLOTS)),
    "replicate": lambda w, x, y: fdp.unreplicate(fdp.replicate({"w": w}, SLOTS), slot=1),
    "parallel_apply": lambda w, x, y: list(
        fdp.parallel_apply(lambda w, x: (w, predict(w, x)), w, fdp.scatter(x, SLOTS))[1].shards
    ),
    "sharded": lambda w, x, y: value_and_grad(loss)(fdp.replicate(w, SLOTS), fdp.scatter(x, SLOTS), y)[0],
}


# The others stand beside one with more.
RARE = [
    *("dp_apply", "shard_map", "value_and_grad", "value_and_grad-aux"),
    *(f"dp_apply-{rare}" for rare in ("several", "function-dims", "attribute", "dataclass", "namedtuple", "weights")),
    *(f"dp_apply-{rare}" for rare in ("kwargs", "registered", "items", "nested", "output", "zero-rows")),
    *(f"value_and_grad-{rare}" for rare in ("weights", "prefix", "dataclass", "argnums", "tree", "sum", "count")),
    *("grad_and_value", "grad-kwargs", "shard_map-kwargs", "scatter-gather", "replicate", "sharded"),
]


@pytest.mark.parametrize("name", deep(CALLS, RARE))
def test_compiled_equals_eager(name: str):
    call = CALLS[name]
    want = call(W, X, Y)
    assert_close_tree(compiled(call)(W, X, Y), want, rtol=1e-12)


@pytest.mark.parametrize("name", deep(["dp_apply", "value_and_grad"], ["dp_apply"]))
def test_new_tensors_run_the_same_graph(name: str):
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(CALLS[name], fullgraph=True, backend=backend)
    batches = [(W * i, X * i, Y) for i in range(1, 4)]
    for batch in batches:
        assert_close_tree(step(*batch), CALLS[name](*batch))
    assert len(graphs) == 1


@pytest.mark.deep
def test_sizes_that_are_symbols():
    """Of parameters too: sums of their gradients ask for no bytes."""
    step = torch.compile(CALLS["value_and_grad"], fullgraph=True, backend="eager", dynamic=True)
    assert_close_tree(step(W, X, Y), CALLS["value_and_grad"](W, X, Y), rtol=1e-12)


def test_a_function_that_is_compiled_inside():
    inner = compiled(predict)
    assert_close_tree(dp_apply(inner, W, X, SLOTS), dp_apply(predict, W, X, SLOTS))
    compiled_loss = compiled(loss)
    assert_close_tree(
        value_and_grad(compiled_loss, devices=SLOTS)(W, X, Y), value_and_grad(loss, devices=SLOTS)(W, X, Y)
    )


def test_backward_through_a_compiled_call():
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    got = torch.autograd.grad(compiled(CALLS["dp_apply"])(w, x, Y).pow(2).sum(), (w, x))
    want = torch.autograd.grad(predict(w, x).pow(2).sum(), (w, x))
    assert_close_tree(got, want)


@pytest.mark.deep
def test_transforms_around_and_inside_a_compiled_call():
    want = torch.func.grad(loss)(W, X, Y)
    assert_close_tree(torch.func.grad(compiled(CALLS["dp_apply-several"]))(W, X, Y), want)
    assert_close_tree(compiled(torch.func.grad(CALLS["dp_apply-several"]))(W, X, Y), want)


@pytest.mark.deep
def test_without_grad():
    step = value_and_grad(loss, devices="cpu")
    with torch.no_grad():
        assert_close_tree(compiled(step)(W, X, Y), step(W, X, Y))


# ---- errors


def test_errors_arrive_while_compiling():
    """Inside torch's own error, or as they are."""
    with pytest.raises(Exception, match=r"dp_apply: rows differ: inputs\[0\] has 7 .*inputs\[1\] has 3 "):
        compiled(lambda w, x, y: dp_apply(loss, w, (x, y[:3]), SLOTS))(W, X, Y)
    with pytest.raises(Exception, match="dp_apply: out is a 0-dim tensor"):
        compiled(lambda w, x, y: dp_apply(loss, w, (x, y), SLOTS))(W, X, Y)


def test_an_unavailable_device_is_named_while_compiling():
    with pytest.raises(Exception, match="dp_apply: device 'cuda:99' is not available"):
        compiled(lambda w, x: dp_apply(predict, w, x, "cuda:99"))(W, X)


def test_a_count_that_is_a_tensor_is_refused_while_compiling():
    """Its value is not known yet, and without it nobody can tell whether a shard counts at all."""
    counted = value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: (y > 0).sum())
    with pytest.raises(Exception, match=r"inside torch\.compile count must return a number, not a tensor"):
        compiled(counted)(W, X, Y)


def test_integers_under_mean_are_compared_when_it_runs():
    fn = compiled(lambda x: dp_apply(lambda w, x: x[0].long(), None, x, ["cpu"] * 2, out_dims="mean"))
    assert_same_tree(fn(torch.tensor([1.0, 1.0])), torch.tensor(1))
    with pytest.raises(RuntimeError, match="integers under 'mean' differ between shards"):
        fn(torch.tensor([1.0, 2.0]))


def test_a_seed_is_refused_while_compiling():
    with pytest.raises(Exception, match=r"seed= cannot be used inside torch.compile"):
        compiled(lambda w, x: dp_apply(predict, w, x, SLOTS, seed=0))(W, X)


@pytest.mark.filterwarnings("error")
def test_where_the_compiler_gives_up_it_leaves_fdp_alone():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    apply, state = fdp.functional(Recurrent().double())
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    compiled = torch.compile(lambda state, x: apply(state, x)[0], backend="eager")  # not possible in one graph
    assert_close_tree(compiled(state, x), apply(state, x)[0])


def test_slots_that_are_made_while_compiling():
    devices = fdp.virtual_devices(2)

    def call(x: torch.Tensor) -> torch.Tensor:
        return fdp.gather(fdp.Sharded((x, x + 1), devices, (2, 2), 0))

    x = torch.arange(2.0)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
