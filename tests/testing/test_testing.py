"""The helpers for tests: functions that are right pass, wrong ones fail and are told why, slots fail when asked to."""

import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fdp
from fdp.testing import assert_data_parallel, fail_slot
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Point
from tests.common.numbers import numbers
from tests.common.threads import many_cores

W = {"fc": {"weight": numbers(3, 2), "bias": numbers(2)}}
X = numbers(7, 3)
Y = torch.tensor([0, 1, 1, 0, 1, 0, 0])
PADDED = torch.tensor([-100, -100, 1, 0, 1, 0, 0])
EXECUTORS: Any = ("sequential", "threads")
SLOTS = fdp.virtual_devices(3)


def predict(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["fc"]["weight"] + params["fc"]["bias"])


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(predict(params, x), y)


def valid(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y != -100).sum()


def model(*layers: nn.Module) -> tuple[Any, Any]:
    return fdp.functional(nn.Sequential(*layers).double())


# ---- right functions


def returns_a_tree(params: Any, batch: Batch) -> Any:
    out = predict(params, batch.x)
    mean = out.mean()
    return {"out": (out, None), "text": "same", "mean": mean, "all": [mean], "point": Point(out.sum(), batch.y)}


def with_keywords(params: Any, x: torch.Tensor, scale: float, *, mask: torch.Tensor, bias: torch.Tensor) -> Any:
    return (predict(params, x) * scale + bias) * mask.T[:, :1]


def of_items(params: Any, batch: Any) -> Any:
    return {"sums": [image.sum() * params for image in batch["images"]], "rows": batch["x"] * params}


