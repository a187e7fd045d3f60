"""What torch keeps for the whole process, used from shards that run side by side."""

import contextlib
import contextvars
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fdp
from fdp._execution import patches
from tests.common.threads import side_by_side

X = torch.randn(8, 3, dtype=torch.float64)


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Four lanes that take turns all the time."""
    with side_by_side():
        yield


def threads(fn: Callable[..., Any], params: Any, x: Any) -> Any:
    return fdp.dp_apply(fn, params, x, fdp.virtual_devices(4), executor="threads")


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


def closing() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[1].register_forward_hook(lambda _, args, out: scaled(out, module[0]))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "tied": tied,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "GRU": lambda: nn.GRU(3, 3, batch_first=True),
    "hook": hooked,
    "hook that closes over the module": closing,
    "buffer": Rebinding,
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
}


CALLS: dict[str, Callable[..., Any]] = {
    "torch.func": torch.func.functional_call,
    "stateless": torch.nn.utils.stateless.functional_call,
    "fdp": fdp.functional_call,
}


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


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.outer(w, w)).sin().sum(-1)


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
def test_forward_mode_in_shards(fn: Callable[..., torch.Tensor]):
    w = torch.tensor([0.3, -0.5, 0.7], dtype=torch.float64)
    want = torch.cat([fn(w, part) for part in X.split(2)])
    for _ in range(40):
        torch.testing.assert_close(threads(fn, w, X), want)
    assert forward_ad._current_level == -1
    assert eager_transforms.JVP_NESTING == 0


def test_forward_mode_in_several_callers():
    threads(torch.mul, X[0], X)
    w, wrong = torch.tensor([0.3, -0.5, 0.7], dtype=torch.float64), []
    want = FORWARD["jvp"](w, X)

    def caller(executor: Any) -> None:
        for _ in range(40):
            got = fdp.dp_apply(FORWARD["jvp"], w, X, fdp.virtual_devices(3), executor=executor)
            wrong.extend([] if torch.allclose(got, want) else [got])

    callers = [threading.Thread(target=caller, args=(executor,)) for executor in ("threads",) * 6]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


def test_forward_mode_in_a_shard_elsewhere_does_not_matter_here():
    inside, go = threading.Event(), threading.Event()

    def waiting(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            inside.set()
            assert go.wait(30)
        return w * x

    thread = threading.Thread(target=lambda: threads(waiting, X[0], X))
    thread.start()
    assert inside.wait(30)
    try:
        assert forward_ad._current_level == 0
        assert not patches.is_forward_mode()
        loss = fdp.value_and_grad(
            lambda w, x: f(w, x).mean(), devices=fdp.virtual_devices(2), count=lambda w, x: torch.tensor(float(len(x)))
        )
        loss(X[0], X)  # a float count is refused where forward mode is under way
    finally:
        go.set()
        thread.join()


def test_forward_mode_may_wait_for_a_thread_that_uses_it():
    threads(torch.mul, X[0], X)

    def waits(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: jvp(torch.sin, (X[0],), (X[0],)), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        return x

    jvp(waits, (X[0],), (X[0],))


@pytest.mark.parametrize("name", ["jvp", "hessian"])
def test_forward_mode_that_fails_leaves_nothing(name: str):
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def failing(w: torch.Tensor) -> torch.Tensor:
            raise ValueError("inside")

        return jvp(failing, (w,), (w,))[1] if name == "jvp" else hessian(failing)(w)

    for _ in range(5):
        with pytest.raises(ValueError, match="inside"):
            threads(fn, X[0], X)
    assert forward_ad._current_level == -1
    assert not patches.is_forward_mode()
    torch.testing.assert_close(threads(FORWARD[name], X[0], X), torch.cat([FORWARD[name](X[0], p) for p in X.split(2)]))


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
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "[0.0, 2.0, 4.0, 6.0] -1 torch.Size([4])\n", result.stderr


# ---------------------------------------------------------------- compilation


def test_guarded_functions_still_compile():
    threads(torch.mul, X[0], X)
    module = nn.Linear(3, 3).double()
    params = {name: tensor.detach() * 2 for name, tensor in module.named_parameters()}

    def call(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (x,))

    def tangent(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1]

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(params, X), call(params, X))
    compiled = torch.compile(tangent, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X[0], X), tangent(X[0], X))


@pytest.mark.parametrize("compiler", ["first", "later"])
def test_guarded_random_functions_still_compile_and_script(compiler: str, tmp_path: Path):
    program = """
