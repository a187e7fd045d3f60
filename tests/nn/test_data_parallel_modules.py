"""The class DataParallel and the modules it runs: buffers, hooks, kinds of modules, transforms, compilers, memory."""

import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from fdp import DataParallel, data_parallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.settings import without_collector
from tests.common.threads import many_cores, side_by_side

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()


class Keeps(nn.Module):
    """A module with one buffer, which `write` gives another value."""

    buffer: Tensor

    def __init__(self, write: Callable[["Keeps", Tensor], Any], buffer: Tensor) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return x * 1


def loss_of(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (out * numbers(*out.shape, dtype=out.dtype)).abs().square().sum()


def run(model: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
    """The value, and the gradients in inputs and parameters, None where there is none."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = model(*leaves)
    wanted = [tensor for tensor in [*leaves, *module.parameters()] if tensor.requires_grad]
    grads = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    return (out[0] if isinstance(out, tuple) else out).detach(), grads


def assert_like_one_device(module: nn.Module, *inputs: Tensor, slots: int = 3, **options: Any) -> None:
    """Values and gradients, in whatever way the replicas run, of two calls."""
    want = run(module, module, *inputs)
    for executor in ("sequential", "threads", "auto"):
        shim = DataParallel(module, ["cpu"] * slots, executor=executor, **options)
        with many_cores():
            for _ in range(2):
                assert_close_tree(run(shim, module, *inputs), want)


# ---------------------------------------------------------------- buffers


@each_executor
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("rows", [6, 9])
def test_buffers_are_those_of_the_first_replica(slots: int, rows: int, executor: Any):
    module, x = nn.BatchNorm1d(3).double(), numbers(rows, 3)
    one = copy.deepcopy(module)
    shim = DataParallel(module, ["cpu"] * slots, executor=executor)
    buffers = dict(module.named_buffers())
    with many_cores():
        for factor in (1, 2):
            shim(factor * x)
            one(factor * x.chunk(slots)[0])
            assert_close_tree(module.state_dict(), one.state_dict())
    assert all(now is buffers[name] for name, now in module.named_buffers())


@each_executor
@pytest.mark.parametrize("weights", [None, [1, 1, 1], [0, 1, 2]], ids=str)
def test_buffers_may_be_the_mean_over_replicas_by_rows(weights: Any, executor: Any):
    module, x = nn.BatchNorm1d(3).double(), numbers(8, 3)
    parts = x.chunk(3) if weights is None else x.split([3, 3, 2] if weights[0] else [3, 5])
    means, variances = (torch.zeros(3, dtype=torch.float64) for _ in range(2))
    for part in parts:
        one: Any = copy.deepcopy(module)
        one(part)
        means, variances = means + one.running_mean * len(part), variances + one.running_var * len(part)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, weights=weights, buffers="mean", executor=executor)(x)
    want = {"running_mean": means / 8, "running_var": variances / 8, "num_batches_tracked": torch.tensor(1)}
    assert_close_tree(dict(module.named_buffers()), want)


def test_the_mean_makes_running_statistics_those_of_the_batch():
    """The mean over replicas of means is the mean of the batch: with the first replica's alone it is not."""
    module, x = nn.BatchNorm1d(3, momentum=1.0).double(), numbers(7, 3)
    DataParallel(module, TWO, buffers="mean")(x)
    assert_close_tree(module.running_mean, x.mean(0))


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_in_evaluation_buffers_stay_bit_by_bit(buffers: Any):
    module, x = nn.BatchNorm1d(3).double(), numbers(7, 3)
    module(x)
    module.running_mean[0], module.running_var[1] = float("nan"), -0.0  # pyright: ignore[reportOptionalSubscript]
    module.eval()
    before, versions = copy.deepcopy(module.state_dict()), [b._version for b in module.buffers()]
    out = DataParallel(module, ["cpu"] * 3, buffers=buffers)(x)
    assert_same_tree(module.state_dict(), before)
    assert [b._version for b in module.buffers()] == versions
    assert_close_tree(out, module(x))


def test_integers_have_no_mean_but_may_agree():
    def count(module: Keeps, x: Tensor) -> None:
        module.buffer += len(x)

    module = Keeps(count, torch.tensor(1))
    shim = DataParallel(module, TWO, buffers="mean")
    shim(numbers(4))
    assert module.buffer == 3
    message = r"DataParallel: the buffer 'buffer' is torch.int64, which has no mean.*buffers='first'"
    with pytest.raises(ValueError, match=message):
        shim(numbers(5))
    assert module.buffer == 3
    DataParallel(module, TWO)(numbers(5))
    assert module.buffer == 6


def test_a_mean_that_fails_writes_no_buffer_at_all():
    class Both(nn.Module):
        first: Tensor
        second: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros((), dtype=torch.float64))
            self.register_buffer("second", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.first += x.sum()
            self.second += len(x)
            return x

    module = Both()
    with pytest.raises(ValueError, match=r"the buffer 'second' is torch.int64"):
        DataParallel(module, TWO, buffers="mean")(numbers(5))
    assert (module.first.item(), module.second.item()) == (0, 0)


def test_a_mean_of_buffers_that_all_have_a_new_shape():
    module = Keeps(lambda module, x: setattr(module, "buffer", x.sum().expand(5).clone()), numbers(2))
    DataParallel(module, TWO, buffers="mean")(numbers(4))
    assert_close_tree(module.buffer, (numbers(4).sum() / 2).expand(5).clone())


def test_a_mean_of_buffers_of_other_shapes_is_refused():
    def rebind(module: Keeps, x: Tensor) -> None:
        module.buffer = x.clone()

    module = Keeps(rebind, numbers(2))
    with pytest.raises(ValueError, match=r"DataParallel: the buffer 'buffer' .*shape"):
        DataParallel(module, TWO, buffers="mean")(numbers(5))
    assert_same_tree(module.buffer, numbers(2))


@each_executor
def test_a_call_that_fails_has_no_mean_to_write(executor: Any):
    def write(module: Keeps, x: Tensor) -> None:
        module.buffer.add_(1)
        if 5 in x:
            raise ValueError("five")

    module = Keeps(write, numbers(2))
    with many_cores(), pytest.raises(ValueError, match="five"):
        DataParallel(module, TWO, buffers="mean", executor=executor)(torch.arange(6.0))
    assert_same_tree(module.buffer, numbers(2))
    assert module.buffer._version == 0


WRITES: dict[str, Callable[[Keeps, Tensor], Any]] = {
    "in-place": lambda module, x: module.buffer.copy_(x[:2] * 2),
    "rebound": lambda module, x: setattr(module, "buffer", x[:2] * 2),
    "detached": lambda module, x: setattr(module, "buffer", x.detach()[:2] * 2),
    "a-view-of-the-input": lambda module, x: setattr(module, "buffer", x[:2].mul_(2)),
    "data": lambda module, x: setattr(module.buffer, "data", x[:2] * 2),
    "out": lambda module, x: torch.mul(x[:2], 2, out=module.buffer),
    "dict": lambda module, x: module._buffers.update(buffer=x[:2] * 2),
    "numpy": lambda module, x: module.buffer.numpy().__setitem__(slice(None), x[:2].numpy() * 2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("slots", [2, 3])
def test_buffers_may_be_written_in_any_way(name: str, slots: int):
    """Torch loses those that forward puts in the place of others."""
    module = Keeps(WRITES[name], numbers(2))
    buffer = module.buffer
    DataParallel(module, ["cpu"] * slots)(numbers(6))
    assert (module.buffer is buffer) == (name in ("in-place", "data", "out", "numpy"))
    assert_same_tree(module.buffer, numbers(6)[:2] * 2)
    assert not module.buffer.requires_grad


@pytest.mark.parametrize("kind", ["shape", "dtype", "none-before"])
def test_buffers_may_become_others(kind: str):
    new = {"shape": numbers(7), "dtype": numbers(2).float(), "none-before": numbers(2)}[kind]
    module = Keeps(lambda module, x: setattr(module, "buffer", new.clone()), numbers(2))
    if kind == "none-before":
        module.register_buffer("buffer", None)
    DataParallel(module, TWO)(numbers(4))
    assert_same_tree(module.buffer, new)
    assert list(module.state_dict()) == ["buffer"]


def test_a_buffer_that_was_not_written_is_not_written():
    module = nn.Sequential(nn.BatchNorm1d(2), Keeps(lambda *_: None, numbers(2))).double()
    kept = module[1].get_buffer("buffer")
    versions = [buffer._version for buffer in module.buffers()]
    product = numbers(2).requires_grad_() * kept
    DataParallel(module, TWO)(numbers(4, 2))
    product.sum().backward()  # would fail if the buffer had been written
    assert kept._version == versions[-1]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)).double(),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).double(),
    "old-spectral-norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)).double(),
    "instance-norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval()
    ).double(),
}


