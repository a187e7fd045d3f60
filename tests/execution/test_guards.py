"""What torch keeps for the whole process, used from shards that run side by side."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp
from torch.nn.utils import parametrizations

import fdp
from tests.common.depth import few
from tests.common.programs import run_program
from tests.execution.side_by_side import X, f, threads

pytestmark = pytest.mark.usefixtures("switching")


# ---------------------------------------------------------------- torch's functional_call


class Rebinding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 2
        return self.fc(x) * self.scale


def scaled(out: Any, module: Any) -> torch.Tensor:
    return out * module.bias.sum()


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[0].register_forward_hook(lambda module, args, out: scaled(out, module))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "tied": tied,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "GRU": lambda: nn.GRU(3, 3, batch_first=True),
    "hook": hooked,
    "buffer": Rebinding,
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
}

CALLS: dict[str, Callable[..., Any]] = {
    "torch.func": torch.func.functional_call,
    "stateless": torch.nn.utils.stateless.functional_call,
    "fdp": fdp.functional_call,
}


@few()
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_call_in_shards(make: Callable[[], nn.Module], call: Callable[..., Any]):
    module = make().double()
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names = [name for name, _ in module.named_parameters()]
    x = X[:, None] if isinstance(module, nn.GRU) else X

    def fn(shift: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # Every shard has parameters of its own: computing with those of another shows.
        params = {name: own[name] + shift + x.flatten(1)[0, 0] for name in names}
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        out = call(module, {**params, **buffers}, (x,))
        return out[0] if isinstance(out, tuple) else out

    shift = torch.zeros((), dtype=torch.float64)
    want = torch.cat([fn(shift, part) for part in x.split(2)])
    for _ in range(25):
        torch.testing.assert_close(threads(fn, shift, x), want)
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("wrong", [{"strict": True}, {"tie_weights": False}])
def test_options_reach_functional_call(wrong: Any):
    module = tied().double()
    weight = torch.zeros(3, 3, dtype=torch.float64)

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"0.weight": w}, (x,), **wrong)

    def outcome(call: Callable[[], torch.Tensor]) -> Any:
        try:
            return call().tolist()
        except RuntimeError as error:
            return str(error)

    assert outcome(lambda: threads(fn, weight, X)) == outcome(lambda: fn(weight, X))


def test_outside_of_shards_functional_call_is_torchs_own():
    class Written(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.seen = id(self)
            return super().forward(input)

    threads(torch.mul, X[0], X)  # from now on the guard is there
    module = Written(3, 3).double()
    torch.func.functional_call(module, dict(module.named_parameters()), (X,))
    assert module.seen == id(module)


# ---------------------------------------------------------------- forward mode


def dual(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(w, torch.ones_like(w)), x)
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    return tangent


FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "jvp": lambda w, x: jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1],
    "jvp of jvp": lambda w, x: jvp(
        lambda v: jvp(lambda w: f(w, x), (v,), (torch.ones_like(w),))[1], (w,), (torch.ones_like(w),)
    )[1],
    "jacfwd": lambda w, x: jacfwd(lambda w: f(w, x))(w),
    "hessian": lambda w, x: hessian(lambda w: f(w, x))(w),
    "grad of jvp": lambda w, x: grad(lambda v: jvp(lambda w: f(w, x).sum(), (v,), (v,))[1])(w) * x,
    "dual level": dual,
}


@pytest.mark.parametrize("fn", FORWARD.values(), ids=FORWARD)
def test_forward_mode_in_shards_is_refused(fn: Callable[..., torch.Tensor]):
    w = torch.tensor([0.3, -0.5, 0.7], dtype=torch.float64)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"executor='threads': the function calls .*forward mode.*'sequential'"):
            threads(fn, w, X)
        assert forward_ad._current_level == -1
        assert eager_transforms.JVP_NESTING == 0
    found = fdp.dp_apply(fn, w, X, fdp.virtual_devices(4))
    torch.testing.assert_close(found, torch.cat([fn(w, part) for part in X.split(2)]))


def test_a_float_count_is_refused_in_forward_mode():
    def count(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(len(x)))

    loss = fdp.value_and_grad(lambda w, x: f(w, x).mean(), devices=fdp.virtual_devices(2), count=count)
    loss(X[0], X)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="count"):
        loss(X[0], X)


def test_forward_mode_may_wait_for_a_thread_that_uses_it():
    threads(torch.mul, X[0], X)

    def waits(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: jvp(torch.sin, (X[0],), (X[0],)), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        return x

    jvp(waits, (X[0],), (X[0],))


def test_guards_that_come_while_forward_mode_is_on():
    program = """
import torch, fdp, threading
from torch.autograd import forward_ad
x = torch.arange(4.0)
def call():
    return fdp.dp_apply(torch.mul, torch.tensor(2.0), x, fdp.virtual_devices(2), executor="threads")
with forward_ad.dual_level():
    dual = forward_ad.make_dual(x, torch.ones(4))
    thread = threading.Thread(target=call)  # installs the guards
    thread.start(); thread.join()
    tangent = forward_ad.unpack_dual(call() * dual).tangent
print(tangent.tolist(), forward_ad._current_level, torch.func.jvp(torch.sin, (x,), (x,))[1].shape)
"""
    result = run_program(program)
    assert result.stdout == "[0.0, 2.0, 4.0, 6.0] -1 torch.Size([4])\n", result.stderr