import sys, warnings, torch, fdp
warnings.simplefilter("ignore")
if sys.argv[1] == "first":
    import torch._dynamo
fdp.dp_apply(torch.mul, torch.ones(2), torch.ones(4, 2), fdp.virtual_devices(2), executor="threads")
def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(2)
def restored(x):
    state = torch.get_rng_state()
    y = torch.rand(2)
    torch.set_rng_state(state)
    return x + y
@torch.jit.script
def scripted(x):
    torch.manual_seed(3)
    return x + torch.rand(2)
x = torch.zeros(2)
want = seeded(x)
print(torch.equal(torch.compile(seeded, backend="eager")(x), want), torch.equal(scripted(x), want))
compiled = torch.compile(restored, backend="eager")
print(torch.equal(compiled(x), compiled(x)), torch.random.manual_seed(3) is torch.default_generator)
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        file = tmp_path / "program.py"  # TorchScript reads the source
        file.write_text(program)
        command = [sys.executable, str(file), compiler]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "True True\nTrue True\n", result.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_shard_that_compiles_runs_alone(backend: str):
    torch._dynamo.reset()
    running, beside, counting = [0], {}, threading.Lock()
    w = torch.randn(3, dtype=torch.float64)

    def noting(graph: Any, inputs: Any) -> Any:
        # The first time for each number of rows: torch checks without a lock whether it must compile anew, and rarely
        # compiles twice.
        beside.setdefault((current[0], inputs[0].requires_grad), running[0])
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    inner, current = torch.compile(f, backend=noting), [0]

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with counting:
            running[0] += 1
            current[0] = len(x)
        try:
            return inner(w, x)
        finally:
            with counting:
                running[0] -= 1

    for rows in (8, 7, 8, 5, 8):
        for _ in range(4):
            torch.testing.assert_close(threads(fn, w, X[:rows]), f(w, X[:rows]))
        got = fdp.grad(lambda w, x: fn(w, x).mean(), devices=fdp.virtual_devices(4), executor="threads")(w, X[:rows])
        torch.testing.assert_close(got, grad(lambda w, x: f(w, x).mean())(w, X[:rows]))
    assert beside
    assert set(beside.values()) == {1}


def test_a_compiled_function_is_mapped():
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="eager")
    for _ in range(5):
        torch.testing.assert_close(threads(compiled, X[0], X), f(X[0], X))
    marked = fdp.thread_safe(compiled)
    torch.testing.assert_close(fdp.dp_apply(marked, X[0], X, fdp.virtual_devices(4)), f(X[0], X))


class NoHash:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return f(w, x)