@each_executor
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_two_calls_then_one_backward(make: Any, executor: Any):
    torch.manual_seed(0)
    module, x = make(), numbers(6, 3)
    one = copy.deepcopy(module)
    shim = DataParallel(module, ["cpu"], executor=executor)
    two = DataParallel(copy.deepcopy(module), TWO, executor=executor)
    with many_cores():
        (loss_of(two(x)) + loss_of(two(2 * x))).backward()
    (loss_of(shim(x)) + loss_of(shim(2 * x))).backward()
    (loss_of(one(x)) + loss_of(one(2 * x))).backward()
    assert_close_tree([p.grad for p in module.parameters()], [p.grad for p in one.parameters()])
    assert all(parameter.grad is not None for parameter in two.parameters())


@pytest.mark.parametrize("slots", [2, 3])
def test_spectral_norm_takes_its_step_once_a_call(slots: int):
    torch.manual_seed(0)
    module, x = parametrizations.spectral_norm(nn.Linear(3, 2)).double(), numbers(6, 3)
    one = copy.deepcopy(module)
    for _ in range(3):
        got, want = run(DataParallel(module, ["cpu"] * slots), module, x), run(one, one, x)
        assert_close_tree(got, want)
        assert_close_tree(module.state_dict(), one.state_dict())


def test_buffers_that_require_grad():
    scale = numbers(3).requires_grad_()
    module: Any = nn.Linear(3, 3).double()
    module.register_buffer("scale", scale)
    module.register_forward_hook(lambda module, _, out: out * module.scale)
    x = numbers(5, 3)
    got = torch.autograd.grad(loss_of(DataParallel(module, TWO)(x)), [scale, *module.parameters()])
    assert_close_tree(got, torch.autograd.grad(loss_of(module(x)), [scale, *module.parameters()]))
    assert module.scale is scale
    assert scale.requires_grad


def test_tied_and_absent_buffers():
    module: Any = nn.Sequential(
        Keeps(lambda module, x: module.buffer.add_(1), numbers(2)), nn.Identity(), nn.Identity()
    )
    module[1].register_buffer("same", module[0].buffer)
    module[2].register_buffer("none", None)
    module[2].register_buffer("hidden", numbers(1), persistent=False)
    DataParallel(module, TWO)(numbers(4))
    assert_same_tree(module[1].same, numbers(2) + 1)
    assert module[1].same is module[0].buffer
    assert list(module.state_dict()) == ["0.buffer", "1.same"]


