"""Batch norm over all slots, against torch's on one device."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp.nn import SyncBatchNorm, convert_sync_batchnorm
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import many_cores, side_by_side

pytestmark = pytest.mark.usefixtures("float64")

CLASSES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-length": (nn.BatchNorm1d, (2,)),
    "2d": (nn.BatchNorm2d, (2, 1)),
    "3d": (nn.BatchNorm3d, (1, 2, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-affine": {"affine": False},
    "no-bias": {"bias": False},
    "no-statistics": {"track_running_stats": False},
    "neither": {"affine": False, "track_running_stats": False},
    "cumulative": {"momentum": None},
    "momentum": {"momentum": 0.7, "eps": 0.1},
    "momentum-0": {"momentum": 0.0},
}
SPLITS = [(n, rows) for n in (1, 2, 3, 4) for rows in sorted({n, n + 1, 5 * n - 1})]
TWO, THREE = fdp.virtual_devices(2), fdp.virtual_devices(3)


def filled(module: Any) -> Any:
    """The module with different numbers in every parameter and buffer."""
    for i, (name, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        if tensor.is_floating_point():
            values = numbers(*tensor.shape) / (i + 2)
            tensor.data.copy_(1 + values if name.endswith(("weight", "var")) and tensor.ndim == 1 else values)
    return module


def network(**options: Any) -> nn.Module:
    norm = nn.BatchNorm1d(3, **options)
    return filled(nn.Sequential(nn.Linear(2, 3), norm, nn.Tanh(), nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sigmoid()))


def steps(module: nn.Module, run: Callable[[Any, Any, Tensor], Any], xs: list[Tensor]) -> Any:
    """Outputs, gradients and buffers of some steps, each of which begins with the buffers of the one before."""
    apply, (params, buffers) = fdp.functional(module)
    found = []
    for x in xs:
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        x = x.clone().requires_grad_()
        out, buffers = run(apply, (leaves, buffers), x)
        grads = torch.autograd.grad((out * numbers(*out.shape)).square().sum(), [x, *leaves.values()])
        found.append((out, list(grads), buffers))
    return found


def on_one(apply: Any, state: Any, x: Tensor) -> Any:
    return apply(state, x)


def on(n: int, **options: Any) -> Callable[[Any, Any, Tensor], Any]:
    devices = fdp.virtual_devices(n)
    return lambda apply, state, x: fdp.dp_apply(apply, state, x, devices, **options)


def batch(rows: int, *shape: int) -> Tensor:
    return numbers(rows, *shape) * 3 + 1


# ---- the law


@few()
@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CLASSES)
def test_equals_one_device(kind, options, executor):
    made, spatial = CLASSES[kind]
    module = filled(made(3, **OPTIONS[options]))
    converted = convert_sync_batchnorm(module)
    with many_cores():
        for n, rows in SPLITS:
            if rows == 1 and not spatial:
                continue
            xs = [batch(rows, 3, *spatial), batch(rows, 3, *spatial).flip(0) ** 2]
            assert_close_tree(steps(converted, on(n, executor=executor), xs), steps(module, on_one, xs))


@pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
def test_in_a_network(executor):
    module = network(momentum=None)
    converted = convert_sync_batchnorm(module)
    with side_by_side():
        for n, rows in SPLITS[1:]:
            xs = [batch(rows, 2), batch(rows + 1, 2)]
            assert_close_tree(steps(converted, on(n, executor=executor), xs), steps(module, on_one, xs))


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_value_and_grad(n, executor):
    module = network()
    apply, state = fdp.functional(convert_sync_batchnorm(module))
    single, _ = fdp.functional(module)
    x, y = batch(2 * n + 1, 2), numbers(2 * n + 1, 2)

    def loss_of(run: Any) -> Any:
        def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
            out, buffers = run((params, buffers), x)
            return (out - y).square().mean(), buffers

        return loss

    options: dict[str, Any] = {"devices": fdp.virtual_devices(n), "executor": executor, "in_dims": (None, None, 0, 0)}
    step = fdp.value_and_grad(loss_of(apply), has_aux=True, aux_dims="mean", **options)
    with many_cores():
        (value, buffers), grads = step(*state, x, y)
        want_grads, (want, want_buffers) = torch.func.grad_and_value(loss_of(single), has_aux=True)(*state, x, y)
        assert_close_tree([value, grads, buffers], [want, want_grads, want_buffers])
        (_, again), _ = step(state[0], buffers, x, y)
        assert_close_tree(again["1.num_batches_tracked"], torch.tensor(2))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_transformed_outside(n):
    module = network()
    apply, (params, buffers) = fdp.functional(convert_sync_batchnorm(module))
    single, _ = fdp.functional(module)
    x, tangent = batch(5, 2), numbers(5, 2).cos()
    devices = fdp.virtual_devices(n)

    def split(params: Any, x: Tensor) -> Any:
        return fdp.dp_apply(apply, (params, buffers), x, devices)

    def whole(params: Any, x: Tensor) -> Any:
        return single((params, buffers), x)

    def squares(run: Any) -> Any:
        return lambda params, x: run(params, x)[0].square().sum()

    assert_close_tree(torch.func.grad(squares(split))(params, x), torch.func.grad(squares(whole))(params, x))

    def of_rows(run: Any, x: Tensor) -> Any:
        pushed = torch.func.jvp(lambda x: run(params, x)[0], (x,), (tangent,))
        return pushed, torch.func.hessian(lambda x: squares(run)(params, x))(x)

    assert_close_tree(of_rows(split, x), of_rows(whole, x), 1e-8)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_mapped_outside(n):
    """Torch's own writes statistics of all examples to one buffer, and raises: so the oracle is a loop."""
    module = network()
    apply, state = fdp.functional(convert_sync_batchnorm(module))
    single, _ = fdp.functional(module)
    xs = batch(3, 5, 2)
    got = torch.func.vmap(lambda x: fdp.dp_apply(apply, state, x, fdp.virtual_devices(n)))(xs)
    outs, buffers = zip(*(single(state, x) for x in xs), strict=True)
    want = {name: torch.stack([each[name] for each in buffers]) for name in buffers[0]}
    assert_close_tree(got, (torch.stack(outs), want))


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_differentiated_inside(executor):
    module = network()
    apply, state = fdp.functional(convert_sync_batchnorm(module))
    single, _ = fdp.functional(module)
    x = batch(5, 2)

    def gradient(run: Any) -> Any:
        def loss(params: Any, buffers: Any, x: Tensor) -> Any:
            out, buffers = run((params, buffers), x)
            return out.square().sum(), (out, buffers)

        return lambda state, x: torch.func.grad(loss, has_aux=True)(*state, x)

    def step(state: Any, x: Tensor) -> Any:
        grads, (out, buffers) = gradient(apply)(state, x)
        return fdp.psum(grads), (out, buffers)

    with many_cores():
        got = fdp.dp_apply(step, state, x, THREE, executor=executor, out_dims=(None, (0, "mean")))
    assert_close_tree(got, gradient(single)(state, x))


