"""The virtual accelerator by itself: it computes what the CPU computes, on devices that are kept apart."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from fdp.testing import install_virtual_accelerator
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.common.programs import run_program
from tests.common.virtual import Copied, record_copies

ONE, TWO = torch.device("virtual:1"), torch.device("virtual:2")
core: Any = torch
virtual: Any = torch.get_device_module("virtual")


def to(tree: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(device), tree)


# ---- devices


def test_torch_finds_the_devices():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.accelerator.device_count() == virtual.device_count() == 4


def test_the_current_device_can_be_switched():
    assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(2):
        assert torch.accelerator.current_device_index() == virtual.current_device() == 2
        made = [torch.zeros(1, device="virtual"), torch.ones(1).to("virtual"), torch.ones(1).to(device="virtual")]
        made += [torch.tensor([1.0], device="virtual"), torch.as_tensor([1.0], device=torch.device("virtual"))]
        made += [nn.Linear(1, 1).to("virtual").weight, torch.randn(1, device="virtual"), made[0].new_ones(1)]
        assert {x.device for x in made} == {TWO}
        with virtual.device(3), torch.accelerator.device_index(None):
            assert torch.accelerator.current_device_index() == 3
        assert torch.accelerator.current_device_index() == 2
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)


def test_every_thread_has_its_current_device():
    with torch.accelerator.device_index(2), ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.accelerator.current_device_index).result() == 0


NOWHERE: dict[str, Callable[..., Any]] = {
    "zeros": lambda: torch.zeros(1, device="virtual:4"),
    "to": lambda: torch.zeros(1).to("virtual:4"),
    "set_device_index": lambda: torch.accelerator.set_device_index(4),
    "synchronize": lambda: torch.accelerator.synchronize(4),
}


@pytest.mark.parametrize("use", NOWHERE.values(), ids=NOWHERE)
def test_a_device_that_does_not_exist(use: Callable[[], Any]):
    with pytest.raises(RuntimeError, match=r"virtual:4 does not exist: there are 4 virtual devices"):
        use()


def test_installing_again():
    install_virtual_accelerator(4)
    with pytest.raises(RuntimeError, match="installed with 4 devices already"):
        install_virtual_accelerator(2)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_the_count_is_a_positive_int(count: Any):
    with pytest.raises(ValueError, match="expected a positive number of devices"):
        install_virtual_accelerator(count)


def test_another_backend_is_in_its_place():
    code = (
        "import torch, fdp.testing\n"
        "torch.utils.rename_privateuse1_backend('mine')\n"
        "try: fdp.testing.install_virtual_accelerator(2)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the backend 'mine' stands where the virtual accelerator would" in done.stdout


# ---- tensors that meet


MEETINGS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "add-swapped": lambda a, b: b + a,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "in-place": lambda a, b: a.add_(b),
    "in-place-swapped": lambda a, b: b.mul_(a),
    "out": lambda a, b: torch.add(a, a, out=b),
    "linear": lambda a, b: F.linear(a, b[None]),
    "foreach": lambda a, b: core._foreach_add([a], [b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "index": lambda a, b: b[a.long()],
}


@pytest.mark.parametrize("use", MEETINGS.values(), ids=MEETINGS)
@pytest.mark.parametrize("other", ["virtual:2", "cpu"])
def test_two_devices_do_not_meet(use: Callable[[Tensor, Tensor], Any], other: str):
    with pytest.raises(RuntimeError, match=r"expected all tensors to be on the same device, but found .*virtual:1"):
        use(torch.ones(2, device=ONE), torch.ones(2, device=other))


def test_a_number_of_the_cpu_may_meet_a_device():
    x = torch.ones(2, device=ONE)
    assert (x + torch.tensor(2.0)).device == (torch.tensor(2.0) * x).device == ONE
    assert x[torch.tensor([0, 1])].device == ONE  # as on CUDA
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(2.0).add_(x.sum())


def test_copies_are_recorded():
    x, held = torch.ones(2, 3), torch.empty(2, 3, device=TWO)
    with record_copies() as log:
        y = x.to(ONE)
        _ = y.to(ONE), y.clone(), y.double()
        held.copy_(y, non_blocking=True)
        held.cpu()
        torch.tensor([1.0], device=ONE)
    cpu = torch.device("cpu")
    assert log == [Copied(24, cpu, ONE), Copied(24, ONE, TWO), Copied(24, TWO, cpu), Copied(4, cpu, ONE)]


# ---- values

OPERATIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y: (x @ y.T).sin() / (1 + x.sum(1, keepdim=True).exp()),
    "views": lambda x, y: x.T[1:].reshape(-1).view(3, -1).unbind(),
    "in-place-on-views": lambda x, y: x.clone()[:, 1:].mul_(2).t_().contiguous(),
    "in-place-below-a-view": lambda x, y: [(z := x * 1), z[1].zero_(), z][2],
    "masks": lambda x, y: (x[x > 0], x.masked_fill(x > 0, 2), torch.where(x > y, x, y)),
    "indices": lambda x, y: (x[[1, 0]], x.index_add(0, torch.tensor([1, 1]).to(x.device), y[:2]), x.flip(0)),
    "sort": lambda x, y: tuple(x.sort(dim=1)),
    "out": lambda x, y: torch.mul(x.detach(), y.detach(), out=torch.empty(0, dtype=x.dtype, device=x.device)),
    "like": lambda x, y: (torch.zeros_like(x), torch.full_like(x, 2), x.new_tensor([1.0]), x.new_zeros(2)),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "split": lambda x, y: [part * i for i, part in enumerate(x.split_with_sizes([2, 1, 0], 0))],
    "tensor_split": lambda x, y: x.tensor_split(2),
    "cumsum": lambda x, y: x.cumsum(0).cumprod(1),
    "linalg": lambda x, y: torch.linalg.solve(x @ x.T + torch.eye(3, dtype=x.dtype, device=x.device), y),
    "complex": lambda x, y: torch.complex(x, y).conj().mul(2j).imag,
    "foreach": lambda x, y: core._foreach_mul([x, y], 2.0),
    "losses": lambda x, y: (F.cross_entropy(x, y.argmax(1)), F.mse_loss(x, y), F.huber_loss(x, y)),
    "pool": lambda x, y: F.max_pool1d(x[None], 2) + F.adaptive_avg_pool1d(y[None], 2),
    "pad": lambda x, y: F.pad(x, (1, 2)) + F.interpolate(y[None], 7)[0],
    "item": lambda x, y: x * y.sum().item() + torch.tensor(y.tolist(), dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_the_cpu(name: str):
    def values_and_grads(device: Any) -> Any:
        x, y = (numbers(2, 3, 4)[i].to(device).requires_grad_() for i in (0, 1))
        out = OPERATIONS[name](x, y)
        ends = [z.square().sum().abs() for z in tree_leaves(out) if z.requires_grad]
        return out, torch.autograd.grad(ends, (x, y), allow_unused=True) if ends else None

    got = values_and_grads(ONE)
    assert {x.device for x in tree_leaves(got) if isinstance(x, Tensor)} == {ONE}
    assert_close_tree(to(got, "cpu"), values_and_grads("cpu"))


def test_shapes_that_change_in_place():
    x = torch.zeros(2, 3, device=ONE)
    x.t_()
    assert (x.shape, x.stride()) == ((3, 2), (1, 3))
    x.resize_(4, 4).fill_(1)
    assert x.cpu().sum() == 16
    x.set_(torch.ones(5, device=ONE))  # pyright: ignore[reportArgumentType]
    assert x.sum().item() == 5


def test_versions_count_writes():
    x = torch.zeros(4, device=ONE)
    view, before = x[1:], x._version
    view.add_(1)
    assert x._version == view._version == before + 1
    core._foreach_add_([x], 1.0)
    assert x._version == before + 2
    assert x.tolist() == [1, 2, 2, 2]


def test_setting_data():
    parameter = nn.Parameter(torch.zeros(2, device=ONE))
    parameter.data = torch.ones(3, device=ONE)
    assert (parameter * 1).tolist() == parameter.data.tolist() == [1, 1, 1]
    parameter.data.mul_(2)
    assert parameter.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.zeros(1)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)), lambda: numbers(6, 4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)), lambda: numbers(3, 2, 8, 8)),
    "conv-transpose": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), lambda: numbers(3, 2, 5)),
    "batch-norm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), lambda: numbers(3, 2, 8)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)), lambda: numbers(3, 4)),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), lambda: torch.arange(6).view(2, 3)),
    "embedding-bag": (lambda: nn.EmbeddingBag(7, 4), lambda: torch.arange(6).view(2, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), lambda: numbers(3, 4)),
    "feature-dropout": (lambda: nn.Sequential(nn.Dropout1d(0.5), nn.AlphaDropout(0.2)), lambda: numbers(3, 4, 2)),
    "rnn": (lambda: nn.RNN(4, 5, 2), lambda: numbers(3, 2, 4)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        lambda: numbers(3, 6, 8),
    ),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_the_cpu(name: str, train: bool):
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make().double().train(train)

    def run(device: Any) -> Any:
        model = copy.deepcopy(module).to(device)
        torch.manual_seed(1)
        out = model(inputs().to(device))
        out = out[0] if isinstance(out, tuple) else out
        if any(True for _ in model.parameters()):
            out.square().sum().backward()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            optimizer.step()
        grads = [p.grad for p in model.parameters()]
        return out, grads, dict(model.state_dict())

    got = run(ONE)
    assert {x.device for x in tree_leaves(got)} == {ONE}
    assert_close_tree(to(got, "cpu"), run("cpu"), 1e-8)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_cells_that_the_cpu_has_no_kernel_for(cell: Any):
    with pytest.raises(NotImplementedError, match=r"virtual:1 computes on the CPU, which has no kernel for it"):
        cell(4, 5, device=ONE)(torch.ones(3, 2, 4, device=ONE))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_are_those_of_the_cpu(kind: Any, foreach: bool):
    def run(device: Any) -> list[Tensor]:
        parameters = [nn.Parameter(numbers(3).to(device)), nn.Parameter(numbers(2, 2).to(device))]
        optimizer = kind(parameters, 0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([p.square().sum() for p in parameters]).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return [p.detach() for p in parameters]

    assert_close_tree(to(run(ONE), "cpu"), run("cpu"))


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sin().square().sum()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda w, x: grad(loss)(w, x),
    "per-sample": lambda w, x: vmap(grad(loss), (None, 0))(w, x),
    "jvp": lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,)),
    "jacrev": lambda w, x: jacrev(lambda w: x @ w)(w),
    "hessian": lambda w, x: hessian(loss)(w, x),
    "vmap-in-dims": lambda w, x: vmap(lambda a, b: a * b.sum(), (1, 0))(w, w),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_the_cpu(name: str):
    w, x = numbers(3, 3), numbers(4, 3)
    assert_close_tree(to(TRANSFORMS[name](w.to(ONE), x.to(ONE)), "cpu"), TRANSFORMS[name](w, x))


def test_gradients_cross_devices():
    w = numbers(3, 3).requires_grad_()
    parts = [(numbers(2, 3).to(f"virtual:{i}") @ w.to(f"virtual:{i}")).sin().sum() for i in range(4)]
    torch.stack([part.to(ONE) for part in parts]).sum().backward()
    assert w.grad is not None
    assert_close_tree(w.grad, 4 * grad(lambda w: (numbers(2, 3) @ w).sin().sum())(w.detach()))


def test_a_backward_runs_in_the_thread_that_starts_it():
    """Without the double of these tests."""
    done = run_program(
        "import threading, torch\n"
        "from fdp.testing import install_virtual_accelerator\n"
        "install_virtual_accelerator(2)\n"
        "x, seen = torch.ones(2, device='virtual:1', requires_grad=True), []\n"
        "x.register_hook(lambda _: seen.append(threading.get_ident()))\n"
        "(x * 2).sum().backward()\n"
        "print(seen == [threading.get_ident()])"
    )
    assert done.stdout == "True\n", done.stderr


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return no(grads[0])


def no(grad: Tensor) -> Tensor:
    raise ValueError("not this one")


def fails_again() -> Callable[[Tensor], Tensor]:
    calls = iter([torch.sin])
    return lambda x: next(calls, no)(x).cos()


def hooked(x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    y = x * 2
    y.register_hook(hook)
    return y


IN_BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "function": (Fails.apply, "not this one"),
    "hook": (lambda x: hooked(x, no), "not this one"),
    "operation": (lambda x: hooked(x, lambda g: g + torch.ones(2, device=ONE)), "to be on the same device"),
    "checkpoint": (lambda x: checkpoint(fails_again(), x, use_reentrant=False), "not this one"),
}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_what_is_raised_in_a_backward_arrives(name: str):
    use, message = IN_BACKWARD[name]
    x = torch.ones(2, device=TWO, requires_grad=True)
    for _ in range(20):
        with pytest.raises((ValueError, RuntimeError), match=message):
            use(x).sum().backward()
    (x * 2).sum().backward()
    assert x.grad is not None


def test_it_works_from_many_threads():
    def work(i: int) -> float:
        with torch.accelerator.device_index(i % 4):
            module = nn.Linear(3, 2).to("virtual")
            x = torch.ones(5, 3, device="virtual")
            module(x).square().sum().backward()
            assert module.weight.grad is not None
            assert module.weight.grad.device == torch.device("virtual", i % 4)
        return x.sum().item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == [15.0] * 40


# ---- random numbers


DRAWS: dict[str, Callable[..., Any]] = {
    "randn": lambda: torch.randn(5, device=ONE),
    "rand_like": lambda: torch.rand_like(torch.zeros(5, device=ONE)),
    "randint": lambda: torch.randint(0, 1000, (5,), device=ONE),
    "randint_like": lambda: torch.randint_like(torch.zeros(5, device=ONE), 0, 1000),
    "randperm": lambda: torch.randperm(100, device=ONE),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5, device=ONE)),
    "poisson": lambda: torch.poisson(torch.full((50,), 9.0, device=ONE)),
    "multinomial": lambda: torch.multinomial(torch.ones(50, device=ONE), 20),
    "dropout": lambda: F.dropout(torch.ones(50, device=ONE)),
    "dropout1d": lambda: F.dropout1d(torch.ones(1, 50, 2, device=ONE)),
    "normal_": lambda: torch.empty(5, device=ONE).normal_(),
    "vmap-dropout": lambda: vmap(lambda x: F.dropout(x), randomness="different")(torch.ones(3, 50, device=ONE)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_come_from_the_generator_of_the_device(draw: Callable[[], Tensor]):
    virtual.default_generators[1].manual_seed(3)
    others = [torch.default_generator, *(virtual.default_generators[i] for i in (0, 2, 3))]
    before = [generator.get_state() for generator in others]
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    assert all(torch.equal(g.get_state(), state) for g, state in zip(others, before, strict=True))
    virtual.default_generators[1].manual_seed(3)
    assert torch.equal(draw(), first)
    assert first.device == ONE


def test_one_seed_for_all_devices():
    torch.manual_seed(7)
    draws = [torch.randn(3, device=f"virtual:{i}").cpu() for i in range(4)]
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    state = virtual.get_rng_state(2)
    after = torch.rand(2, device=TWO)
    virtual.set_rng_state(state, TWO)
    assert torch.equal(torch.rand(2, device=TWO), after)


def test_a_generator_that_is_passed_is_used():
    draws = [torch.randn(3, device=ONE, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*draws)
    own = virtual.default_generators[1]
    assert not torch.equal(torch.randn(3, device=ONE, generator=own), torch.randn(3, device=ONE, generator=own))


def test_fork_rng_and_checkpoint_restore_the_generators():
    state = virtual.get_rng_state(1)
    with torch.random.fork_rng([1], device_type="virtual"):
        torch.randn(3, device=ONE)
    assert torch.equal(virtual.get_rng_state(1), state)
    x = torch.ones(50, device=ONE, requires_grad=True)
    out = checkpoint(lambda x: F.dropout(x) * x, x, use_reentrant=False)
    (g,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(g, 2 * out.detach())  # the same mask, drawn twice


# ---- modes


def test_autocast_is_refused():
    linear, x = nn.Linear(3, 3, device=ONE), torch.ones(2, 3, device=ONE)
    for dtype in (torch.bfloat16, torch.float16, None):
        with pytest.raises(RuntimeError, match="virtual devices have no autocast"):
            torch.autocast("virtual", dtype)
    with torch.autocast("virtual", enabled=False), torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.float32


def test_default_device():
    with torch.device("virtual:1"):
        assert {torch.zeros(1).device, torch.tensor([1.0]).device, nn.Linear(1, 1).weight.device} == {ONE}
    with torch.device("virtual"), torch.accelerator.device_index(2):
        assert torch.zeros(1).device == TWO


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(2, device=ONE) * 2
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(ONE).eval()
        assert encoder(torch.ones(1, 2, 8, device=ONE)).device == ONE
        assert x.to(TWO).device == TWO
    assert x.is_inference()


def test_views_in_inference_mode():
    x = torch.arange(6.0, device=ONE).view(2, 3)
    with torch.inference_mode():
        views = [x.t(), x.view(-1), x[0], *x.split(1), x.expand(4, 2, 3), x.detach()]
        assert not any(view.is_inference() for view in views)  # as their base
        assert (x * 2).t().is_inference()
        assert all(view.is_inference() for view in (x * 2).split(1))
        assert vmap(lambda row: row.t() * 2)(x.unsqueeze(0)).tolist() == [(x * 2).t().tolist()]


def test_tensors_without_values():
    x = torch.ones(2, 3, device=ONE)
    for meta in (
        x.to("meta"),
        x.to(device="meta"),
        torch.zeros_like(x, device="meta"),
        x.new_zeros(2, 3, device="meta"),
    ):
        assert (meta.device.type, meta.shape) == ("meta", x.shape)
    tangent = jvp(lambda x: x.to(TWO) * 2.0, (x,), (x,))[1]  # which asks for shapes there
    assert (tangent.device, tangent.tolist()) == (TWO, (x * 2).tolist())


# ---- keeping


def test_deep_copies():
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(ONE)
    twin = copy.deepcopy(module)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.device == ONE
    with torch.no_grad():
        twin[0].weight.add_(1)
    assert not torch.equal(twin[0].weight, module[0].weight)


def test_modules_move():
    module: Any = nn.Linear(2, 2).to(ONE)
    weight = module.weight.detach().cpu()
    module.to(TWO)
    assert module.weight.device == TWO
    assert torch.equal(module(torch.eye(2, device=TWO)).cpu(), (torch.eye(2) @ weight.T + module.bias.cpu()))
    assert isinstance(module.cpu().weight, nn.Parameter)
    assert torch.equal(module.weight, weight)


def test_pickling():
    parameter = nn.Parameter(torch.ones(2, device=ONE))
    twin, plain = pickle.loads(pickle.dumps((parameter, parameter.detach()[1:])))
    assert isinstance(twin, nn.Parameter)
    assert not isinstance(plain, nn.Parameter)
    assert (twin.device, plain.device, plain.tolist()) == (ONE, ONE, [1])


def test_showing():
    assert repr(torch.ones(2, device=ONE)) == "VirtualTensor([1., 1.], device='virtual:1')"
    assert f"{torch.ones((), device=ONE).item():.1f}" == "1.0"
    assert f"{torch.ones((), device=ONE):.1f}" == "1.0"


def test_sparse_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        torch.eye(2, device=ONE).to_sparse()
