"""DataParallel and data_parallel: how they are made, and that values and gradients are those of one device."""

import inspect
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import DataParallel, data_parallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import COUNTS, numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import Apply, mlp, value_and_grads

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


# ---------------------------------------------------------------- construction


def test_signature_starts_as_torch_s():
    for mine, theirs in ((DataParallel, nn.DataParallel), (data_parallel, nn.parallel.data_parallel)):
        own, wanted = inspect.signature(mine).parameters, inspect.signature(theirs).parameters
        assert list(own)[: len(wanted)] == list(wanted)
        for name, parameter in wanted.items():
            assert (own[name].default, own[name].kind) == (parameter.default, parameter.kind)
        assert all(own[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(own)[len(wanted) :])


@pytest.mark.parametrize("device_ids", [["cpu", "cpu"], ("cpu:0", CPU), fdp.virtual_devices(2)], ids=repr)
@pytest.mark.parametrize("output_device", [None, "cpu", CPU], ids=repr)
def test_attributes(device_ids: Any, output_device: Any):
    module = mlp()
    shim = DataParallel(module, device_ids, output_device, -1)
    assert shim.module is module
    assert (shim.device_ids, shim.output_device, shim.src_device_obj, shim.dim) == ([CPU, CPU], CPU, CPU, -1)
    assert isinstance(shim, nn.Module)
    assert not isinstance(shim, nn.DataParallel)
    assert DataParallel[nn.Linear] is not None


@no_accelerator
@pytest.mark.parametrize(
    "device_ids", [None, [0, 1], ["cuda:0"], [torch.device("cuda", 1), 0], range(3), [], "cuda:0"], ids=repr
)
def test_passes_through_without_an_accelerator(device_ids: Any):
    """Torch has no dim, output_device and src_device_obj then."""
    returned: list[Any] = [None, 3, OrderedDict(), {1}, object()]
    module = Apply(lambda *args, **kwargs: (args, kwargs, returned))
    shim = DataParallel(module, device_ids, output_device=1, dim=3)
    assert (shim.device_ids, shim.output_device, shim.src_device_obj, shim.dim) == ([], None, None, 3)
    args, kwargs = (numbers(2), 1, None, torch.tensor(3.0)), {"x": numbers(5), "n": "s"}
    got_args, got_kwargs, got = shim(*args, **kwargs)
    assert all(a is b for a, b in zip(got_args, args, strict=True))
    assert got_kwargs == kwargs
    assert got is returned


@no_accelerator
def test_the_function_passes_through_without_an_accelerator():
    """Torch raises RuntimeError("device type could not be determined")."""
    module, x = mlp(), numbers(5, 3)
    assert_same_tree(data_parallel(module, x), module(x))
    assert_same_tree(data_parallel(module, x, [0, 1], 1, module_kwargs={}), module(x))


wrong: Any = DataParallel
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "function": (lambda: wrong(torch.sin, TWO), TypeError, r"expected a torch.nn.Module, got builtin_function"),
    "class": (lambda: wrong(nn.ReLU, TWO), TypeError, "expected a torch.nn.Module, got type"),
    "number": (lambda: wrong(mlp(), 4), TypeError, r"device_ids=4 is a bare number.*virtual_devices\(4\)"),
    "bool": (lambda: wrong(mlp(), [True]), TypeError, "True is no device"),
    "set": (
        lambda: wrong(mlp(), {"cpu"}),
        TypeError,
        "device_ids must be None, .* sequence of devices, got set",
    ),
    "generator": (lambda: wrong(mlp(), (d for d in TWO)), TypeError, "sequence of devices, got generator"),
    "unknown": (lambda: wrong(mlp(), ["gpu"]), ValueError, "'gpu' is no device that torch knows. Available"),
    "none": (lambda: wrong(mlp(), ["cpu", None]), TypeError, "None is no device"),
    "output": (lambda: wrong(mlp(), TWO, "gpu"), ValueError, "'gpu' is no device that torch knows. Available"),
    "output-list": (lambda: wrong(mlp(), TWO, ["cpu"]), TypeError, r"\['cpu'\] is no device"),
    "output-bool": (lambda: wrong(mlp(), TWO, True), TypeError, "True is no device"),
    "dim": (lambda: wrong(mlp(), TWO, dim="0"), TypeError, "dim must be an int, got '0'"),
    "dim-none": (lambda: wrong(mlp(), TWO, dim=None), TypeError, "dim must be an int, got None"),
    "weights-few": (lambda: wrong(mlp(), TWO, weights=[1]), ValueError, "1 weights for 2 slots"),
    "weights-zero": (lambda: wrong(mlp(), TWO, weights=[0, 0]), ValueError, "finite, not negative and not all"),
    "weights-negative": (lambda: wrong(mlp(), TWO, weights=[-1, 2]), ValueError, r"got \[-1.0, 2.0\]"),
    "weights-number": (lambda: wrong(mlp(), TWO, weights=2), TypeError, "must be a sequence of numbers.*got 2"),
    "executor": (lambda: wrong(mlp(), TWO, executor="fork"), ValueError, "no executor 'fork'; expected 'auto'"),
    "nested": (
        lambda: wrong(DataParallel(mlp(), TWO), TWO),
        TypeError,
        "the module is a DataParallel already; pass its .module",
    ),
    "nested-torch": (lambda: wrong(nn.DataParallel(mlp()), TWO), TypeError, "DataParallel already; pass its"),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_mistakes_are_named_when_it_is_built(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=f"^DataParallel: .*{message}"):
        make()


@no_accelerator
@pytest.mark.parametrize("device_ids", [["cpu", 0], ["cpu", "cuda:0"]], ids=str)
def test_devices_must_exist_beside_a_cpu(device_ids: Any):
    with pytest.raises(
        ValueError, match=r"(no accelerator with index 0|'cuda:0' is not available)\. Available here: 'cpu'"
    ):
        DataParallel(mlp(), device_ids)


def test_the_function_names_itself():
    with pytest.raises(TypeError, match=r"data_parallel: expected a torch.nn.Module, got builtin_function"):
        data_parallel(torch.sin, numbers(2), TWO)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="data_parallel: 'gpu' is no device"):
        data_parallel(mlp(), numbers(2), ["gpu"])