@pytest.mark.parametrize("written", ["whole", "part"])
def test_buffers_may_be_parts_of_others(written: str):
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("part", self.get_buffer("whole")[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer(written).add_(1)
            return x

    module, one = Parts(), Parts()
    DataParallel(module, TWO)(numbers(4))
    one(numbers(2))
    assert_same_tree(module.state_dict(), one.state_dict())


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("buffers", ["first", "mean"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_buffers(layout: Any, buffers: Any):
    module = nn.Linear(3, 3).double()
    dense = torch.eye(3).double().flip(0)
    module.register_buffer("mixing", dense if layout is torch.strided else dense.to_sparse(layout=layout))
    module.register_forward_hook(lambda module, args, out: (module.get_buffer("mixing") @ out.T).T)
    mixing = module.get_buffer("mixing")
    assert_like_one_device(module, numbers(5, 3), buffers=buffers)
    assert module.get_buffer("mixing") is mixing


def test_outputs_that_cannot_be_joined_leave_no_mean():
    module = Keeps(lambda module, x: module.buffer.add_(1), numbers(2))
    module.register_forward_hook(lambda module, args, out: {len(out): out})
    with pytest.raises(ValueError, match="shards differ in structure"):
        DataParallel(module, TWO, buffers="mean")(numbers(5))
    assert_same_tree(module.buffer, numbers(2))


def test_means_need_the_rows_of_the_replicas():
    class Mine(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return [(inputs[0][:1],), (inputs[0][1:],)], [{}, {}]

    module = nn.BatchNorm1d(2, momentum=1.0).double().eval()
    with pytest.raises(ValueError, match=r"DataParallel: buffers='mean' needs .*buffers='first'"):
        Mine(module, TWO, buffers="mean")(numbers(4, 2))


def test_means_need_arguments_with_equal_rows():
    class Pair(Keeps):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return super().forward(x)

    module = Pair(lambda module, x: module.buffer.add_(1), numbers(2))
    with pytest.raises(ValueError, match=r"DataParallel: buffers='mean' needs .* equal rows.*buffers='first'"):
        DataParallel(module, TWO, buffers="mean")(numbers(4, 2), numbers(2))
    DataParallel(module, TWO)(numbers(4, 2), numbers(2))
    assert_same_tree(module.buffer, numbers(2) + 1)


def test_without_rows_to_weigh_by_there_is_one_replica():
    module = Keeps(lambda module, x: module.buffer.add_(1), numbers(2))
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        DataParallel(module, TWO, buffers="mean")(torch.tensor(3.0))
    assert_same_tree(module.buffer, numbers(2) + 1)


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_no_rows_at_all(buffers: Any):
    module = Keeps(lambda module, x: module.buffer.add_(1), numbers(2))
    DataParallel(module, TWO, buffers=buffers)(numbers(0, 3))
    assert_close_tree(module.buffer, numbers(2) + 1)


def test_buffers_made_in_inference_mode():
    with torch.inference_mode():
        module = nn.BatchNorm1d(3).double()
        one = copy.deepcopy(module)
        DataParallel(module, TWO)(numbers(6, 3))
        one(numbers(3, 3))
    assert_close_tree(module.state_dict(), one.state_dict())


# ---------------------------------------------------------------- what forward writes, and what the user changes


@each_executor
def test_plain_attributes_that_forward_writes_are_lost(executor: Any):
    class Writes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.calls, self.seen = 0, []

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            self.last = input
            self.seen = [*self.seen, len(input)]
            assert self.calls == len(self.seen) == 1
            return super().forward(input)

    module = Writes().double()
    before = dict(vars(module))
    with many_cores():
        for _ in range(3):
            DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert vars(module) == before


@each_executor
def test_what_forward_registers_is_lost(executor: Any):
    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not hasattr(self, "cache")
            self.register_buffer("cache", x[0])
            self.layer, self.weight = nn.Linear(3, 2), nn.Parameter(x[0])
            return x * self.get_buffer("cache") * self.weight

    module = Registers()
    before = set(vars(module))
    with many_cores():
        for _ in range(2):
            DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert set(vars(module)) == before
    assert (dict(module.state_dict()), list(module.children())) == ({}, [])


@each_executor
@pytest.mark.parametrize("again", [False, True])
def test_what_the_first_replica_writes_to_parameters_stays(again: bool, executor: Any):
    """Once, also where replicas stop running side by side because one looks at the random state."""

    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            if again:
                torch.get_rng_state()
            return super().forward(input)

    module = Writes(3, 2).double()
    weight = module.weight.detach().clone()
    shim = DataParallel(module, TWO, executor=executor)
    with many_cores():
        out = shim(numbers(4, 3))
    assert_close_tree(module.weight.detach(), 2 * weight)
    assert_close_tree(out.detach(), nn.functional.linear(numbers(4, 3), 2 * weight, module.bias).detach())


@each_executor
def test_buffers_are_written_once_where_replicas_run_again(executor: Any):
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Identity()).double()

    def look(*_: Any) -> None:
        torch.get_rng_state()

    module[1].register_forward_hook(look)
    one = copy.deepcopy(module[0])
    with many_cores():
        for _ in range(2):
            DataParallel(module, TWO, executor=executor)(numbers(6, 3))
            one(numbers(3, 3))
    assert_close_tree(dict(module[0].state_dict()), dict(one.state_dict()))


def test_replicas_see_the_mode():
    seen: list[bool] = []

    class Mode(nn.Identity):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(self.training)
            return input

    shim: Any = DataParallel(nn.Sequential(Mode(), nn.Dropout(0.5)), TWO)
    shim.eval()
    assert_same_tree(shim(numbers(4)), numbers(4))
    shim.train()
    shim(numbers(4))
    shim.module[0].eval()
    shim(numbers(4))
    assert seen == [False, False, True, True, False, False]


def test_what_is_changed_between_calls_is_seen():
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor: Any = 1
            self.options = {"shift": 0}
            self.layer: nn.Module = nn.Identity()
            self.plain = numbers(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.factor) + self.options["shift"] + self.plain

    module: Any = Scales()
    shim: Any = DataParallel(module, TWO)
    x = numbers(4, 2)

    def assert_same() -> None:
        assert_same_tree(shim(x), module(x))
        with torch.no_grad():
            assert_same_tree(shim(x), module(x))

    assert_same()
    module.factor = 3
    assert_same()
    module.factor = torch.tensor(2.5)
    assert_same()
    module.options["shift"] = 7
    assert_same()
    module.options = {"shift": -1}
    assert_same()
    module.layer = nn.Tanh()
    assert_same()
    module.layer = nn.Linear(2, 2).double()
    assert_same()
    module.layer.weight = nn.Parameter(numbers(2, 2))
    assert_same()
    module.plain = 2 * numbers(2)
    assert_same()
    module.plain.add_(1)
    assert_same()
    module.register_parameter("extra", nn.Parameter(numbers(2)))
    assert_same()
    module.forward = lambda x: x - 1
    assert_same()
    del module.forward
    assert_same()
    module.register_forward_hook(lambda module, args, out: out * 10)
    assert_same()
    module.__class__ = type("Other", (Scales,), {"forward": lambda self, x: x + self.factor})
    assert_same()
    shim.module = nn.ReLU()
    assert_same_tree(shim(x), x.relu())


def test_the_dtype_may_change():
    module = mlp()
    shim = DataParallel(module, TWO)
    assert shim(numbers(4, 3)).dtype is torch.float64
    shim.float()
    assert_same_tree(shim(numbers(4, 3).float()).detach(), module(numbers(4, 3).float()).detach())


def test_tensors_as_plain_attributes_are_shared():
    seen: list[Tensor] = []

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = numbers(2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.plain)
            return x

    module = Plain()
    DataParallel(module, TWO)(numbers(4))
    assert len(seen) == 2
    assert all(tensor is module.plain for tensor in seen)


@each_executor
def test_methods_bound_to_the_module_are_those_of_the_replica(executor: Any):
    """Torch calls the module itself: its weights are on another device."""

    class Bound(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.fn = self.compute
            self.table = {"a": [self.compute]}

        def compute(self, x: Tensor) -> Tensor:
            seen.append(self)
            return nn.functional.linear(x, self.weight)

        def forward(self, input: Tensor) -> Tensor:
            assert self.fn.__self__ is self
            return self.fn(input) + self.table["a"][0](input)

    seen: list[Any] = []
    module = Bound().double()
    module.forward = module.forward
    with many_cores():
        DataParallel(module, TWO, executor=executor)(numbers(4, 3))
    assert len(set(map(id, seen))) == 2
    assert all(each is not module for each in seen)
    assert_like_one_device(module, numbers(4, 3))


def test_a_module_that_leads_back_to_itself_is_called_in_place():
    class Cyclic(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.fn = lambda x: self.compute(x)
            self.calls = 0

        def compute(self, x: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.linear(x, self.weight)

        def forward(self, input: Tensor) -> Tensor:
            return self.fn(input)

    module = Cyclic().double()
    with many_cores():
        DataParallel(module, TWO, executor="threads")(numbers(4, 3))
    assert module.calls == 2  # what it writes stays
    assert_like_one_device(module, numbers(4, 3))


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_module_that_was_called_in_place_has_its_own_tensors_again(kind: type[BaseException], executor: Any):
    model = mlp()

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        assert model[0].weight is not None
        raise kind("stop")

    model[3].register_forward_hook(hook)
    parameters = list(model.parameters())
    with many_cores(), pytest.raises(kind, match="stop"):
        DataParallel(model, TWO, executor=executor)(numbers(4, 3))
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))


# ---------------------------------------------------------------- hooks


@each_executor
def test_hooks_run_once_a_replica_in_torch_s_order(executor: Any):
    events: dict[int, list[str]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: events.setdefault(threading.get_ident(), []).append(name)

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note("forward")()
            return super().forward(input)

    module = nn.Sequential(Layer(3, 2)).double()
    module.register_forward_pre_hook(note("outer pre"))
    module.register_forward_hook(note("outer"))
    module[0].register_forward_pre_hook(note("pre"), with_kwargs=True)
    module[0].register_forward_hook(note("hook"), with_kwargs=True)
    module[0].register_forward_hook(note("always"), always_call=True)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, executor=executor)(numbers(5, 3))
    once = ["outer pre", "pre", "forward", "hook", "always", "outer"]
    ran = list(events.values())
    assert sum(map(len, ran)) == 3 * len(once)
    for each in ran:
        assert each == once * (len(each) // len(once))


def test_hooks_of_the_wrapper_run_once():
    events: list[Any] = []
    shim = DataParallel(nn.Identity(), ["cpu"] * 3)
    shim.register_forward_pre_hook(lambda _, args: events.append(len(args[0])))
    shim.register_forward_hook(lambda _, args, out: events.append(len(out)) or 2 * out)
    assert_same_tree(shim(numbers(5)), 2 * numbers(5))
    assert events == [5, 5]


@each_executor
def test_hooks_may_store_what_they_see(executor: Any):
    activations: dict[str, list[Tensor]] = {}

    def store(name: str) -> Callable[..., None]:
        return lambda module, args, out: activations.setdefault(name, []).append(out)

    module, x = mlp(), numbers(4, 3)
    for name, child in module.named_children():
        child.register_forward_hook(store(name))
    with many_cores():
        DataParallel(module, TWO, executor=executor)(x)
    for name, layer in (("0", module[:1]), ("2", module[:3])):
        got = torch.cat(sorted(activations[name], key=lambda out: out[0, 0].item()))
        parts = sorted(module[: len(layer)](x).chunk(2), key=lambda out: out[0, 0].item())
        assert_close_tree(got, torch.cat(parts))


Note = Callable[[Tensor], Any]


class Controller:
    __slots__ = ("model", "note")

    def __init__(self, model: nn.Module, note: Note) -> None:
        self.model, self.note = model, note

    def __call__(self, *_: Any) -> None:
        self.note(next(self.model.parameters()))


class Registered(nn.Linear):
    models: ClassVar[list[Any]] = []
    note: Note

    def forward(self, input: Tensor) -> Tensor:
        self.note(self.models[-1].weight)
        return super().forward(input)


class Listed(nn.Module):
    """Parts in containers that are no modules."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.layer, self.note = nn.Linear(3, 2).double(), note
        self.parts = [{"a": (self.layer, {self.layer})}]

    def forward(self, x: Tensor) -> Tensor:
        first, others = self.parts[0]["a"]
        assert first is next(iter(others)) is self.layer
        self.note(first.weight)
        return self.layer(x)


class Parent(nn.Module):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.child: Any = nn.Tanh()
        self.child.parent = weakref.ref(self)
        self.child.register_forward_hook(lambda child, *_: note(child.parent().weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.weight


def with_way_back(way: str) -> Callable[[Note], nn.Module]:
    def make(note: Note) -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
        by_name = weakref.WeakValueDictionary({"model": model})
        models["model"], first = model, model[0]
        hooks: dict[str, Callable[..., Any]] = {
            "closure": lambda *_: note(model[0].weight),
            "closure-of-a-child": lambda *_: note(first.weight),
            "default": lambda *_, model=model: note(model[0].weight),
            "global": lambda *_: note(models["model"][0].weight),
            "object": Controller(model, note),
            "partial": functools.partial(lambda model, *_: note(model[0].weight), model),
            "weak-values": lambda *_: note(by_name["model"][0].weight),
        }
        model[1].register_forward_hook(hooks[way])
        return model

    return make


def registered(note: Note) -> nn.Module:
    model = Registered(3, 2).double()
    model.note = note
    Registered.models.append(model)
    return model


models: Any = {}
WAYS = ["closure", "closure-of-a-child", "default", "global", "object", "partial", "weak-values"]
BACK: dict[str, Callable[[Note], nn.Module]] = {way: with_way_back(way) for way in WAYS}
BACK |= {"attribute-of-the-class": registered, "containers": Listed, "weak-reference": Parent}


@each_executor
@pytest.mark.parametrize("make", BACK.values(), ids=BACK)
def test_every_way_back_to_the_model_leads_to_the_replica(make: Any, executor: Any):
    """Torch's replicas find the weights of the module itself, on the first device."""
    seen: list[Tensor] = []
    module = make(seen.append)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, executor=executor)(numbers(5, 3))
    assert len(set(map(id, seen))) == 3
    assert_like_one_device(module, numbers(5, 3))


def test_a_hook_that_closes_over_the_model_and_uses_it():
    model = mlp()
    model[3].register_forward_hook(lambda module, args, out: out * model[0].weight.sum())
    assert_like_one_device(model, numbers(5, 3))


def test_backward_hooks():
    model, x = mlp(), numbers(5, 3).requires_grad_()
    seen: list[Any] = []
    model[3].register_full_backward_hook(lambda module, inner, outer: seen.append((inner[0], outer[0])))
    model[0].register_full_backward_pre_hook(lambda module, outer: (2 * outer[0],))
    assert_like_one_device(model, x)
    seen.clear()
    out = DataParallel(model, TWO)(x)
    out.backward(numbers(5, 2))
    seen.sort(key=lambda pair: -len(pair[0]))
    assert [len(inner) for inner, _ in seen] == [3, 2]
    assert_close_tree(torch.cat([outer for _, outer in seen]), numbers(5, 2))


def test_backward_hooks_of_the_wrapper_run_once():
    module, seen = nn.Linear(3, 2).double(), []
    shim, x = DataParallel(module, ["cpu"] * 3), numbers(5, 3).requires_grad_()
    shim.register_full_backward_hook(lambda shim, inner, outer: seen.append((inner[0], outer[0])))
    shim(x).backward(numbers(5, 2))
    assert len(seen) == 1
    assert_close_tree(seen[0], (numbers(5, 2) @ module.weight.detach(), numbers(5, 2)))


def test_hooks_of_parameters_run_once():
    module, seen = nn.Linear(3, 2).double(), []
    module.weight.register_hook(lambda grad: seen.append("hook") or 2 * grad)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    loss_of(DataParallel(module, TWO)(numbers(4, 3))).backward()
    assert seen == ["hook", "accumulated"]


def test_hooks_removed_while_they_run():
    module, seen = nn.Linear(3, 2).double(), []

    def once(*_: Any) -> None:
        seen.append(1)
        handle.remove()

    handle = module.register_forward_hook(once)
    shim = DataParallel(module, TWO, executor="sequential")
    shim(numbers(4, 3))
    shim(numbers(4, 3))
    assert 1 <= len(seen) <= 2


def test_global_hooks():
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        DataParallel(nn.ReLU(), TWO)(numbers(4))
    finally:
        handle.remove()
    assert seen == ["ReLU", "ReLU", "DataParallel"]


# ---------------------------------------------------------------- parameters inside


def test_parameters_are_there_inside():
    """Torch's replicas have no parameters."""
    seen: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(([name for name, _ in self.named_parameters()], list(self.state_dict()), self.weight))
            penalty = sum(parameter.square().sum() for parameter in self.parameters())
            return super().forward(input) + penalty

    module = nn.Sequential(Looks(3, 2)).double()
    DataParallel(module, TWO)(numbers(4, 3))
    names = ["weight", "bias"]
    assert [each[:2] for each in seen] == [(names, names)] * 2
    assert len({id(each[2]) for each in seen}) == 2
    assert_like_one_device(module, numbers(4, 3))


def test_unused_parameters_keep_no_gradient():
    """Torch gives them zeros."""
    module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).double()
    module.forward = lambda x: module["used"](x)
    other = Half()
    for each in (module, other):
        loss_of(DataParallel(each, TWO)(numbers(4, 3))).backward()
    assert module["unused"].weight.grad is None
    assert other.unused.grad is None
    assert other.used.weight.grad is not None


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2).double(), nn.Parameter(numbers(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_replicas_that_somebody_keeps_stay_as_they_are():
    kept: list[nn.Module] = []

    class Kept(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            kept.append(self)
            return super().forward(input)

    module, x = Kept(3, 2).double(), numbers(4, 3)
    shim = DataParallel(module, TWO)
    shim(x)
    states = [dict(replica.named_parameters()) for replica in kept]
    with torch.no_grad():
        shim(x)
    shim(2 * x)
    assert len(set(map(id, kept))) == 6
    for replica, state in zip(kept[:2], states, strict=True):
        assert all(now is state[name] for name, now in replica.named_parameters())


def test_sparse_gradients():
    module = nn.Embedding(5, 2, sparse=True).double()
    rows = torch.arange(8) % 3
    DataParallel(module, ["cpu"] * 3)(rows).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert_same_tree(grad.to_dense(), torch.tensor([3.0, 3, 2, 0, 0]).double()[:, None].expand(5, 2))


def test_zero_grad_of_a_replica_warns():
    class Clears(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with pytest.warns(UserWarning, match=r"Calling .zero_grad\(\) from a module created with nn.DataParallel"):
                self.zero_grad()
            return super().forward(input)

    module = Clears(3, 2).double()
    loss_of(nn.functional.linear(numbers(1, 3), module.weight)).backward()
    before = module.weight.grad
    DataParallel(module, TWO, executor="sequential")(numbers(4, 3))
    assert module.weight.grad is before


def test_frozen_parameters_stay_frozen():
    module, seen = mlp(), []
    module[0].requires_grad_(False)
    module[0].register_forward_hook(lambda module, *_: seen.append(module.weight.requires_grad))
    assert_like_one_device(module, numbers(5, 3))
    assert not any(seen)
    assert module[0].weight.grad is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.b.weight = self.a.weight
        self.shared = nn.ModuleList([self.a, self.a])

    def forward(self, x: Tensor) -> Tensor:
        assert self.a.weight is self.b.weight
        assert self.shared[0] is self.shared[1] is self.a
        return self.b(torch.tanh(self.shared[1](self.shared[0](x))))


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([numbers(3), numbers(3) * 2, numbers(0, 3)])
        self.dict = nn.ParameterDict({"a": numbers(3), "b": numbers(1)})
        self.nothing = nn.Parameter(numbers(0))
        self.register_parameter("none", None)
        self.missing: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert (self.none, self.missing, self.list[2].shape, self.nothing.shape) == (None, None, (0, 3), (0,))
        assert len(list(self.parameters())) == 6
        return torch.tanh(x * self.list[0] + self.list[1]) * self.dict["a"] + self.dict["b"] + self.nothing.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 2, dtype=torch.complex128))
        self.phase: Any = nn.Buffer(numbers(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.is_complex()
        assert self.phase.is_complex()
        return (x.to(torch.complex128) @ self.weight * self.phase).abs()


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, 2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1).expand(-1, 5, -1) * torch.arange(1, 6).reshape(-1, 1))[0]


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        lengths = (10 * x[:, 0].detach().abs()).long() % 3 + 1
        x = x.unsqueeze(1).expand(-1, 5, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)[0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
        self.into = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.into(x).unsqueeze(1).expand(-1, 3, -1))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, padding_idx=0).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 10).long() % 5)


def parametrized() -> nn.Module:
    layer = nn.Linear(3, 3).double()
    parametrizations.weight_norm(layer)
    parametrizations.orthogonal(other := nn.Linear(3, 3).double())
    return nn.Sequential(layer, other)


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(3, 2).double(), "weight", 2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "containers": Containers,
    "complex": Complex,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "packs": Packs,
    "transformer": Attends,
    "embedding": Embeds,
    "parametrized": parametrized,
    "pruned": pruned,
    "graph-module": lambda: torch.fx.symbolic_trace(mlp()),
    "empty": lambda: nn.Sequential(nn.Identity(), nn.ModuleList(), nn.Tanh())[::2],
    "bilinear": lambda: nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.PReLU(3)).double(),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_of_all_kinds(make: Any):
    torch.manual_seed(0)
    module = make()
    for slots in (1, 2, 4):
        assert_like_one_device(module, numbers(7, 3), slots=slots)


def test_parametrizations_may_be_cached():
    torch.manual_seed(0)
    module = parametrized()
    want = run(module, module, numbers(5, 3))
    with many_cores(), parametrize.cached():
        for _ in range(2):
            assert_close_tree(run(DataParallel(module, TWO), module, numbers(5, 3)), want)


def test_lazy_modules_are_refused_until_they_have_run():
    module, x = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()).double().eval(), numbers(4, 3)
    message = "Modules with uninitialized parameters can't be used with `DataParallel`. Run a dummy forward pass"
    for call in (DataParallel(module, TWO), lambda x: data_parallel(module, x, TWO)):
        with pytest.raises(RuntimeError, match=message):
            call(x)
    DataParallel(module, ["cpu"])(x)  # a dummy forward pass on one device
    assert_like_one_device(module, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace", "inside"])
def test_scripted_modules(kind: str):
    plain = mlp()
    if kind == "trace":
        module: Any = torch.jit.trace(plain, numbers(2, 3))
    else:
        module = torch.jit.script(plain)
    if kind == "inside":
        module = nn.Sequential(module, nn.Linear(2, 2).double())
    assert_like_one_device(module, numbers(5, 3))
    assert_same_tree(DataParallel(module, TWO)(numbers(0, 3)).detach(), module(numbers(0, 3)).detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_buffers_of_scripted_modules():
    plain = nn.BatchNorm1d(3).double()
    module = torch.jit.script(copy.deepcopy(plain))
    for _ in range(2):
        DataParallel(module, TWO)(numbers(6, 3))
        plain(numbers(3, 3))
    assert_close_tree(dict(module.state_dict()), dict(plain.state_dict()))


# ---------------------------------------------------------------- checkpoints


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 2)).double()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.options)