def test_double_backward():
    module = network()
    apply, (params, buffers) = fdp.functional(convert_sync_batchnorm(module))
    x = batch(5, 2).requires_grad_()

    def of(run: Any) -> Tensor:
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    got = of(lambda x: fdp.dp_apply(apply, (params, buffers), x, THREE)[0])
    assert_close_tree(got, of(lambda x: fdp.functional(module)[0]((params, buffers), x)[0]), 1e-8)


def test_sizes_that_differ_between_slots():
    """What counts is values, not rows."""
    module = SyncBatchNorm(2)
    apply, state = fdp.functional(module)
    items = [batch(1, 2, length) for length in (1, 4, 2)]
    outs, buffers = fdp.dp_apply(
        lambda state, items: (lambda out: ([out[0]], out[1]))(apply(state, items[0])),
        *(state, items, THREE),
        in_dims="items",
        out_dims=("items", "mean"),
    )
    want, want_buffers = fdp.functional(nn.BatchNorm1d(2))[0](state, torch.cat(items, 2))
    assert_close_tree([torch.cat(outs, 2), buffers], [want, want_buffers])


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("rows", [0, 2, 3])
def test_slots_without_rows(rows, executor):
    module = filled(nn.BatchNorm1d(3))
    apply, state = fdp.functional(convert_sync_batchnorm(module))
    x = batch(rows, 3)
    slots = fdp.virtual_devices(5)

    def step(state: Any, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Any:
            out, buffers = apply((params, state[1]), x)
            return out.pow(3).sum(), (out, buffers)

        grads, (out, buffers) = torch.func.grad(loss, (0, 1), has_aux=True)(state[0], x)
        return out, grads, buffers

    with many_cores():
        out, grads, buffers = fdp.parallel_apply(
            step, fdp.replicate(state, slots), fdp.scatter(x, slots, keep_empty=True), executor=executor
        )
    want_out, want_grads, want_buffers = step_on_one(module, state, x)
    assert [len(each) for each in out.shards] == [1] * rows + [0] * (5 - rows)
    assert_close_tree(torch.cat(out.shards), want_out)
    assert_close_tree(torch.cat([each[1] for each in grads.shards]), want_grads[1])
    summed = {name: sum(each[0][name] for each in grads.shards) for name in state[0]}
    assert_close_tree(summed, want_grads[0])
    for each in buffers.shards:
        assert_close_tree(each, want_buffers)


def step_on_one(module: nn.Module, state: Any, x: Tensor) -> Any:
    apply, _ = fdp.functional(module)

    def loss(params: Any, x: Tensor) -> Any:
        out, buffers = apply((params, state[1]), x)
        return out.pow(3).sum(), (out, buffers)

    grads, (out, buffers) = torch.func.grad(loss, (0, 1), has_aux=True)(state[0], x)
    return out, grads, buffers


def test_large_numbers():
    """The variance of numbers far from 0 keeps its digits."""
    x = (numbers(64, 2) + 1e4).float()
    module = SyncBatchNorm(2, dtype=torch.float32)
    apply, state = fdp.functional(module)
    out, buffers = fdp.dp_apply(apply, state, x, fdp.virtual_devices(4))
    want = nn.BatchNorm1d(2)
    torch.testing.assert_close(out.double(), want(x.double()), rtol=0, atol=2e-3)
    torch.testing.assert_close(buffers["running_var"].double(), want.running_var, rtol=1e-3, atol=0)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, mixed):
    """Sums are in float32: 3000 ones in bfloat16 add up to 256."""
    module = SyncBatchNorm(2, dtype=torch.float32 if mixed else dtype)
    apply, state = fdp.functional(module)
    x = (1 + numbers(3000, 2) / 8).to(dtype)
    out, buffers = fdp.dp_apply(apply, state, x, THREE)
    want = nn.BatchNorm1d(2)
    wanted = want(x.double())
    assert out.dtype is dtype
    assert [each.dtype for each in buffers.values()] == [*[torch.float32 if mixed else dtype] * 2, torch.int64]
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(buffers["running_mean"].double(), want.running_mean, rtol=1e-2, atol=1e-3)
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(fdp.dp_apply(apply, state, x, THREE)[0].pow(3).sum(), x)
    assert grad.dtype is dtype
    assert grad.isfinite().all()


