"""torch.func, compilers and exporters, over a DataParallel and inside of it."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import loss_of, mlp, run

TWO = ["cpu", "cpu"]
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


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
def test_buffers_of_a_compiled_wrapper():
    module, x = nn.BatchNorm1d(3).double(), numbers(6, 3)
    one, shim = copy.deepcopy(module), compiled(DataParallel(module, TWO))
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