@each_executor
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoints_inside(use_reentrant: bool, preserve: bool, executor: Any):
    module = Checkpointed(0.0, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    x = numbers(5, 3).requires_grad_()
    want = torch.autograd.grad(loss_of(module.body(x)), [x, *module.parameters()])
    shim = DataParallel(module, TWO, executor=executor)
    with many_cores():
        for _ in range(2):
            module.zero_grad()
            x.grad = None
            first, second = shim(x), shim(2 * x.detach().requires_grad_())
            del second
            loss_of(first).backward()
            assert_close_tree([x.grad, *(p.grad for p in module.parameters())], list(want))


@each_executor
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_with_dropout_draw_the_same_again(use_reentrant: bool, executor: Any):
    """The gradient of a row is the product that its own output was made with."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        def inner(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight, 0.5)

    module, x = Drops(), torch.ones(64, 2, dtype=torch.float64, requires_grad=True)
    with many_cores():
        out = DataParallel(module, ["cpu"] * 4, executor=executor)(x)
        torch.rand(3)
        out.sum().backward()
    assert_close_tree(x.grad, out.detach())
    assert_close_tree(module.weight.grad, out.detach().sum())


@each_executor
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_writes_as_on_one_device(use_reentrant: bool, executor: Any):
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.norm, x, use_reentrant=use_reentrant)

    module = Norms()
    one, other = copy.deepcopy(module), copy.deepcopy(module)
    x, y = numbers(6, 3).requires_grad_(), numbers(6, 3).requires_grad_()
    with many_cores():
        loss_of(DataParallel(module, TWO, executor=executor)(x)).backward()
    loss_of(torch.cat([one(y[:3]), other(y[3:])])).backward()
    assert_close_tree(x.grad, y.grad)
    assert_close_tree(dict(module.named_buffers()), dict(one.named_buffers()))


def test_a_checkpoint_around_the_wrapper():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    got = run(lambda x: checkpoint(shim, x, use_reentrant=False), module, x)
    assert_close_tree(got, run(module, module, x))


# ---------------------------------------------------------------- transforms and compilers


def test_functional_call_of_the_wrapper():
    """Torch refuses it."""
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    params = {name: 2 * parameter.detach() for name, parameter in shim.named_parameters()}
    own = {name.removeprefix("module."): tensor for name, tensor in params.items()}
    before = copy.deepcopy(module.state_dict())
    got = torch.func.functional_call(shim, params, (x,))
    assert_close_tree(got, torch.func.functional_call(module, own, (x,)))
    assert_same_tree(module.state_dict(), before)


def losses(module: nn.Module) -> tuple[Any, Any, dict[str, Tensor]]:
    shim = DataParallel(module, TWO)

    def loss_with(model: nn.Module, prefix: str) -> Callable[..., Tensor]:
        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            named = {prefix + name: tensor for name, tensor in params.items()}
            return loss_of(torch.func.functional_call(model, named, (x,)))

        return loss

    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return loss_with(shim, "module."), loss_with(module, ""), params


TRANSFORMS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "grad": lambda loss, params, x: torch.func.grad(loss)(params, x),
    "grad-of-input": lambda loss, params, x: torch.func.grad(loss, 1)(params, x),
    "vjp": lambda loss, params, x: torch.func.vjp(loss, params, x)[1](torch.ones((), dtype=x.dtype)),
    "jvp": lambda loss, params, x: torch.func.jvp(lambda x: loss(params, x), (x,), (2 * x,)),
    "jvp-of-params": lambda loss, params, x: torch.func.jvp(lambda p: loss(p, x), (params,), (params,)),
    "hessian": lambda loss, params, x: torch.func.hessian(loss, 1)(params, x),
    "jacrev": lambda loss, params, x: torch.func.jacrev(loss)(params, x),
    "vmap": lambda loss, params, x: torch.func.vmap(loss, (None, 0))(params, torch.stack([x, 2 * x])),
    "vmap-of-params": lambda loss, params, x: torch.func.vmap(loss, (0, None))(
        {name: torch.stack([p, 2 * p, 3 * p]) for name, p in params.items()}, x
    ),
    "per-sample": lambda loss, params, x: torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x.unsqueeze(1)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_over_the_wrapper(transform: Any):
    got, want, params = losses(mlp())
    x = numbers(4, 3)
    with many_cores():
        assert_close_tree(transform(got, params, x), transform(want, params, x))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_the_wrapper_as_it_is(transform: str):
    module, x = mlp(), numbers(4, 3)
    shim = DataParallel(module, TWO)
    function: Any = {
        "grad": lambda model: torch.func.grad(lambda x: loss_of(model(x)))(x),
        "jvp": lambda model: torch.func.jvp(model, (x,), (x,)),
        "vmap": lambda model: torch.func.vmap(model)(torch.stack([x, 2 * x])),
    }[transform]
    assert_close_tree(function(shim), function(module))


def test_forward_mode():
    module, x = mlp(), numbers(4, 3)
    shim = DataParallel(module, TWO)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, 2 * x)
        got, want = (torch.autograd.forward_ad.unpack_dual(model(dual)) for model in (shim, module))
    assert_close_tree(tuple(got), tuple(want))


CAPTURED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: loss_of(model(x)))(x),
    "vmap": lambda model, x: torch.func.vmap(model)(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize("transform", CAPTURED.values(), ids=CAPTURED)
def test_buffers_that_a_transform_may_not_write(transform: Any):
    """As on one device: a loud error."""
    module, x = nn.BatchNorm1d(3).double(), numbers(6, 3)
    one = copy.deepcopy(module)
    message = r"mutate a captured Tensor|Batch norm got a batched tensor"
    with pytest.raises((RuntimeError, ValueError), match=message):
        transform(one, x)
    with pytest.raises((RuntimeError, ValueError), match=message):
        transform(DataParallel(module, TWO), x)
    assert_same_tree(module.state_dict(), one.state_dict())
    module.eval()
    assert_close_tree(transform(DataParallel(module, TWO), x), transform(module, x))


def test_buffers_of_a_functional_call_are_those_that_were_given():
    module, x = nn.BatchNorm1d(3).double(), numbers(6, 3)
    before, one = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    shim = DataParallel(module, TWO)
    params = {name: parameter.detach() for name, parameter in shim.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in shim.named_buffers()}

    def loss(params: Any, buffers: Any) -> tuple[Tensor, Any]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        return loss_of(torch.func.functional_call(shim, (params, buffers), (x,))), buffers

    grads, after = torch.func.grad(loss, has_aux=True)(params, buffers)
    one(x[:3])
    assert_close_tree(
        {name.removeprefix("module."): buffer for name, buffer in after.items()}, dict(one.named_buffers())
    )
    assert_same_tree(module.state_dict(), before)
    want = torch.autograd.grad(loss_of(shim(x)), [*module.parameters()])
    assert_close_tree(list(grads.values()), list(want))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiled: Any = functools.partial(torch.compile, backend="eager")
COMPILED: dict[str, Callable[[nn.Sequential], tuple[Any, nn.Module]]] = {
    "module": lambda module: (DataParallel(compiled(module), TWO), module),
    "wrapper": lambda module: (compiled(DataParallel(module, TWO)), module),
    "module.compile": lambda module: (DataParallel(compiled_inside(module), TWO), module),
    "child.compile": lambda module: (DataParallel(compiled_child(module), TWO), module),
    "wrapper.compile": lambda module: (compiled_inside(DataParallel(module, TWO)), module),
}


def compiled_inside(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def compiled_child(module: nn.Sequential) -> nn.Module:
    module[3].compile(backend="eager")
    return module


# The compiler asks for the `.grad` of parameters, which copies have none of; it hides the warning itself.
hides_its_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@hides_its_warning
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_compiled(make: Any):
    plain, x = mlp(), numbers(6, 3)
    shim, module = make(copy.deepcopy(plain))
    want = run(plain, plain, x)
    with many_cores():
        for _ in range(3):
            assert_close_tree(run(shim, module, x), want)
        with torch.no_grad():
            module[0].weight.mul_(2)
            plain[0].weight.mul_(2)
            assert_close_tree(shim(x), plain(x))
            assert_close_tree(shim(x[:5]), plain(x[:5]))


@hides_its_warning
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("where", ["module", "wrapper"])
def test_buffers_of_compiled_modules(where: str):
    module, x = nn.BatchNorm1d(3).double(), numbers(6, 3)
    one = copy.deepcopy(module)
    if where == "module":
        shim: Any = DataParallel(compiled(module), TWO)
    else:
        shim = compiled(DataParallel(module, TWO))
    for _ in range(3):
        shim(x)
        one(x[:3])
    assert_close_tree(module.state_dict(), one.state_dict())


@pytest.mark.usefixtures("fresh_compiler")
def test_exported():
    module, x = mlp(), numbers(6, 3)
    program = torch.export.export(DataParallel(module, TWO), (x,))
    assert_close_tree(program.module()(2 * x), module(2 * x))


def test_fake_and_meta_tensors():
    with torch._subclasses.FakeTensorMode():
        assert DataParallel(nn.Linear(3, 2), TWO)(torch.ones(5, 3)).shape == (5, 2)
    assert DataParallel(nn.Linear(3, 2, device="meta"), ["meta"] * 2)(torch.ones(5, 3, device="meta")).is_meta


@each_executor
def test_saved_tensor_hooks_reach_every_replica(executor: Any):
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    module, x = mlp(), numbers(4, 3).requires_grad_()
    want = run(module, module, x)
    with many_cores(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = run(DataParallel(module, ["cpu"] * 4, executor=executor), module, x)
        several, _ = len(packed), packed.clear()
        module(x)
    assert_close_tree(got, want)
    assert several >= 4 * len(packed)


def test_in_sequence_random_numbers_repeat():
    shim = DataParallel(nn.Dropout(0.5), ["cpu"] * 3, executor="sequential")
    outs = []
    for _ in range(2):
        torch.manual_seed(0)
        outs.append(shim(torch.ones(64)))
    assert_same_tree(outs[0], outs[1])
    first, second, _ = outs[0].split(22)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- copies that are used again


def change_by_numpy(module: nn.Linear) -> None:
    module.weight.detach().numpy()[0, 0] = 7


def change_by_swap(module: nn.Linear) -> None:
    module.weight.detach().numpy()[[0, 1]] = module.weight.detach().numpy()[[1, 0]]


def change_by_optimizer(module: nn.Linear) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module(numbers(4, 3)).sum().backward()
    optimizer.step()


def change_by_set(module: nn.Linear) -> None:
    module.weight.data = numbers(2, 3) * 3


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in-place": lambda module: module.weight.mul_(2),
    "optimizer": change_by_optimizer,
    "data": lambda module: module.weight.data.mul_(2),
    "data-of-one": lambda module: module.weight.data[1, 1].add_(1e-9),
    "negated": lambda module: module.weight.data.neg_(),
    "numpy": change_by_numpy,
    "set-data": change_by_set,
    "new-parameter": lambda module: setattr(module, "weight", nn.Parameter(numbers(2, 3) * 5)),
    "load": lambda module: module.load_state_dict({"weight": numbers(2, 3) * 3, "bias": numbers(2)}),
    "load-assign": lambda module: module.load_state_dict(
        {"weight": numbers(2, 3) * 3, "bias": numbers(2)}, assign=True
    ),
    "inference-mode": lambda module: change_in_inference_mode(module),
    "vector": lambda module: nn.utils.vector_to_parameters(torch.arange(8.0, dtype=torch.float64), module.parameters()),
    "swapped-rows": change_by_swap,
    "swapped-columns": lambda module: module.weight.data.copy_(module.weight.data.flip(1).clone()),
    "exchanged": lambda module: exchange(module.weight, module.bias),
}


def change_in_inference_mode(module: nn.Linear) -> None:
    with torch.inference_mode():
        module.weight.mul_(2)


def exchange(weight: Tensor, bias: Tensor) -> None:
    """Two numbers of the same tensor change places, behind torch's back."""
    array = weight.detach().numpy()
    array[0, 0], array[1, 2] = array[1, 2].copy(), array[0, 0].copy()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies_are_never_stale(change: Any, mode: Any):
    module, x = nn.Linear(3, 2).double(), numbers(6, 3)
    shim: Any = DataParallel(module, ["cpu"] * 3)
    for _ in range(3):
        with mode():
            assert_close_tree(shim(x), module(x))
        with torch.no_grad():
            change(module)
        with mode():
            assert_close_tree(shim(x), module(x))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copies_of_frozen_parameters_are_never_stale(change: Any):
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    shim, x = DataParallel(module, ["cpu"] * 3), numbers(6, 3)
    for _ in range(2):
        module[0].requires_grad_(False)
        assert_close_tree(run(shim, module, x), run(module, module, x))
        module[0].requires_grad_(True)
        with torch.no_grad():
            change(module[0])
        module[0].requires_grad_(False)
        assert_close_tree(run(shim, module, x), run(module, module, x))


def test_a_transposed_parameter_is_another():
    module, x = nn.Linear(3, 3).double(), numbers(6, 3)
    shim = DataParallel(module, TWO)
    with torch.no_grad():
        shim(x)
        module.weight.data = module.weight.data.T
        assert_close_tree(shim(x), module(x))


def test_a_copy_that_forward_writes_is_not_used_again():
    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            self.weight.data.zero_()
            return out

    module, x = Writes(3, 2).double(), numbers(4, 3)
    weight = module.weight.detach().clone()
    with torch.no_grad():
        want = nn.functional.linear(x, weight, module.bias)
        got = DataParallel(module, TWO)(x)
        assert_close_tree(got, want)
        assert_same_tree(module.weight.detach(), torch.zeros(2, 3, dtype=torch.float64))
        assert_close_tree(DataParallel(module, TWO)(x), module(x))


@pytest.mark.parametrize("grad", [True, False])
def test_copies_that_forward_writes_through_data_are_not_used_again(grad: bool):
    """Only the second replica writes to its own copy."""

    class Writes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            if 100 in input:
                self.weight.data.zero_()
            return out

    module, x = Writes(3, 2).double(), numbers(4, 3)
    shim = DataParallel(module, TWO)
    with torch.set_grad_enabled(grad):
        bad = x.clone()
        bad[3] = 100
        shim(bad)
        assert module.weight.abs().sum() > 0
        assert_close_tree(shim(x).detach(), module(x).detach())


def test_switching_between_gradients_and_none():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    want = run(module, module, x)
    for _ in range(3):
        with torch.no_grad():
            assert_close_tree(shim(x), want[0])
        with torch.inference_mode():
            assert_close_tree(shim(x), want[0])
        assert_close_tree(run(shim, module, x), want)


def call_from_threads(call: Callable[[int], Any], count: int = 8, repeats: int = 5) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def caller(i: int) -> None:
        try:
            start.wait(30)
            for _ in range(repeats):
                call(i)
        except BaseException as error:
            failures.append(error)

    with side_by_side(4):
        threads = [threading.Thread(target=caller, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [False, True])
def test_calls_from_many_threads(mode: Any, in_place: bool):
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    if in_place:
        module[2].register_forward_hook(lambda layer, args, out: out * module[0].weight.sum())
    shim = DataParallel(module, ["cpu"] * 4)
    inputs = [(i + 1) * numbers(5 + i, 3) for i in range(8)]
    want = [module(x).detach() for x in inputs]

    def call(i: int) -> None:
        with mode():
            assert_close_tree(shim(inputs[i]).detach(), want[i])

    call_from_threads(call)


def test_gradients_from_many_threads():
    module = mlp()
    shim = DataParallel(module, ["cpu"] * 4)
    inputs = [(i + 1) * numbers(5 + i, 3) for i in range(8)]
    want = [run(module, module, x) for x in inputs]
    call_from_threads(lambda i: assert_close_tree(run(shim, module, inputs[i]), want[i]))


# ---------------------------------------------------------------- memory


LEFT: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch-norm": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(),
    "lstm": lambda: Recurrent(nn.LSTM),
    "checkpoint": lambda: Checkpointed(0.5, use_reentrant=False),
    "hooks": lambda: with_hook(mlp()),
}


def with_hook(module: nn.Module) -> nn.Module:
    module.register_full_backward_hook(lambda module, inner, outer: None)
    return module


@each_executor
@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("grad", [True, False])
def test_nothing_of_a_call_is_kept(make: Any, grad: bool, executor: Any):
    """In torch's words: a forward creates no reference cycles."""
    shim = DataParallel(make(), ["cpu"] * 3, executor=executor)
    seen: list[Any] = []
    shim.module.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(args[0])))
    with many_cores(), torch.set_grad_enabled(grad):
        shim(numbers(8, 3))  # whatever is made once
        seen.clear()
        with without_collector():
            x = numbers(8, 3).clone().requires_grad_(grad)
            out = shim(x)
            if grad:
                loss_of(out).backward()
            refs = [weakref.ref(x), weakref.ref(out), *seen]
            del x, out
            assert [ref() for ref in refs] == [None] * len(refs)
    assert len(seen) == 3