def with_aux(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = predict(params, x)
    return F.cross_entropy(out, y), {"right": (out.argmax(1) == y).double().mean(), "out": out, "none": None}


def with_buffers(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    out, new = EVALUATED[0]((params, buffers), x)
    return F.cross_entropy(out, y), new


def clipped(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Per-sample gradients inside."""
    grads = torch.func.vmap(torch.func.grad(lambda p, x: predict(p, x).sum()), in_dims=(None, 0))(params, x)
    return grads["fc"]["weight"].clamp(-0.1, 0.1).sum(0)


EVALUATED = model(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
IMAGES = {"images": [numbers(i + 1, 2) for i in range(7)], "x": X}
RIGHT: dict[str, tuple[Any, ...]] = {
    "row-wise": (predict, W, X),
    "arguments": (
        with_keywords,
        W,
        (X, 2.0),
        {"kwargs": {"mask": numbers(2, 7), "bias": numbers(2)}, "kwarg_dims": {"mask": 1, "bias": None}},
    ),
    "in-dims-dict": (
        lambda w, x: x["a"].T @ w["fc"]["weight"] + x["b"],
        W,
        {"a": numbers(3, 7), "b": numbers(2)},
        {"in_dims": {"a": -1, "b": None}},
    ),
    "tree": (
        returns_a_tree,
        W,
        Batch(X, Y),
        {"out_dims": {"out": 0, "text": 0, "mean": "mean", "all": ["list"], "point": Point("sum", 0)}},
    ),
    "items": (
        of_items,
        torch.tensor(2.0),
        IMAGES,
        {"in_dims": {"images": "items", "x": 0}, "out_dims": {"sums": "items", "rows": 0}},
    ),
    "out-dim-1": (lambda w, x: predict(w, x).T, W, X, {"out_dims": 1}),
    "none": (lambda w, x: None, W, X),
    "integers": (lambda w, x: (x > 0, Y.sum()), W, X, {"out_dims": (0, None)}),
    "not-differentiable": (lambda w, x: torch.from_numpy((x @ w).numpy()), W["fc"]["weight"], X),
    "no-params": (lambda _, x: Output(logits=x), None, X),
    "complex": (lambda w, x: (x * w).abs(), numbers(3, dtype=torch.complex128), numbers(5, 3, dtype=torch.complex128)),
    "per-sample": (clipped, W, X, {"out_dims": "sum"}),
    "float32": (predict, {"fc": {"weight": numbers(3, 2).float(), "bias": numbers(2).float()}}, X.float()),
    "converted": (
        loss,
        {"fc": {"weight": numbers(3, 2).half(), "bias": numbers(2).half()}},
        (X.half(), Y),
        {"dtype": torch.float64},
    ),
    "functional": (*EVALUATED, X),
    "gradient": (torch.func.grad(loss), W, (X, Y), {"out_dims": "mean"}),
    "mean": (loss, W, (X, Y)),
    "mean-uneven": (loss, W, (X, Y), {"weights": (1, 4, 0, 2)}),
    "sum": (lambda *args: loss(*args) * len(args[1]), W, (X, Y), {"reduction": "sum"}),
    "count": (loss, W, (X, PADDED), {"count": valid}),
    "aux": (with_aux, W, (X, Y), {"has_aux": True, "aux_dims": {"right": "mean", "out": 0, "none": 0}}),
    "buffers": (
        with_buffers,
        EVALUATED[1][0],
        (EVALUATED[1][1], X, Y),
        {"has_aux": True, "aux_dims": "mean", "in_dims": (None, 0, 0)},
    ),
    "few-rows": (loss, W, (X[:2], Y[:2])),
    "many-slots": (predict, W, X, {"slots": range(1, 9)}),
}


@pytest.mark.parametrize(("fn", "params", "inputs", "options"), [(*c, {})[:4] for c in RIGHT.values()], ids=RIGHT)
def test_right_functions_pass(fn: Any, params: Any, inputs: Any, options: Any):
    with unharmed(params, inputs):
        assert assert_data_parallel(fn, params, inputs, **options) is None


def test_every_run_gets_copies_and_the_caller_is_left_alone():
    seen = set()

    def fn(w: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.update((x.data_ptr(), w["fc"]["bias"].data_ptr()))
        assert not x.is_inference()
        return predict(w, torch.rand(()) * 0 + x)

    before = torch.get_rng_state()
    with torch.inference_mode():
        inference = X + 0
        assert_data_parallel(fn, W, (inference, Y))
    with torch.no_grad():
        assert_data_parallel(fn, W, (X, Y), slots=(2,), executors=("sequential",))
    assert torch.equal(before, torch.get_rng_state())
    assert seen.isdisjoint({inference.data_ptr(), X.data_ptr(), W["fc"]["bias"].data_ptr()})
    assert inference.is_inference()
    assert_same_tree(inference.clone(), X)


def test_each_number_of_slots_and_executor_is_tried():
    seen: list[int] = []
    assert_data_parallel(
        lambda w, x: seen.append(len(x)) or predict(w, x), W, X, slots=(3,), weights=(5, 1, 1), executors=EXECUTORS
    )
    before = 5 * [7]  # plain, on one slot, to see what can be differentiated in, and twice to compare
    runs = before + 2 * [7, 5, 1, 1]
    assert sorted(seen) == sorted(runs)


# ---- wrong functions


class DividesByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = len(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2 / ctx.rows


def seeds_itself(w: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return predict(w, x) + torch.rand(len(x), 1)


def joined(**parts: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda w, x: {name: part(predict(w, x)) for name, part in parts.items()}


def contrastive(w: Any, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(predict(w, x) @ predict(w, x).T, torch.arange(len(x)))


def writes(write: Callable[[Any], Any], tensor: Callable[[Any, Any], torch.Tensor]) -> Callable[..., Any]:
    def fn(w: Any, batch: Any) -> torch.Tensor:
        out = predict(w, batch["x"]).clone()
        write(tensor(w, batch))
        return out

    return fn


PROJECTED = {"w": numbers(3, 2), "unused": numbers(1)}
NORMALISING = model(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
ROW_OF_EACH = numbers(7, 2)
BATCH = ({"x": X, "n": Y, "a": numbers(3)}, {"in_dims": {"x": 0, "n": 0, "a": None}})
MEET, UNKNOWN = "rows that see each other", "No usual cause fits: look for what depends on how many rows"
WRONG: dict[str, tuple[Any, ...]] = {
    # what differs, why, the function, its arguments
    "named-grads": (r"out\['grads'\] differs", MEET, lambda w, x: {"grads": x.softmax(0)}, W, X),
    "softmax": (r"out differs on 2 slots, executor 'sequential'.* all 7 rows", MEET, lambda w, x: x.softmax(0), W, X),
    "cumsum": ("out differs", MEET, lambda w, x: x.cumsum(0), W, X),
    "reverse-cumsum": ("out differs", MEET, lambda w, x: x.flip(0).cumsum(0).flip(0), W, X),
    "batch-norm": (r"out\[0\] differs .*more too, from out\[1\]\['1.running_var'\]", MEET, *NORMALISING, X),
    "position": ("out differs", UNKNOWN, lambda w, x: predict(w, x) + torch.arange(len(x))[:, None], W, X),
    "number": (r"out\['a'\] differs", UNKNOWN, joined(b=torch.exp, a=lambda out: out / len(out)), W, X),
    "number-of-rows": (r"ValueError: dp_apply: out\['a'\] differs", "not made row by row", joined(a=len), W, X),
    "pairs": (r"ValueError: dp_apply: out has shapes \(4, 4\), \(3, 3\)", "row by row", lambda w, x: x @ x.T, W, X),
    "pairs-even": (
        r"it is float64\[8, 4\], where one device has float64\[8, 8\]",
        MEET,
        lambda w, x: x @ x.T,
        W,
        numbers(8, 3),
    ),
    "list-of-rows": (
        "out differs .* it is a list of 4, where one device has a list of 8",
        "items",
        lambda w, x: [*x],
        W,
        numbers(8, 3),
    ),
    "fixed-size": (r"RuntimeError: shape '\[7, 3\]'.*in shard 0 of 2", "a fixed b", lambda w, x: x.view(7, 3), W, X),
    "closed-over": ("RuntimeError: The size", "every slot gets whole", lambda w, x: predict(w, x) * ROW_OF_EACH, W, X),
    "one-result": (
        r"it is float64\[6\], where one device has float64\[3\]",
        "'sum' gives it right",
        lambda w, x: x.sum(0),
        W,
        X,
    ),
    "rows-as-mean": (r"float64\[4, 2\]", "0 gives it right", predict, W, numbers(8, 3), {"out_dims": "mean"}),
    "sum-as-mean": (r"out\['s'\]", "'sum' gives it right", joined(s=torch.sum), W, X, {"out_dims": "mean"}),
    "mean-as-sum": (r"out\['s'\]", "'mean' gives it right", joined(s=torch.mean), W, X, {"out_dims": {"s": "sum"}}),
    "slot-0": (r"out\['m'\]", "'max' gives it right", joined(m=torch.amax), W, X, {"out_dims": {"m": None}}),
    "std": (r"out\['s'\]", UNKNOWN, joined(s=torch.std), W, X, {"out_dims": "mean"}),
    "dropout": ("out differs between two calls", "random numbers", lambda w, x: F.dropout(x), W, X),
    "python-random": (r"out differs between two", "random numbers", lambda w, x: x * random.random(), W, X),
    "random-structure": (
        "out differs between two calls",
        "random numbers",
        lambda w, x, calls=[]: calls.append(x) or [*calls],
        W,
        X,
    ),
    "seeds-itself": ("out differs on 2", UNKNOWN, seeds_itself, W, X),
    "backward": (
        r"grads\['w'\] differs on 2 slots.*more too, from grads of inputs",
        "The values agree and the gradients do not: look for a backward",
        lambda p, x: DividesByRows.apply(x @ p["w"]),
        PROJECTED,
        numbers(8, 3),
    ),
    "second-order": (
        r"grads\['fc'\]\['bias'\] differs",
        "a backward that uses",
        torch.func.grad(
            lambda p, x: predict(p, x).mean() + len(x) * (p["fc"]["bias"] - p["fc"]["bias"].detach()).sum() ** 2
        ),
        W,
        X,
        {"out_dims": "mean"},
    ),
    "loss-sum": ("loss differs on 2 slots", "Pass reduction='sum'", lambda *a: loss(*a) * len(a[1]), W, (X, Y)),
    "loss-mean": ("loss differs", "leave out reduction= and count=", loss, W, (X, Y), {"reduction": "sum"}),
    "loss-no-count": ("loss differs", "4 and 3 rows have shares of 0.4 and 0.6.*pass a count=", loss, W, (X, PADDED)),
    "loss-wrong-count": (
        "loss differs",
        "pass a count= that returns how many",
        loss,
        W,
        (X, PADDED),
        {"count": lambda _, x, y: (y == 1).sum()},
    ),
    "loss-count": (
        "loss differs",
        "leave out reduction= and count=",
        loss,
        W,
        (X, Y),
        {"count": lambda _, x, y: (y == 1).sum()},
    ),
    "loss-all-padding": (
        "loss differs on 2 slots.*but got nan",
        "a mean over nothing.*count=",
        loss,
        W,
        (X, torch.where(torch.arange(7) < 4, -100, Y)),
    ),
    "loss-root": (
        "loss differs",
        "a root of a mean",
        lambda w, x: predict(w, x).square().mean().sqrt(),
        W,
        X,
    ),
    "loss-no-params": ("loss differs", UNKNOWN, lambda _, x: x.square().sum().sqrt(), None, X),
    "loss-pairs": ("loss differs", MEET, contrastive, W, X),
    "loss-gradient": (
        r"grads\['w'\] differs",
        "The values agree and the gradients do not",
        lambda p, x: DividesByRows.apply(x @ p["w"]).mean(),
        PROJECTED,
        X,
    ),
    "aux-rows": (
        r"value_and_grad: aux\['out'\] has shapes",
        "joined in another way",
        with_aux,
        W,
        (X, Y),
        {"has_aux": True, "aux_dims": "mean"},
    ),
    "aux-sum": (
        r"aux\['n'\] differs",
        "'sum' gives it right",
        lambda w, x: (predict(w, x).mean(), {"n": predict(w, x).sum()}),
        W,
        X,
        {"has_aux": True},
    ),
    "rounding": (
        "out differs",
        "pass dtype=torch.float64: what agrees there is rounding",
        lambda w, x: (x @ w).sum(0),
        numbers(99, 5).float(),
        numbers(999, 99).float(),
        {"out_dims": "sum", "rtol": 0.0, "atol": 1e-12},
    ),
    "write": (
        r"wrote in place to inputs\['x'\]",
        "x.clone",
        writes(lambda x: x.add_(1), lambda w, b: b["x"]),
        W,
        *BATCH,
    ),
    "write-data": (r"to inputs\['x'\]", "x.clone", writes(lambda x: x.data.add_(1), lambda w, b: b["x"]), W, *BATCH),
    "write-numpy": (
        r"to inputs\['n'\]",
        "x.clone",
        writes(lambda x: x.numpy().fill(3), lambda w, b: b["n"]),
        W,
        *BATCH,
    ),
    "write-view": (
        r"to params\['fc'\]\['bias'\]",
        "x.clone",
        writes(torch.zero_, lambda w, b: w["fc"]["bias"][1:]),
        W,
        *BATCH,
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_functions_fail_and_are_told_why(case: tuple[Any, ...]):
    complete: Any = (*case, {}) if len(case) == 5 else case
    what, why, fn, params, inputs, options = complete
    with (
        unharmed(params, inputs),
        pytest.raises(AssertionError, match=f"(?s)^assert_data_parallel: .*{what}") as caught,
    ):
        assert_data_parallel(fn, params, inputs, **options)
    assert caught.match(why)


def test_writes_on_some_slots_only_are_found():
    def fn(w: Any, x: torch.Tensor) -> torch.Tensor:
        out = predict(w, x)
        if len(x) < 3:
            x.data.zero_()
        return out

    with pytest.raises(AssertionError, match="wrote in place to inputs, on 3 slots, executor 'sequential'"):
        assert_data_parallel(fn, W, X)


def test_one_slot_gives_the_same_bits():
    def fn(w: Any, x: torch.Tensor) -> torch.Tensor:
        is_mapped = any(frame.name == "dp_apply" for frame in traceback.extract_stack())
        return predict(w, x) * (1 + 1e-15 if is_mapped else 1)

    match = r"out differs on 1 slot, executor 'sequential'.*expected the same bits.*or on state"
    with pytest.raises(AssertionError, match=match):
        assert_data_parallel(fn, W, X)


@pytest.mark.parametrize("default", [1.0, None])
def test_what_is_wrong_in_threads_only(default: Any):
    settings = threading.local()
    settings.scale = 2.0

    def fn(w: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)  # long enough for other threads to take their shards
        return predict(w, x) * getattr(settings, "scale", default)

    what = (
        "out differs on 4 slots, executor 'threads'" if default else "on 4 slots, executor 'threads', there was a Typ"
    )
    with many_cores(), pytest.raises(AssertionError, match=f"{what}.*one after the other"):
        assert_data_parallel(fn, W, X, slots=(4,))


@pytest.mark.parametrize("error", [ArithmeticError("too few"), AssertionError("too few")], ids=repr)
def test_the_error_of_a_shard_is_the_cause(error: Exception):
    def fn(w: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 7:
            raise error
        return predict(w, x)

    with pytest.raises(AssertionError, match=f"on 2 slots.* there was a {type(error).__name__}: too few") as caught:
        assert_data_parallel(fn, W, X)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "nothing was split: rows in the inputs: 1", {"inputs": X[:1]}),
        (ValueError, "in_dims splits none of the inputs", {"in_dims": None}),
        (ValueError, r"rows differ: inputs\[0\] has 7 along dim 0, inputs\[1\] has 6", {"inputs": (X, X[:6])}),
        (ValueError, r"dp_apply: out\['s'\] is a 0-dim tensor", {"fn": joined(s=torch.sum)}),
        (TypeError, "expected a function of .*got the nn.Module Linear", {"fn": nn.Linear(3, 2)}),
        (TypeError, "expected plain trees", {"inputs": fdp.scatter(X, SLOTS)}),
        (TypeError, "expected plain trees", {"params": fdp.replicate(W, SLOTS)}),
        (TypeError, r"the function must return \(loss, aux\)", {"has_aux": True}),
        (
            ValueError,
            r"aux has dims, and aux_dims does not say what they are: aux\['out'\] of shape \(7, 2\)\.",
            {"fn": with_aux, "inputs": (X, Y), "has_aux": True},
        ),
        (ValueError, "the loss must be a 0-dim tensor", {"reduction": "mean"}),
        (TypeError, r"args\[0\]\['n'\]", {"fn": lambda p, x: p["w"].sum(), "params": {"w": X, "n": 3}}),
        (ValueError, "out_dims is for dp_apply", {"reduction": "mean", "out_dims": 0}),
        (ValueError, "no executor 'fast'", {"executors": ("fast",)}),
        (ValueError, "no executor 't'", {"executors": "threads"}),
        (ValueError, "slots must be a sequence of positive", {"slots": 4}),
        (ValueError, "slots must be a sequence of positive", {"slots": (0, 1)}),
        (ValueError, "slots must be a sequence of positive", {"slots": ()}),
        (ValueError, "2 weights for up to 4 slots", {"weights": (1, 2)}),
        (ValueError, "4 weights for up to 5 slots", {"weights": (1, 2, 1, 1), "devices": ["cpu"] * 5}),
        (ValueError, "assert_data_parallel: 'nowhere' is no device", {"devices": ["nowhere"]}),
        (ValueError, "dtype must be a real floating-point dtype", {"dtype": torch.int64}),
        (ValueError, "both rtol and atol", {"rtol": 0.1}),
        (ArithmeticError, "always", {"fn": lambda w, x: (_ for _ in ()).throw(ArithmeticError("always"))}),
    ],
)
def test_misuse_is_an_error_of_its_own(error: Any, match: str, options: dict[str, Any]):
    with pytest.raises(error, match=match):
        assert_data_parallel(**({"fn": predict, "params": W, "inputs": X} | options))


# ---- slots that fail


def step(w: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return fdp.dp_apply(lambda w, x: w * x, w, x, SLOTS, **options)


TWO = torch.tensor(2.0)
THREE = torch.arange(3.0)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_slot_fails_inside_the_context_only(slot: int, executor: Any):
    with fail_slot(slot) as fault:
        with pytest.raises(RuntimeError, match=f"slot {slot} failed because of fdp.testing.fail_slot") as caught:
            step(TWO, THREE, executor=executor)
        assert caught.value.__notes__ == [f"in shard {slot} of 3, rows {slot}:{slot + 1}, on cpu"]
        assert fault.fired == 1
    assert_same_tree(step(TWO, THREE, executor=executor), 2 * THREE)
    assert repr(fault) == "Fault(fired=1)"


CALLS: dict[str, Callable[[Any], Any]] = {
    "shard_map": lambda fn: fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0))(TWO, THREE),
    "parallel_apply": lambda fn: fdp.parallel_apply(fn, TWO, fdp.scatter(THREE, SLOTS)),
    "value_and_grad": lambda fn: fdp.value_and_grad(lambda w, x: fn(w, x).sum(), devices=SLOTS)(TWO, THREE),
    "under-grad": lambda fn: torch.func.grad(lambda w: fdp.dp_apply(fn, w, THREE, SLOTS).sum())(TWO),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_mapped_call_is_reached(call: Callable[[Any], Any], when: Any):
    ran: list[float] = []
    error = ArithmeticError("here")
    with fail_slot(1, error, when=when), pytest.raises(ArithmeticError, match="here") as caught:
        call(lambda w, x: ran.append(1) or w * x)
    assert caught.value is error
    assert len(ran) == (2 if when == "before" else 3)


def test_nested_calls_are_reached_by_axis_name():
    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(lambda w, x: w * x, w, x, fdp.virtual_devices(2), axis_name="inner")

    x = torch.arange(4.0)
    with fail_slot(1, axis_name="inner") as fault, pytest.raises(RuntimeError, match="slot 1 failed") as caught:
        fdp.dp_apply(outer, TWO, x, fdp.virtual_devices(2))
    assert fault.fired == 2
    assert "in shard 1 of 2 of axis 'inner', rows 1:2, on cpu" in caught.value.__notes__
    with fail_slot(1, axis_name="other") as fault:
        assert_same_tree(fdp.dp_apply(outer, TWO, x, fdp.virtual_devices(2)), 2 * x)
    assert fault.fired == 0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_contexts_nest(executor: Any):
    with fail_slot(0, KeyError("zero")) as first, fail_slot(2, OSError) as second:
        with pytest.raises(KeyError, match="zero") as caught:
            step(TWO, THREE, executor=executor)
        assert (first.fired, second.fired) == (1, 1)
        assert "also in shard 2 of 3, rows 2:3, on cpu: OSError: slot 2 failed" in str(caught.value.__notes__)
    assert_same_tree(step(TWO, THREE), 2 * THREE)


def test_a_slot_fails_so_many_times():
    with fail_slot(1, times=2) as fault:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="slot 1 failed"):
                step(TWO, THREE)
        assert_same_tree(step(TWO, THREE), 2 * THREE)
    assert fault.fired == 2


def test_a_slot_that_is_not_there_does_not_fail():
    with fail_slot(3) as fault:
        assert_same_tree(step(TWO, THREE), 2 * THREE)
    assert fault.fired == 0


def test_an_interrupt_comes_through():
    with fail_slot(1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt, match="slot 1"):
        step(TWO, THREE)
    assert_same_tree(step(TWO, THREE), 2 * THREE)


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (ValueError, "slot must be an int, 0 or more, got -1", (-1,), {}),
        (ValueError, "slot must be an int, 0 or more, got True", (True,), {}),
        (ValueError, "slot must be an int, 0 or more, got '1'", ("1",), {}),
        (TypeError, "error must be an exception or a class of exceptions, got 'text'", (1, "text"), {}),
        (TypeError, "error must be an exception or a class of exceptions, got <class 'int'>", (1, int), {}),
        (TypeError, "missing 1 required positional argument: 'text'", (1, TwoArguments), {}),
        (ValueError, "when must be 'before' or 'after', got 'during'", (1,), {"when": "during"}),
    ],
)
def test_bad_arguments_are_refused_at_once(error: Any, match: str, arguments: tuple[Any, ...], options: dict[str, Any]):
    with pytest.raises(error, match=match):
        fail_slot(*arguments, **options)


def test_an_instance_of_any_exception_is_raised_itself():
    error = TwoArguments(3, "here")
    with fail_slot(1, error), pytest.raises(TwoArguments, match="here") as caught:
        step(TWO, THREE)
    assert caught.value is error