class NoWeakRef:
    __slots__ = ()

    def __call__(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return f(w, x)


@pytest.mark.parametrize("fn", [NoHash(), NoWeakRef(), NoHash().__call__, functools.partial(f), lambda w, x: f(w, x)])
def test_any_callable_beside_compiled_ones(fn: Any):
    torch.compile(f, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(threads(fn, X[0], X), f(X[0], X))
        torch.testing.assert_close(threads(torch.mul, X[0], X), X[0] * X)  # a function of C


def test_forward_mode_and_modules_called_in_place_do_not_wait_for_each_other():
    class Derivative(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return jvp(lambda x: super(Derivative, self).forward(x).sin(), (input,), (torch.ones_like(input),))[1]

    module = Derivative(3, 3).double()
    module.register_forward_hook(lambda _, args, out: scaled(out, module))  # a clone would not follow
    apply, (params, buffers) = fdp.functional(module)

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def call(x: torch.Tensor) -> torch.Tensor:
            return apply((params, buffers), x)[0]

        # In one half of the shards forward mode comes first, in the other the module.
        return jvp(call, (x,), (x,))[0] if x[0, 0] > 0 else call(x)

    x = torch.arange(24, dtype=torch.float64).reshape(8, 3) * torch.tensor([1.0, 1, -1, -1] * 2)[:, None] + 0.1
    want = torch.cat([fn(X[0], part) for part in x.split(2)])
    for _ in range(50):
        torch.testing.assert_close(threads(fn, X[0], x), want)


# ---------------------------------------------------------------- shards that run again, in order

DROPOUT = nn.Dropout(0.5)


def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda w, x: DROPOUT(w * x), w, x, use_reentrant=False)


def test_a_checkpoint_recomputes_with_the_same_random_numbers():
    def loss(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        DROPOUT(x)  # others draw meanwhile
        out = checkpointed(w, x)
        return out.sum(), out.detach()

    both = fdp.grad(loss, has_aux=True, devices=fdp.virtual_devices(4), executor="threads", reduction="sum", aux_dims=0)
    w = torch.ones(3, dtype=torch.float64)
    for _ in range(20):
        grads, out = both(w, X)
        torch.testing.assert_close(grads, out.sum(0))  # the derivative in w of the sum of mask * w * x, at w = 1


def test_seeding_in_a_shard_is_as_in_order():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(w))
        return torch.rand(len(x), 3)

    for _ in range(20):
        torch.testing.assert_close(threads(fn, torch.tensor(5), X), fdp.dp_apply(fn, torch.tensor(5), X, ["cpu"] * 4))


def test_a_seeded_call_in_a_shard_is_as_in_order():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return fdp.dp_apply(lambda w, x: torch.rand(len(x), 3), w, x, fdp.virtual_devices(2), seed=3)

    for _ in range(20):
        torch.testing.assert_close(threads(fn, X[0], X), fdp.dp_apply(fn, X[0], X, fdp.virtual_devices(4)))


def test_functions_that_had_to_run_again_run_in_order_from_then_on():
    used = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        used.append(threading.get_ident())
        return torch.rand(len(x)) if torch.get_rng_state() is not None else x

    threads(fn, X[0], X)
    used.clear()
    threads(fn, X[0], X)
    assert used == [threading.get_ident()] * 4


@pytest.mark.parametrize("look", [lambda: torch.get_rng_state(), lambda: torch.manual_seed(0)], ids=["get", "seed"])
def test_a_shard_that_looks_at_the_random_state_goes_on_alone(look: Callable[[], Any]):
    """What it did before, with effects or without, it has done once."""
    lock, state, inside, most = threading.Lock(), fdp.replicate(torch.zeros(3), fdp.virtual_devices(4)), 0, 0

    def step(state: torch.Tensor) -> torch.Tensor:
        nonlocal inside, most
        state.add_(1)
        look()
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.01)
        with lock:
            inside -= 1
        return state

    with side_by_side(4):
        for _ in range(2):  # then one after the other from the beginning
            fdp.parallel_apply(step, state, executor="threads")
    assert most == 1
    assert all(shard.tolist() == [2, 2, 2] for shard in state.shards)


def test_shards_that_look_and_shards_that_do_not():
    """Those that look go on when no other runs, and what has ended before is not lost."""
    running, seen, lock = set[int](), [], threading.Lock()

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        number = int(x[0, 0])
        with lock:
            running.add(number)
        time.sleep(0.002)
        if number % 3 == 1:
            torch.get_rng_state()
            with lock:
                seen.append(running - {number} - waiting)
        with lock:
            running.discard(number)
        return x

    waiting = {1, 4, 7, 10}
    x = torch.arange(12.0)[:, None]
    with side_by_side(4):
        assert torch.equal(fdp.dp_apply(fn, X[0], x, fdp.virtual_devices(12), executor="threads"), x)
    assert seen == [set()] * 4


def test_a_shard_of_a_shard_looks_when_no_other_runs():
    inside: set[tuple[int, int]] = set()
    lock, most = threading.Lock(), 0

    def inner(outer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        torch.get_rng_state()
        with lock:
            inside.add((int(outer), int(x[0, 0])))
            most = max(most, len(inside))
        time.sleep(0.002)
        with lock:
            inside.discard((int(outer), int(x[0, 0])))
        return x

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(inner, x[0, 0], x, fdp.virtual_devices(2), executor="threads")

    x = torch.arange(8.0)[:, None]
    with side_by_side(8):
        assert torch.equal(fdp.dp_apply(outer, X[0], x, fdp.virtual_devices(4), executor="threads"), x)
    assert most == 1


@pytest.mark.parametrize("kind", ["dp_apply", "nested", "grad"])
def test_a_call_that_begins_anew_draws_as_in_order(kind: str):
    """From the first call on, and whatever the shards had drawn before one of them looked."""

    def drawing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(x), 3, dtype=torch.float64)
        return checkpoint(lambda w, x: DROPOUT(w * x) * noise, w, x, use_reentrant=False)

    def call(executor: Any) -> Any:
        torch.manual_seed(3)
        devices, w = fdp.virtual_devices(4), torch.ones(3, dtype=torch.float64)
        if kind == "dp_apply":
            found = fdp.dp_apply(drawing, w, X, devices, executor=executor)
        elif kind == "nested":
            inner = functools.partial(fdp.dp_apply, drawing, devices=devices[:2], executor=executor)
            found = fdp.dp_apply(inner, w, X, devices, executor=executor)
        else:
            found = fdp.grad(lambda w, x: drawing(w, x).sum(), devices=devices, executor=executor)(w, X)
        return found, torch.get_rng_state()

    with side_by_side(4):
        first, second = call("threads"), call("threads")
    torch.testing.assert_close(first, call("sequential"), rtol=0, atol=0)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_nobody_sees_that_a_call_began_anew():
    """A failure is the only one in its chain, and a function may catch whatever it likes."""

    def failing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        finally:
            raise ValueError(f"inside {int(x[0, 0])}")

    def catching(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        except BaseException:
            return x * 0
        return x

    x = torch.arange(8.0)[:, None]
    with side_by_side(4):
        with pytest.raises(ValueError, match=r"^inside 0") as caught:
            threads(failing, X[0], x)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None
        assert torch.equal(threads(catching, X[0], x), x)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_cached_parametrizations(place: str, executor: Any):
    torch.manual_seed(0)
    module = parametrizations.weight_norm(nn.Linear(3, 3)).double()
    apply, (params, _) = fdp.functional(module)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if place == "inside" else contextlib.nullcontext():
            return apply((params, {}), x)[0].sin().mean()

    call = fdp.grad(loss, devices=fdp.virtual_devices(4), executor=executor)
    want = [grad(loss)({name: p * k for name, p in params.items()}, X) for k in (1, 2)]
    for _ in range(10):
        with parametrize.cached() if place == "around" else contextlib.nullcontext():
            got = [call({name: p * k for name, p in params.items()}, X) for k in (1, 2)]
        torch.testing.assert_close(got, want)


def test_threads_that_a_shard_starts_may_look_too():
    """They have its context; some come when it has ended."""
    late = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def look() -> None:
            torch.get_rng_state()

        started = [threading.Thread(target=contextvars.copy_context().run, args=(look,)) for _ in range(3)]
        for thread in started:
            thread.start()
        torch.get_rng_state()
        for thread in started:
            thread.join()
        late.append(contextvars.copy_context())
        return x

    with side_by_side(4):
        assert torch.equal(fdp.dp_apply(fn, X[0], X, fdp.virtual_devices(4), executor="threads"), X)
    for context in late:
        context.run(torch.get_rng_state)


def test_a_function_that_closes_over_an_object_with_attributes_of_its_own():
    """Only functions are asked for their code."""

    class Mapping:
        def __getattr__(self, name: str) -> Any:
            return {"scale": 2.0}[name]

    kept = Mapping()

    def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.get_rng_state()
        return x * w * kept.scale

    w, x = torch.tensor(3.0), torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(fdp.dp_apply(checkpointed, w, x, fdp.virtual_devices(2), executor="threads"), x * 6)