@pytest.mark.deep
def test_compiled():
    """The graph breaks at the batch norm, which runs as it is."""
    module = network()
    apply, state = fdp.functional(convert_sync_batchnorm(module))
    single, _ = fdp.functional(module)
    torch._dynamo.reset()
    compiled = torch.compile(lambda state, x: apply(state, x), backend="eager")
    x = batch(5, 2)
    assert_close_tree(fdp.dp_apply(compiled, state, x, TWO, out_dims=(0, "mean")), single(state, x))


# ---- without communication


@pytest.mark.parametrize("kind", CLASSES)
def test_eval_is_row_wise(kind):
    made, spatial = CLASSES[kind]
    module = filled(made(3)).eval()
    xs = [batch(4, 3, *spatial)]
    converted = convert_sync_batchnorm(module)
    assert_close_tree(steps(converted, on(3, executor="sequential"), xs), steps(module, on_one, xs))
    apply, state = fdp.functional(converted)
    fdp.dp_apply(lambda s, x: apply(s, x)[0] if fdp.axis_index() else x, state, xs[0], TWO)  # one slot alone


def test_eval_without_statistics_is_that_of_all_slots():
    module = filled(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    xs = [batch(4, 3)]
    assert_close_tree(steps(convert_sync_batchnorm(module), on(3), xs), steps(module, on_one, xs))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CLASSES)
