"""`backward` is the plain loop: values, gradients, buffers, and what comes after."""

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.nn.odd_modules import MODULES, Unregistered, seeded

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::fdp.nn.BatchNormWarning"),
]

X, Y = numbers(9, 3), numbers(9, 2)
each_count = pytest.mark.parametrize("count", [1, 2, 3])


def mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def with_statistics() -> nn.Module:
    return fdp.nn.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def partly_frozen() -> nn.Module:
    model: Any = mlp()
    model[0].requires_grad_(False)
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Rebinding(nn.Module):
    """Its buffer is a new tensor after each forward, a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0) if len(x) == len(X) else fdp.psum(x.sum(0))
        self.mean = 0.5 * self.mean + 0.5 * total / len(X)
        return self.head(x - self.mean)


def hooked() -> nn.Module:
    model: Any = mlp()
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    model[2].register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))
    return model


def in_place() -> nn.Module:
    model: Any = mlp()
    model.register_forward_hook(lambda module, args, out: out * model[0].weight.sum())
    return model


MADE: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "statistics of all rows": with_statistics,
    "partly frozen": partly_frozen,
    "unused parameters": Unused,
    "checkpoint": Checkpointed,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
    "shared": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2, nn.Linear(3, 2)),
    "hooks": hooked,
    "rebinding": Rebinding,
    "in place": in_place,
}


def states(model: nn.Module) -> Any:
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads, {name: b.clone() for name, b in model.named_buffers()}


def assert_same_states(ours: Any, theirs: Any, exact: bool) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert list(a) == list(b)
        for name in a:
            assert (a[name] is None) == (b[name] is None), name
            if a[name] is not None:
                tight: Any = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-12}
                torch.testing.assert_close(a[name], b[name], **tight)


@pytest.mark.filterwarnings("ignore:Calls of this Sequential:UserWarning")
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@each_count
def test_it_is_the_plain_loop(make: Callable[[], nn.Module], count: int):
    """Two calls before each step: gradients are added. On one slot to the bit."""
    model = seeded(make)
    one = copy.deepcopy(model)
    one = seeded(make) if make in (in_place, hooked) else one
    one.load_state_dict(model.state_dict())
    step = fdp.backward(model, mse, devices=fdp.virtual_devices(count))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for each in (model, one)]
    for k in (1, 2):
        [optimizer.zero_grad() for optimizer in optimizers]
        for factor in (k, k + 1):
            value, want = step(factor * X, Y), mse(one, factor * X, Y)
            want.backward()
            assert not value.requires_grad
            torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=0 if count == 1 else 1e-12)
            assert_same_states(states(model), states(one), exact=count == 1 and make is not Rebinding)
        [optimizer.step() for optimizer in optimizers]
    assert_close_tree(dict(model.state_dict()), dict(one.state_dict()))


@pytest.mark.filterwarnings("ignore:Calls of this:UserWarning")
@pytest.mark.parametrize(("make", "args"), [rest[:2] for _, *rest in MODULES], ids=[name for name, *_ in MODULES])
def test_odd_modules(make: Any, args: Any):
    model, one, inputs = seeded(make), seeded(make), args()

    def loss(model: Any, *inputs: Tensor) -> Tensor:
        out = model(*inputs)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    if not list(model.parameters()) or isinstance(model, Unregistered):
        with pytest.raises(ValueError, match=r"no parameter requires a gradient|are no parameters of the module"):
            fdp.backward(model, loss, devices="cpu")(*inputs)
        return
    value = fdp.backward(model, loss, devices="cpu")(*inputs)
    want = loss(one, *inputs)
    want.backward()
    torch.testing.assert_close(value, want.detach())
    assert_same_states(states(model), states(one), exact=False)


def test_options_are_those_of_value_and_grad():
    model, weights = mlp(), torch.linspace(1, 2, 9)

    def loss(model: Any, x: Tensor, y: Tensor, *, w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        each = (model(x) - y).square().mean(1) * w
        return scale * each.sum() / w.sum(), each

    one = copy.deepcopy(model)
    want, each = loss(one, X, Y, w=weights, scale=3.0)
    want.backward()
    several: list[Any] = [{}, {"microbatches": 2}, {"weights": [2, 1]}, {"in_dims": (0, 0)}, {"in_dims": 0}]
    several.append({"executor": "threads"})
    for options in several:
        model.zero_grad()
        step = fdp.backward(
            model,
            loss,
            devices=fdp.virtual_devices(2),
            has_aux=True,
            aux_dims=0,
            count=lambda x, y, *, w, scale: w.sum(),
            kwarg_dims={"w": 0, "scale": None},
            **options,
        )
        value, aux = step(X, Y, w=weights, scale=3.0)
        assert_close_tree(((value, aux), states(model)), ((want.detach(), each.detach()), states(one)))
    summed = fdp.backward(
        model, lambda m, x, y: (m(x) - y).square().sum(), devices=fdp.virtual_devices(2), reduction="sum"
    )
    torch.testing.assert_close(summed(X, Y), (one(X) - Y).square().sum().detach())


def test_rows_draw_what_they_draw_on_one_device():
    def masked(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, F.dropout(x, 0.5), y)

    found = []
    for count in (1, 3):
        model = seeded(mlp)
        step = fdp.backward(model, masked, devices=fdp.virtual_devices(count), seed=4, randomness="rows")
        found.append((step(X, Y), states(model)))
    assert_close_tree(*found)


@each_count
def test_a_batch_of_a_loader_is_a_list(count: int):
    model = mlp()
    one = copy.deepcopy(model)
    step = fdp.backward(model, lambda model, batch: mse(model, *batch), devices=fdp.virtual_devices(count))
    mse(one, X, Y).backward()
    step([X, Y])
    assert_same_states(states(model), states(one), exact=False)


def test_loss_has_a_real_module():
    class Model(nn.Linear):
        kind = "model"

        def twice(self, x: Tensor) -> Tensor:
            return 2 * self(x)

    def loss(model: Any, x: Tensor) -> Tensor:
        assert isinstance(model, Model)
        assert model is not outer
        assert (model.kind, model.note, model.training) == ("model", "set", False)
        assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
        return model.twice(x).mean() + model.weight.square().sum()

    outer = Model(3, 2)
    step = fdp.backward(outer, loss, devices=fdp.virtual_devices(2))
    outer.note = "set"  # pyright: ignore[reportArgumentType]
    outer.eval()
    one = copy.deepcopy(outer)
    (one.twice(X).mean() + one.weight.square().sum()).backward()
    step(X)
    assert_same_states(states(outer), states(one), exact=False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "loaded": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True),
    "another dtype": lambda model: model.float(),
    "frozen": lambda model: model[0].requires_grad_(False),
    "another layer": lambda model: model.append(nn.Linear(2, 2).to(model[0].weight.dtype)),
    "eval": lambda model: model.eval(),
    "hook": lambda model: model[1].register_forward_hook(lambda module, args, out: 3 * out),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen_by_the_next_call(change: Callable[[Any], Any]):
    model: Any = mlp()
    step = fdp.backward(model, mse, devices=fdp.virtual_devices(2))
    step(X, Y)
    model.zero_grad()
    change(model)
    one, dtype = copy.deepcopy(model), model[0].weight.dtype
    mse(one, X.to(dtype), Y.to(dtype)).backward()
    step(X.to(dtype), Y.to(dtype))
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_hooks_of_parameters_run_once_a_call():
    found: list[list[Tensor]] = []
    for count in (0, 1, 3):
        model: Any = seeded(mlp)
        seen = [torch.zeros(())]
        model[0].weight.register_hook(lambda grad: 2 * grad)
        model[0].weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.sum()))
        for _ in range(2):
            mse(model, X, Y).backward() if count == 0 else fdp.backward(model, mse, devices=fdp.virtual_devices(count))(
                X, Y
            )
        found.append([*seen, model[0].weight.grad])
    assert_close_tree(found[1], found[0])
    assert_close_tree(found[2], found[0])


def test_a_scaled_loss():
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = copy.deepcopy(model)
    other = torch.optim.SGD(one.parameters(), lr=0.1)
    value = fdp.backward(model, lambda *args: scaler.scale(mse(*args)), devices=fdp.virtual_devices(2))(X, Y)
    mse(one, X, Y).backward()
    torch.testing.assert_close(value, 8 * mse(one, X, Y).detach())
    scaler.step(optimizer)
    other.step()
    assert_close_tree(dict(model.state_dict()), dict(one.state_dict()))


def test_two_modules_and_two_optimizers():
    both = nn.ModuleDict({"maker": nn.Linear(3, 2), "judge": nn.Linear(2, 1)})
    one = copy.deepcopy(both)

    def judged(models: Any, noise: Tensor, real: Tensor) -> Tensor:
        made = models["maker"](noise).detach()
        return models["judge"](made).mean() - models["judge"](real).mean()

    def fooled(models: Any, noise: Tensor) -> Tensor:
        return -models["judge"](models["maker"](noise)).mean()

    steps = [fdp.backward(both, loss, devices=fdp.virtual_devices(2)) for loss in (judged, fooled)]
    steps[0](X, Y)
    assert both["maker"].weight.grad is None
    steps[1](X)
    judged(one, X, Y).backward()
    fooled(one, X).backward()
    assert_same_states(states(both), states(one), exact=False)


def test_a_failure_leaves_gradients_and_buffers():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    calls = itertools.count()

    def fails(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = mse(model, x, y)
        if next(calls) == 1:
            raise ArithmeticError("in the second slot")
        return value

    mse(model, X, Y).backward()
    before = states(model)
    with pytest.raises(ArithmeticError, match="in the second slot"):
        fdp.backward(model, fails, devices=fdp.virtual_devices(2))(X, Y)
    assert_same_states(states(model), before, exact=True)


def test_gradients_are_the_parameters_own():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.a + self.b) * x).mean()

    model = Sum()
    fdp.backward(model, lambda model, x: model(x), devices="cpu")(X)
    assert model.a.grad is not None
    model.a.grad.zero_()
    assert model.b.grad is not None
    assert model.b.grad.any()


def frozen() -> Any:
    model: Any = mlp()
    model[2].requires_grad_(False)
    return model


class Counting(nn.Linear):
    """Counts rows in a buffer, and keeps a loss in a list."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("rows", torch.tensor(0))
        self.losses: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        self.rows += len(input)
        out = super().forward(input)
        self.losses.append(out.square().mean())
        return out