def test_a_wrapper_of_one_device_may_wrap_another():
    module, x = mlp(), numbers(5, 3)
    assert_close_tree(DataParallel(DataParallel(module, TWO), ["cpu"])(x), module(x))


def test_a_wrapper_may_be_part_of_a_wrapped_module():
    module, x = mlp(), numbers(7, 3)
    shim = DataParallel(nn.Sequential(DataParallel(module, TWO), nn.Tanh()), TWO)
    assert_close_tree(value_and_grads(shim, module, x), value_and_grads(lambda x: torch.tanh(module(x)), module, x))


def test_attributes_of_the_module_are_reached_through_it():
    shim = DataParallel(nn.Linear(2, 3), TWO)
    with pytest.raises(AttributeError, match="no attribute 'out_features'"):
        shim.out_features  # noqa: B018
    assert shim.module.out_features == 3


def test_parameters_elsewhere_are_found_at_forward():
    shim = DataParallel(mlp().to("meta"), TWO)
    message = (
        r"module must have its parameters and buffers on device cpu \(device_ids\[0\]\) but found one of them on "
        "device: meta"
    )
    with pytest.raises(RuntimeError, match=message):
        shim(numbers(2, 3))
    with pytest.raises(RuntimeError, match=message):
        data_parallel(mlp().to("meta"), numbers(2, 3), TWO)
    norm = nn.BatchNorm1d(3).double()
    norm.running_mean = torch.zeros(3, device="meta")
    with pytest.raises(RuntimeError, match=message):
        DataParallel(norm, TWO)(numbers(2, 3))


def test_one_device_moves_the_module_several_do_not():
    assert DataParallel(nn.Linear(2, 2), ["meta"]).module.weight.is_meta
    assert not DataParallel(nn.Linear(2, 2), ["meta", "meta"]).module.weight.is_meta


# ---------------------------------------------------------------- as on one device


@few(4)
@each_executor
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 8, 9, 36])
def test_values_and_gradients_are_those_of_one_device(slots: int, rows: int, executor: Any):
    module, x = mlp(), numbers(rows, 3)
    with many_cores():
        got = value_and_grads(DataParallel(module, ["cpu"] * slots, executor=executor), module, x)
    assert_close_tree(got, value_and_grads(module, module, x))


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dim(slots: int, dim: int):
    x = numbers(3, 4, 5)
    module = Apply(lambda x: x.sin())
    assert_same_tree(DataParallel(module, ["cpu"] * slots, dim=dim)(x), x.sin())
    assert_same_tree(data_parallel(module, x, ["cpu"] * slots, None, dim), x.sin())


def test_backward_adds_up_over_replicas_and_calls():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    want = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
    for _ in range(2):
        shim(x).square().sum().backward()
    assert_close_tree([parameter.grad for parameter in module.parameters()], [2 * grad for grad in want])


def test_replicas_run_side_by_side():
    meeting, threads = threading.Barrier(4), set()

    class Meets(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            threads.add(threading.get_ident())
            meeting.wait(30)
            return super().forward(input)

    with many_cores():
        DataParallel(Meets(3, 2).double(), ["cpu"] * 4, executor="threads")(numbers(4, 3))
    assert len(threads) == 4


def test_in_sequence_replicas_run_in_the_calling_thread():
    seen: list[Any] = []
    module = Apply(lambda x: seen.append((threading.get_ident(), len(x))) or x)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, executor="sequential")(numbers(5))
    assert seen == [(threading.get_ident(), rows) for rows in (2, 2, 1)]