@each_executor
def test_nothing_of_a_failed_call_is_kept(executor: Any):
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            refs.append(weakref.ref(input))
            if input.min() < 0:
                raise ValueError("negative")
            return super().forward(input)

    refs: list[Any] = []
    shim = DataParallel(Picky(3, 2).double(), ["cpu"] * 3, executor=executor)
    with many_cores(), without_collector():
        x = -numbers(6, 3).abs()
        refs.append(weakref.ref(x))
        with contextlib.suppress(ValueError):
            shim(x)
        del x
        assert len(refs) == 4
        assert [ref() for ref in refs] == [None] * 4


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_the_module_is_garbage_when_it_is_dropped(make: Any):
    module = make()
    shim = DataParallel(module, ["cpu"] * 3)
    with many_cores():
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                shim(numbers(8, 3))
    refs = [weakref.ref(module), weakref.ref(shim), *map(weakref.ref, module.parameters())]
    del module, shim
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_without_cycles_of_its_own_it_is_freed_at_once():
    with without_collector():
        module = mlp()
        shim = DataParallel(module, TWO)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                shim(numbers(4, 3))
        refs = [weakref.ref(module), weakref.ref(shim), *map(weakref.ref, module.parameters())]
        del module, shim
        assert [ref() for ref in refs] == [None] * len(refs)