@each_count
def test_a_list_that_forward_fills_is_the_slots_own(count: int):
    model = Counting()
    one, step = (
        copy.deepcopy(model),
        fdp.backward(model, lambda m, x: m(x).mean() + sum(m.losses), devices=fdp.virtual_devices(count)),
    )
    x = X[:6]
    for _ in range(2):
        one.losses.clear()
        (one(x).mean() + sum(one.losses)).backward()
        step(x)
    torch.testing.assert_close(model.weight.grad, one.weight.grad)
    assert model.losses == []


def test_an_old_backward_hook():
    model: Any = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0].register_backward_hook(
            lambda module, inner, outer: tuple(2 * x if x is not None else x for x in inner)
        )
        one = copy.deepcopy(model)
        fdp.backward(model, mse, devices=fdp.virtual_devices(2))(X, Y)
        mse(one, X, Y).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


wrongly: Any = fdp.backward
OUTSIDE = nn.Parameter(torch.ones(()))
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: wrongly(nn.Linear, mse), TypeError, "backward: expected a torch.nn.Module, got the class"),
    "no function": (lambda: wrongly(mlp(), 3), TypeError, "backward: "),
    "positional devices": (lambda: wrongly(mlp(), mse, ["cpu"]), TypeError, "positional"),
    "all frozen": (
        lambda: fdp.backward(mlp().requires_grad_(False), mse, devices="cpu")(X, Y),
        ValueError,
        r"backward: no parameter requires a gradient\. Call Sequential\.requires_grad_\(\)",
    ),
    "another parameter": (
        lambda: fdp.backward(mlp(), lambda m, x, y: mse(m, x, y) * OUTSIDE, devices="cpu")(X, Y),
        ValueError,
        r"backward: the loss depends on tensors that require gradients and are no parameters.*ModuleDict",
    ),
    "an input": (
        lambda: fdp.backward(mlp(), mse, devices="cpu")(X.clone().requires_grad_(), Y),
        UserWarning,
        r"are no parameters of the module: they get none",
    ),
    "no graph": (
        lambda: fdp.backward(mlp(), lambda m, x, y: mse(m, x, y).detach(), devices="cpu")(X, Y),
        ValueError,
        "backward: the loss depends on no parameter",
    ),
    "aux without has_aux": (
        lambda: fdp.backward(mlp(), lambda m, x, y: (mse(m, x, y), x), devices="cpu")(X, Y),
        TypeError,
        "backward: the loss must return the loss alone. To return more pass has_aux=True",
    ),
    "rows without aux_dims": (
        lambda: fdp.backward(mlp(), lambda m, x, y: (mse(m, x, y), x), has_aux=True, devices="cpu")(X, Y),
        ValueError,
        "backward: aux has dims, and aux_dims does not say what they are",
    ),
    "a write to a parameter": (
        lambda: fdp.backward(mlp(), lambda m, x, y: mse(m, x, y) + m[0].weight.mul_(2).sum(), devices="cpu")(X, Y),
        RuntimeError,
        "backward: .*in place",
    ),
    "in_dims for too many": (
        lambda: fdp.backward(mlp(), mse, devices="cpu", in_dims=(0, 0, 0))(X, Y),
        ValueError,
        "backward: in_dims has 3 entries for 2 arguments after the module",
    ),
    "a loss that is a module": (
        lambda: wrongly(mlp(), nn.MSELoss()),
        TypeError,
        r"backward: the loss gets the module: write lambda module, x, y: loss\(module\(x\), y\)",
    ),
    "the module among the arguments": (
        lambda: fdp.backward(model := mlp(), mse, devices="cpu")(model, X, Y),
        TypeError,
        r"backward: .* takes the arguments after the module: step\(x, y\)",
    ),
    "a backward in the loss": (
        lambda: fdp.backward(mlp(), lambda m, x, y: mse(m, x, y).backward() or mse(m, x, y), devices="cpu")(X, Y),
        RuntimeError,
        "backward: the loss has called backward",
    ),
    "a write to a frozen parameter": (
        lambda: fdp.backward(frozen(), lambda m, x, y: mse(m, x, y) + m[2].bias.add_(1).sum(), devices="cpu")(X, Y),
        RuntimeError,
        r"backward: the function wrote in place to kwargs\[.the module's.\]\['frozen'\]\['2.bias'\]",
    ),
    "counts of rows in an integer": (
        lambda: fdp.backward(Counting(), lambda m, x: m(x).mean(), devices=fdp.virtual_devices(2))(X[:7]),
        ValueError,
        r"backward: aux\['buffers'\]\['rows'\] is torch.int64, which has no 'mean', and differs",
    ),
    "uneven rows": (
        lambda: fdp.backward(mlp(), mse, devices=fdp.virtual_devices(2))(X, Y[:8]),
        ValueError,
        r"args\[1\].*args\[2\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_cannot_be(call: Callable[[], Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call()


@each_count
def test_a_gradient_penalty(count: int):
    def penalty(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    model = mlp()
    one = copy.deepcopy(model)
    value = fdp.backward(model, penalty, devices=fdp.virtual_devices(count))(X)
    want = penalty(one, X)
    want.backward()
    torch.testing.assert_close(value, want.detach())
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:Calls of this Sequential:UserWarning")
@pytest.mark.parametrize("make", [mlp, in_place])
def test_parameters_are_parameters(make: Callable[[], nn.Module]):
    def decayed(model: Any, x: Tensor, y: Tensor) -> Tensor:
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        return mse(model, x, y) + sum(p.square().sum() for p in model.parameters() if getattr(p, "decay", False))

    model, one = seeded(make), seeded(make)
    for each in (model, one):
        each[0].weight.decay = True
    fdp.backward(model, decayed, devices=fdp.virtual_devices(2))(X, Y)
    decayed(one, X, Y).backward()
    assert_same_states(states(model), states(one), exact=False)


class Late(nn.Module):
    """Has one buffer that is None at first, one that forward registers, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", None)
        self.register_buffer("once", torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.ones(3) if self.mean is None else 2 * self.mean
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(1))
        torch.as_tensor(self.count).add_(1)
        once, self.once = self.once, None
        x = x if once is None else x * once
        return self.head(x - self.mean) + torch.as_tensor(self.count)


@each_count
def test_buffers_that_come_later(count: int):
    model = Late()
    one = copy.deepcopy(model)
    step = fdp.backward(model, mse, devices=fdp.virtual_devices(count))
    for _ in range(3):
        value, want = step(X, Y), mse(one, X, Y)
        want.backward()
        torch.testing.assert_close(value, want.detach())
    assert_same_states(states(model), states(one), exact=False)


@pytest.mark.filterwarnings("ignore:Calls of this Sequential:UserWarning")
def test_buffers_of_a_module_in_place_may_change():
    model: Any = in_place()
    step = fdp.backward(model, mse, devices="cpu")
    step(X, Y)
    model[0].register_buffer("new", torch.ones(1))
    step(X, Y)
    del model[0].new
    one = seeded(in_place)
    one.load_state_dict(model.state_dict())
    model.zero_grad()
    step(X, Y)
    mse(one, X, Y).backward()
    assert_same_states(states(model), states(one), exact=False)


def test_names_of_keyword_arguments_are_free():
    model = mlp()
    one = copy.deepcopy(model)
    fdp.backward(model, lambda model, x, params, self: mse(model, x, params), devices="cpu")(X, params=Y, self=Y)
    mse(one, X, Y).backward()
    assert_same_states(states(model), states(one), exact=True)


def test_wrong_names_in_kwarg_dims():
    step = fdp.backward(mlp(), mse, devices="cpu", kwarg_dims={"z": 0})
    with pytest.raises(
        ValueError, match=r"^backward: kwarg_dims names \['z'\], but the keyword arguments are \['y'\]$"
    ):
        step(X, y=Y)


def test_a_layer_that_forward_puts_in_goes_with_the_clone():
    class Adding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.added = nn.BatchNorm1d(3, affine=False)
            return super().forward(self.added(input))

    model = Adding(3, 2)
    fdp.backward(model, mse, devices="cpu")(X, Y)
    assert model.weight.grad is not None
    assert not list(model.buffers())
