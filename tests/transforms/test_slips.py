"""Slips that everybody makes once: the message says what to write instead, and ends at the user's own line."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.programs import run_program

SLOTS = fdp.virtual_devices(2)
W, X, Y = torch.ones(3), torch.ones(6, 3), torch.ones(6)
ANY: Any = fdp


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ w - y).square().mean()


def replicated() -> Any:
    return fdp.replicate(W, SLOTS)


SLIPS: dict[str, tuple[Callable[[], Any], str]] = {
    "psum outside of a call": (
        lambda: fdp.psum(X),
        r"psum: this code runs in no slot. Call it inside the function that",
    ),
    "an optimizer on a Replicated": (
        lambda: torch.optim.AdamW(replicated()),
        r"of one device: .* fdp.set_grads\(module, grads\)",
    ),
    "a Replicated in an operation": (lambda: torch.sum(replicated()), r"must be Tensor, not Replicated"),
    "a Replicated in a product": (lambda: X @ replicated(), r"unsupported operand .*'Tensor' and 'Replicated'"),
    "a method of a tensor": (lambda: replicated().sum(), r"^'Replicated' object has no attribute 'sum'$"),
    "a key": (lambda: ANY.replicate({"w": W}, SLOTS)["w"], r"by a slot number, not 'w'; x\[i\]\['w'\] is in slot i"),
    "y= without kwargs=": (
        lambda: ANY.dp_apply(loss, W, X, SLOTS, y=Y),
        r"argument 'y'. .* go into kwargs=\{'y': ...\}",
    ),
    "several inputs": (
        lambda: ANY.dp_apply(loss, W, X, Y, SLOTS),
        r"5 were given. Several inputs are a tuple: dp_apply\(fn, params, \(x, y\), devices\)$",
    ),
    "several inputs and devices=": (
        lambda: ANY.dp_apply(loss, W, X, Y, devices=SLOTS),
        r"values for argument 'devices'. Several inputs are a tuple: dp_apply\(fn, params, \(x, y\), devices\)$",
    ),
    "several inputs and no devices": (
        lambda: ANY.dp_apply(loss, W, X, Y),
        r"^dp_apply: several inputs are a tuple: dp_apply\(fn, params, \(x, y\), devices\)$",
    ),
    "several inputs to explain": (
        lambda: ANY.explain(loss, W, X, Y, SLOTS),
        r"5 were given. Several inputs are a tuple: dp_apply\(fn, params, \(x, y\), devices\)$",
    ),
    "unreplicate of results": (
        lambda: fdp.unreplicate(ANY.parallel_apply(torch.neg, replicated())),
        r"expected a Replicated, got Sharded. Of what parallel_apply returned, result\[0\] is that of slot 0$",
    ),
    "explain of a loss that is none": (
        lambda: fdp.explain(fdp.value_and_grad(lambda w, x: x * w, devices=SLOTS), W, X),
        r"^explain: the loss must be a 0-dim tensor, got shape \(3, 3\)",
    ),
    "explain of a loss of other arguments": (
        lambda: fdp.explain(fdp.value_and_grad(loss, argnums=4, devices=SLOTS), W, (X, Y)),
        r"^explain: argnums is 4, but there are 3 positional arguments",
    ),
    "in_axes": (lambda: ANY.value_and_grad(loss, in_axes=0), r"What JAX calls in_axes is in_dims here"),
    "in_axes of grad": (lambda: ANY.grad(loss, in_axes=0), r"What JAX calls in_axes is in_dims here"),
    "mesh": (lambda: ANY.shard_map(loss, mesh=SLOTS), r"What JAX calls mesh is devices here"),
    "in_specs": (lambda: ANY.shard_map(loss, in_specs=0), r"What JAX calls in_specs is in_dims here"),
    "devices second": (lambda: ANY.value_and_grad(loss, SLOTS), r"Devices are given by name: devices=..."),
    "rows that are a list": (
        lambda: fdp.dp_apply(lambda _, xs: xs, None, [torch.ones(n) for n in range(9)], SLOTS),
        r"inputs\[3\] has 3 along dim 0, 5 more. Pass None .* 'items' for a list whose elements are rows",
    ),
    "a GPU that is not here": (
        lambda: fdp.scatter(X, ["cuda:77"]),
        r"not available.* one device: fdp.virtual_devices\(n\)",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_says_what_to_write(slip: str):
    run, message = SLIPS[slip]
    with pytest.raises((TypeError, ValueError, NameError, AttributeError), match=message):
        run()


def notes_of(run: Callable[[], Any]) -> list[str]:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        run()
    return caught.value.__notes__


def test_arguments_in_another_order_are_shown():
    notes = notes_of(lambda: fdp.dp_apply(lambda w, x: x @ w, X, W, SLOTS))
    assert notes[0] == "the function was called with (float32[6, 3], float32[2])"


def test_devices_in_the_call_of_a_transformed_loss():
    notes = notes_of(lambda: ANY.value_and_grad(loss)(W, X, Y, devices=SLOTS))
    assert "devices= is an option of fdp: write value_and_grad(loss, devices=...)(params, x)" in notes


@pytest.mark.parametrize("part", [slice(None), 0])
@pytest.mark.parametrize("devices", ["cpu", SLOTS])
def test_a_write_to_what_is_differentiated(part: Any, devices: Any):
    def writes(w: Tensor, x: Tensor) -> Tensor:
        w[part] = 2.0
        return (x @ w).mean()

    with pytest.raises(RuntimeError, match=r"^value_and_grad: the function writes in place to a tensor that") as caught:
        fdp.value_and_grad(writes, devices=devices)(W.clone(), X)
    assert "leaf Variable" in str(caught.value.__cause__)


# ---- tracebacks


def wrong(w: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    return (x @ w[:2]).mean()  # the mistake


def mapped(executor: Any) -> dict[str, Callable[[], Any]]:
    options: dict[str, Any] = {"devices": SLOTS, "executor": executor}
    return {
        "dp_apply": lambda: fdp.dp_apply(wrong, W, X, **options, out_dims="mean"),
        "shard_map": lambda: fdp.shard_map(wrong, in_dims=(None, 0), out_dims="mean", **options)(W, X),
        "value_and_grad": lambda: fdp.value_and_grad(wrong, **options)(W, X, Y),
        "parallel_apply": lambda: fdp.parallel_apply(wrong, W, fdp.scatter(X, SLOTS), executor=executor),
        "meeting": lambda: fdp.dp_apply(lambda w, x: fdp.psum(x) + wrong(w, x), W, X, **options, out_dims="mean"),
    }


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("name", mapped("auto"))
def test_a_traceback_ends_at_the_line_of_the_user(name: str, executor: str, monkeypatch: pytest.MonkeyPatch):
    run = mapped(executor)[name]

    def lines() -> list[str]:
        try:
            run()
        except RuntimeError as error:
            return "".join(traceback.format_exception(error)).splitlines()
        raise AssertionError("nothing was raised")

    short = lines()
    assert any("# the mistake" in line for line in short[-10:])
    assert not any("/fdp/_" in line for line in short)
    monkeypatch.setenv("FDP_TRACEBACK", "full")
    assert any("/fdp/_" in line for line in lines())


def test_what_led_to_an_error_is_shortened_too():
    def fails(w: Tensor, x: Tensor) -> Tensor:
        try:
            return wrong(w, x)
        except RuntimeError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        fdp.dp_apply(fails, W, X, SLOTS)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "/fdp/_" not in "".join(traceback.format_exception(caught.value))


PROGRAM = """
import fdp, torch
fdp.dp_apply(lambda w, x: x @ w[:2], torch.ones(3), torch.ones(4, 3), fdp.virtual_devices(2))
"""


def test_an_uncaught_error_of_a_program_is_short():
    ended = run_program(PROGRAM)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) < 16  # from 3.14 on two are of `run_program`
    assert "/fdp/_" not in ended.stderr


# ---- a loss of the module itself


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_a_loss_that_calls_the_module_itself(executor: Any):
    """Its gradients are 0, as torch.func's: a loop would train nothing."""
    model = torch.nn.Linear(3, 1)
    apply, (params, buffers) = fdp.functional(model)

    def step(call: Callable[..., Tensor], **options: Any) -> Any:
        return fdp.value_and_grad(lambda p, x: call(p, x).square().mean(), devices=SLOTS, executor=executor, **options)

    module_itself = step(lambda _, x: model(x))
    with pytest.warns(UserWarning, match=r"all gradients are 0. .* calls apply\(\(params, buffers\), x\)") as found:
        _, grads = module_itself(params, X)
    assert [each.filename for each in found] == [__file__]
    assert not any(map(torch.any, grads.values()))
    frozen = model.weight.detach()
    for fine in (lambda p, x: apply((p, buffers), x)[0], lambda _, x: x @ frozen.mT):
        step(fine)(params, X)  # warnings are errors
    step(lambda p, x: model(x) if x.sum() > 0 else model(x) + apply((p, buffers), x)[0])(
        params, torch.cat([X, -X])
    )  # one shard uses them
    step(lambda _, x: model(x), create_graph=True)(params, X)
    step(lambda _, x: model(x))({}, X)  # there are none
    step(lambda _, x: x)(params, X.clone().requires_grad_())