def test_parameters_that_are_replaced_are_freed():
    module = nn.Linear(3, 2).double()
    shim = DataParallel(module, TWO)
    with torch.no_grad():
        shim(numbers(4, 3))
        old = weakref.ref(module.weight)
        module.weight = nn.Parameter(numbers(2, 3))
        shim(numbers(4, 3))
    gc.collect()
    assert old() is None


# ---------------------------------------------------------------- what each replica does, it does once


class Normalises(nn.Module):
    """Writes to its input before it looks at the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.calls: list[int] = []

    def forward(self, batch: dict[str, Tensor], seen: list[int]) -> Tensor:
        seen.append(len(batch["x"]))
        x = batch.pop("x")
        x.sub_(0.5).mul_(3)
        return cast(Tensor, checkpoint(self.linear, x, use_reentrant=False))


@each_executor
def test_effects_before_a_checkpoint_happen_once(executor: Any):
    module = Normalises()
    shim = DataParallel(module, ["cpu"] * 4, executor=executor)
    for _ in range(2):
        x, y, seen = numbers(8, 3), numbers(8, 3), []
        with many_cores():
            out = shim({"x": x}, seen)
        want = module({"x": y}, [])
        assert_close_tree(out, want)
        assert_same_tree(x, y)
        assert seen == [2] * 4


def test_a_hook_may_write_to_a_buffer_that_it_holds():
    module = nn.Linear(2, 2)
    module.register_buffer("calls", torch.zeros(1))
    calls = module.get_buffer("calls")

    def count(*_: Any) -> None:
        calls.add_(1)

    module.register_forward_hook(count)
    DataParallel(module, ["cpu"] * 4, executor="sequential")(torch.zeros(4, 2))
    assert module.get_buffer("calls") is calls
    assert calls.item() == 4  # as in torch: they share the tensor


def test_a_buffer_that_is_a_parameter_s_data():
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("view", self.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(2)
            return x * self.weight

    module = Doubles()
    for _ in range(2):
        DataParallel(module, TWO)(torch.ones(4, 2))
    assert_same_tree(module.weight.data, torch.full((2,), 4.0))


def test_a_buffer_that_is_set_anew_leaves_the_old_one_alone():
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.arange(4.0))
            self.register_buffer("head", self.get_buffer("bank")[:2])
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("cache", None)
            self.register_buffer("mask", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.head, self.count = torch.full((3,), -1.0), self.get_buffer("count") + 1
            self.cache, self.mask = torch.ones(2), None
            return x

    module, history = Sets(), []
    shim = DataParallel(module, TWO)
    for _ in range(3):
        shim(numbers(4))
        history.append(module.get_buffer("count"))
    assert_same_tree(module.get_buffer("bank"), torch.arange(4.0))
    assert_same_tree(module.get_buffer("head"), torch.full((3,), -1.0))
    assert [count.item() for count in history] == [1, 2, 3]
    assert_same_tree(module.get_buffer("cache"), torch.ones(2))
    assert module.mask is None
    DataParallel(Sets(), TWO, buffers="mean")(numbers(4))


@each_executor
def test_a_factory_that_leads_back_to_the_module(executor: Any):
    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()
            self.made = defaultdict(self.make)

        def make(self) -> Tensor:
            return self.linear.weight.sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.made["sum"]

    module = Lazily()
    one = copy.deepcopy(module)
    shim = DataParallel(module, TWO, executor=executor)
    params = {f"module.{name}": 2 * p.detach() for name, p in module.named_parameters()}
    want = torch.func.functional_call(one, {name[7:]: p for name, p in params.items()}, (numbers(4, 3),))
    assert_close_tree(torch.func.functional_call(shim, params, (numbers(4, 3),)), want)


def test_collectors_are_those_of_the_caller():
    def collect(x: Tensor, seen: list[int], by_name: dict[str, int]) -> Tensor:
        seen.append(len(x))
        by_name[str(len(x))] = len(x)
        return x

    class Collects(nn.Module):
        def forward(self, x: Tensor, seen: list[int], *, by_name: dict[str, int]) -> Tensor:
            return collect(x, seen, by_name)

    seen: list[int] = []
    by_name: dict[str, int] = {}
    DataParallel(Collects(), TWO, executor="sequential")(numbers(5), seen, by_name=by_name)
    assert (seen, by_name) == ([3, 2], {"3": 3, "2": 2})