def test_outside_it_is_an_ordinary_batch_norm(kind, options):
    made, spatial = CLASSES[kind]
    theirs = filled(made(3, **OPTIONS[options]))
    ours = convert_sync_batchnorm(theirs)
    for rows in (2, 3, 0):
        x = batch(rows, 3, *spatial)
        assert_close_tree(ours(x), theirs(x))
        assert_close_tree(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert_close_tree(ours.eval()(x), theirs.eval()(x))


def test_another_axis_is_none_of_its_own():
    module = SyncBatchNorm(2, axis_name="rows")
    apply, state = fdp.functional(module)
    x = batch(4, 2)
    own = torch.cat([apply(state, part)[0] for part in x.split(2)])
    assert_close_tree(fdp.dp_apply(apply, state, x, TWO)[0], own)
    assert_close_tree(fdp.dp_apply(apply, state, x, TWO, axis_name="rows")[0], nn.BatchNorm1d(2)(x))


# ---- statistics are rebound


@pytest.mark.parametrize("options", ["default", "cumulative"])
def test_statistics_are_not_written_to_by_apply(options):
    module = filled(SyncBatchNorm(2, **OPTIONS[options]))
    apply, state = fdp.functional(module)
    with unharmed(list(module.buffers()), *state):
        apply(state, batch(3, 2))
        fdp.dp_apply(apply, state, batch(3, 2), TWO)


@pytest.mark.parametrize("order", [1, 2])
def test_captured_by_torch_func_grad(order):
    """What the module keeps are plain tensors, which outlive the transform."""
    ours, theirs = filled(SyncBatchNorm(2)), filled(nn.BatchNorm1d(2))
    x = batch(4, 2)

    def loss(x: Tensor) -> Tensor:
        return ours(x).pow(3).sum()

    def summed(x: Tensor) -> Tensor:
        return torch.func.grad(loss)(x).square().sum()

    torch.func.grad(loss if order == 1 else summed)(x)
    theirs(x)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in ours.buffers())
    assert not any(buffer.requires_grad for buffer in ours.buffers())
    assert_close_tree(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_forward_mode_keeps_no_tangents():
    module = filled(SyncBatchNorm(2))
    x = batch(4, 2)
    torch.func.jvp(module, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        module(torch.autograd.forward_ad.make_dual(x, x))
        assert all(torch.autograd.forward_ad.unpack_dual(each).tangent is None for each in module.buffers())
    assert module.num_batches_tracked == 2
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in module.buffers())


@pytest.mark.parametrize("n", [1, 2])
def test_inference_mode(n):
    module = SyncBatchNorm(2)
    apply, state = fdp.functional(module)
    x = batch(4, 2)
    with torch.inference_mode():
        _, buffers = fdp.dp_apply(apply, state, x, fdp.virtual_devices(n))
        module(x)
    assert_close_tree(buffers, dict(module.named_buffers()))
    module.eval()(x.requires_grad_()).sum().backward()  # which an inference tensor could not be saved for


def test_statistics_that_were_removed():
    theirs = filled(nn.BatchNorm1d(2, momentum=None))
    ours = convert_sync_batchnorm(theirs)
    for module in (ours, theirs):
        module.num_batches_tracked = None
    x = batch(3, 2)
    for n in (1, 2):
        assert_close_tree(steps(ours, on(n), [x]), steps(theirs, on_one, [x]))


# ---- conversion


class Block(nn.Module):
    """One batch norm under two names, and one that a list holds too."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm2d(2)
        self.b = self.a
        self.c = nn.BatchNorm3d(2, affine=False)
        self.linear = nn.Linear(2, 2)
        self.held = [self.c]

    def forward(self, x):
        return self.linear(self.b(self.a(x)))


def test_conversion():
    module = Block()
    module.a.eval()
    module.a.weight.requires_grad_(False)
    module.linear.bias.requires_grad_(False)
    module.c.to(torch.float32)
    module.a.note = "kept"
    with unharmed(list(module.parameters()), list(module.buffers())):
        converted = convert_sync_batchnorm(module, "rows")
    assert [type(part) for part in converted.children()] == [SyncBatchNorm, SyncBatchNorm, nn.Linear]
    assert type(module.a) is nn.BatchNorm2d
    assert converted.a is converted.b
    assert converted.held == [converted.c]
    assert converted.a.axis_name == converted.c.axis_name == "rows"
    assert (converted.a.training, converted.c.training, converted.a.note) == (False, True, "kept")
    assert [p.requires_grad for p in converted.parameters()] == [p.requires_grad for p in module.parameters()]
    assert_same_tree(dict(converted.state_dict()), dict(module.state_dict()))
    storages = {p.data_ptr() for p in module.state_dict().values()}
    assert storages.isdisjoint(p.data_ptr() for p in converted.state_dict().values())


def test_conversion_keeps_hooks():
    module = nn.Sequential(nn.BatchNorm1d(2))
    seen = []
    module[0].register_forward_hook(lambda part, args, out: seen.append(type(part)))
    convert_sync_batchnorm(module)(batch(3, 2))
    assert seen == [SyncBatchNorm]


class Own(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def test_conversion_refuses():
    with pytest.raises(TypeError, match=r"0\.1 \(Own\), 1 \(ParametrizedBatchNorm1d\): no SyncBatchNorm does"):
        convert_sync_batchnorm(
            nn.Sequential(
                nn.Sequential(nn.Identity(), Own(2)),
                nn.utils.parametrize.register_parametrization(nn.BatchNorm1d(2), "weight", nn.Identity()),
            )
        )
    with pytest.raises(TypeError, match=r"module \(Own\)"):
        convert_sync_batchnorm(Own(2))
    with pytest.raises(ValueError, match=r"0: lazy, without a shape yet; run a dummy forward first"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d(affine=False, track_running_stats=False)))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got type"):
        convert_sync_batchnorm(nn.BatchNorm1d)


@pytest.mark.parametrize("options", OPTIONS)
def test_state_dicts_go_both_ways(options):
    theirs, ours = filled(nn.BatchNorm2d(3, **OPTIONS[options])), SyncBatchNorm(3, **OPTIONS[options])
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    back = nn.BatchNorm2d(3, **OPTIONS[options])
    back.load_state_dict(ours.state_dict())
    assert_same_tree(dict(back.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_copies(twin):
    module = convert_sync_batchnorm(network(), "rows")
    other = twin(module)
    assert type(other[1]) is SyncBatchNorm
    assert other[1].axis_name == "rows"
    assert_close_tree(other(batch(3, 2)), module(batch(3, 2)))


# ---- DataParallel


@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
def test_data_parallel(executor):
    single = network()
    model = convert_sync_batchnorm(single)
    parallel = fdp.DataParallel(model, ["cpu"] * 3, executor=executor)
    with many_cores():
        for rows in (4, 7, 2, 9):
            x, y = batch(rows, 2).requires_grad_(), batch(rows, 2).requires_grad_()
            out, want = parallel(x), single(y)
            assert_close_tree(out, want)
            out.square().sum().backward()
            want.square().sum().backward()
            assert_close_tree(x.grad, y.grad)
            assert_close_tree(dict(model.state_dict()), dict(single.state_dict()))
    got, wanted = ({name: p.grad for name, p in module.named_parameters()} for module in (model, single))
    assert_close_tree(got, wanted)
    assert_close_tree(parallel.eval()(x), single.eval()(x))


# ---- errors


@pytest.mark.parametrize("n", [1, 2])
def test_one_value_in_all(n):
    apply, state = fdp.functional(SyncBatchNorm(2))
    slots = fdp.virtual_devices(n)
    x = fdp.scatter(batch(1, 2), slots, keep_empty=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        fdp.parallel_apply(apply, fdp.replicate(state, slots), x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        torch.func.grad(lambda x: apply(state, x)[0].sum())(batch(1, 2))


def test_inputs_that_do_not_fit():
    module = SyncBatchNorm(2)
    with pytest.raises(ValueError, match="expected at least 2 dimensions"):
        module(batch(2))
    with pytest.raises(ValueError, match=r"expected 2 channels, got input size torch.Size\(\[3, 1\]\)"):
        module(batch(3, 1))
    with pytest.raises(TypeError, match=r"expected a floating-point input, got torch\.int64"):
        module(torch.ones(3, 2, dtype=torch.int64))


def test_a_slot_that_skips_it():
    apply, state = fdp.functional(SyncBatchNorm(2))

    def some(state: Any, x: Tensor) -> Any:
        return apply(state, x)[0] if fdp.axis_index() == 0 else x

    with pytest.raises(RuntimeError, match="psum in shard 0 waits for shard 1, which has returned"):
        fdp.dp_apply(some, state, batch(4, 2), TWO)
