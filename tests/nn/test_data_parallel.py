"""The class DataParallel and data_parallel: what goes in, how it is split, what comes out, and what goes wrong."""

import contextvars
import copy
import inspect
import io
import pickle
import re
import threading
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import DataParallel, data_parallel
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Keywords, KnownToOptree, KnownToTorch, Late, Output, Point, tensors_of
from tests.common.numbers import COUNTS, numbers
from tests.common.threads import many_cores

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()


class Apply(nn.Module):
    """A module of a function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def outputs_of(fn: Callable[..., Any], *args: Any, slots: int = 2, **options: Any) -> Any:
    return DataParallel(Apply(fn), ["cpu"] * slots, **options)(*args)


def value_and_grads(run: Callable[..., Tensor], module: nn.Module, *inputs: Tensor) -> Any:
    """The value, and the gradients in inputs and parameters of a loss that no two elements enter alike."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    wanted = [*leaves, *module.parameters()]
    grads = torch.autograd.grad((out * numbers(*out.shape)).sum(), wanted, materialize_grads=True)
    return out.detach(), grads


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
    "buffers": (lambda: wrong(mlp(), TWO, buffers="last"), ValueError, "must be 'first' or 'mean', got 'last'"),
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


def test_differentiable_twice():
    module, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double(), numbers(3, 2).requires_grad_()
    shim = DataParallel(module, TWO)
    assert torch.autograd.gradgradcheck(lambda x, *_: shim(x), (x, *module.parameters()))


def test_replicas_run_side_by_side():
    meeting, threads = threading.Barrier(4), set()

    class Meets(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            threads.add(threading.get_ident())
            meeting.wait(30)
            return super().forward(input)

    with many_cores():
        DataParallel(Meets(3, 2).double(), ["cpu"] * 4)(numbers(4, 3))
    assert len(threads) == 4


def test_in_sequence_replicas_run_in_the_calling_thread():
    seen: list[Any] = []
    module = Apply(lambda x: seen.append((threading.get_ident(), len(x))) or x)
    with many_cores():
        DataParallel(module, ["cpu"] * 3, executor="sequential")(numbers(5))
    assert seen == [(threading.get_ident(), rows) for rows in (2, 2, 1)]


# ---------------------------------------------------------------- what is split how


def sizes_seen(rows: int, slots: int, **options: Any) -> list[int]:
    seen: list[int] = []
    module = Apply(lambda x: seen.append(len(x)) or x)
    DataParallel(module, ["cpu"] * slots, executor="sequential", **options)(numbers(rows))
    return seen


@pytest.mark.parametrize("slots", [2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 9, 15])
def test_rows_are_cut_as_torch_chunk_does(rows: int, slots: int):
    assert sizes_seen(rows, slots) == [len(part) for part in torch.arange(rows).chunk(slots)]


def test_zero_rows_reach_every_slot():
    assert sizes_seen(0, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [([1, 1, 1, 1], [3, 2, 2, 2]), ([2, 1, 0, 0], [6, 3]), ([0, 0, 1, 2], [3, 6]), ([0, 1, 0, 0], [9])],
    ids=str,
)
def test_weights(weights: Any, sizes: list[int]):
    assert sizes_seen(9, 4, weights=weights) == sizes
    module, x = mlp(), numbers(9, 3)
    got = value_and_grads(DataParallel(module, ["cpu"] * 4, weights=weights), module, x)
    assert_close_tree(got, value_and_grads(module, module, x))


def test_a_last_row_alone_fails_batch_norm_and_equal_weights_help():
    module, x = nn.BatchNorm1d(3).double(), numbers(7, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        DataParallel(module, ["cpu"] * 3)(x)
    assert "in shard 2 of 3, rows 6:7, on cpu" in caught.value.__notes__
    out = DataParallel(module, ["cpu"] * 3, weights=[1] * 3)(x)
    want = [nn.BatchNorm1d(3).double()(part) for part in x.split([3, 2, 2])]
    assert_close_tree(out.detach(), torch.cat(want).detach())


def row_sums(tree: Any) -> Tensor:
    return torch.stack([tensor.reshape(len(tensor), -1).sum(1) for tensor in tensors_of(tree)]).sum(0)


Pair = namedtuple("Pair", "a b")
INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, (x + 1, x * 2)),
    "list": lambda x: [x, [x + 1], ()],
    "dict": lambda x: {"b": x, "a": {"c": x + 1}, "e": {}},
    "ordered-dict": lambda x: OrderedDict(b=x, a=x + 1),
    "defaultdict": lambda x: defaultdict(list, b=x, a=[x + 1]),
    "deque": lambda x: deque([x, x + 1]),
    "namedtuple": lambda x: Pair(x, Point(x + 1, None)),
    "structseq": lambda x: torch.return_types.max((x, x + 1)),
    "dataclass": lambda x: Batch(x, [x + 1]),
    "dataclass-frozen": lambda x: Keywords(x=x, y=Batch(x + 1)),
    "dataclass-late": lambda x: Late([x]),
    "dataclass-dict": lambda x: Output(logits=x, hidden=(x + 1, x)),
    "known-to-optree": lambda x: KnownToOptree(x, [x + 1]),
    "known-to-torch": lambda x: KnownToTorch(x, x + 1),
    "same-twice": lambda x: [x, x],
    "with-others": lambda x: (x, None, "s", 3, 2.5, True, [x + 1, torch.float64, len]),
}
each_container = pytest.mark.parametrize("container", INPUTS.values(), ids=INPUTS)


@each_container
def test_inputs_of_all_kinds_are_split(container: Any):
    """Torch gives every replica the whole of a dataclass."""
    x = numbers(5, 2).requires_grad_()
    types: list[Any] = []

    def fn(tree: Any, *, named: Any) -> Tensor:
        types.extend((type(tree), type(named)))
        return row_sums(tree) * 2 + row_sums(named)

    with unharmed(x):
        got = outputs_of(lambda tree: fn(tree, named=tree), container(x))
        shim = DataParallel(Apply(fn), ["cpu"] * 3)
        named = shim(container(x), named=container(x))
    want = row_sums(container(x)) * 3
    for out in (got, named):
        assert_close_tree(out, want)
        assert_close_tree(torch.autograd.grad(out, x, numbers(5)), torch.autograd.grad(want, x, numbers(5), True))
    assert set(types) == {type(container(x))}


@each_container
def test_outputs_of_all_kinds_are_joined(container: Any):
    """Torch fails on a dataclass, and makes garbage of a str."""
    x = numbers(5, 2)
    for slots in COUNTS:
        assert_same_tree(outputs_of(container, x, slots=slots), container(x))


def test_lists_are_not_split_their_elements_are():
    x, seen = numbers(4, 2), []
    outputs_of(lambda names, xs: seen.append((names, len(xs), xs[0].shape)) or xs[0], ["a", "b", "c"], [x, x])
    assert seen == [(["a", "b", "c"], 2, (2, 2))] * 2


def test_other_objects_go_by_reference():
    things = (object(), [], {}, "s", {1: 2}, lambda: None)
    seen: list[Any] = []
    outputs_of(lambda x, *others: seen.append(others) or x, numbers(4), *things)
    assert len(seen) == 2
    for others in seen:
        assert others == things
        assert others[0] is things[0]
        assert others[5] is things[5]


def test_keys_of_dicts_are_not_split():
    """Torch splits them too."""
    key, seen = torch.arange(4), []
    outputs_of(lambda tree: seen.extend(tree) or tree[key], {key: numbers(4)})
    assert all(each is key for each in seen)


def test_0_dim_tensors_go_whole_to_every_slot():
    """Torch cannot chunk them."""
    x, scale = numbers(5), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    out = outputs_of(lambda x, scale: x * scale, x, scale)
    assert_same_tree(out, (x * scale))
    assert_close_tree(torch.autograd.grad(out.sum(), scale), (x.sum(),))


@pytest.mark.parametrize(
    "args", [(), (None,), (3, "s"), (torch.tensor(2.0),), ([], {}), ({"a": [None]},)], ids=lambda args: str(args)
)
@pytest.mark.parametrize("slots", [1, 3])
def test_where_nothing_is_split_the_module_runs_once(args: Any, slots: int):
    """Torch runs it on every device, and returns as many outputs."""
    calls: list[Any] = []

    def fn(*args: Any) -> Tensor:
        calls.append(args)
        return numbers(2, 3)

    assert_same_tree(outputs_of(fn, *args, slots=slots), numbers(2, 3))
    assert len(calls) == 1
    assert_same_tree(calls[0], args)


def test_keyword_arguments_alone():
    module, x = mlp(), numbers(5, 3)
    assert_close_tree(DataParallel(module, TWO)(input=x), module(x))
    assert_close_tree(data_parallel(module, None, TWO, module_kwargs={"input": x}), module(x))


def test_one_row_of_keyword_arguments_and_objects_beside_it():
    """Torch calls surplus replicas without their positional arguments."""
    calls: list[Any] = []

    def fn(x: Tensor, y: Any = None, *, flag: bool = False) -> Tensor:
        calls.append((len(x), flag))
        return x

    x = numbers(1, 2)
    shim = DataParallel(Apply(fn), ["cpu"] * 3)
    assert_same_tree(shim(x, flag=True), x)
    assert_same_tree(shim(x, "other", flag=True), x)
    assert_same_tree(shim(numbers(2, 2), y=3, flag=True), numbers(2, 2))
    assert calls == [(1, True)] * 4


def test_inputs_of_the_function():
    seen: list[Any] = []
    module = Apply(lambda *args, **kwargs: seen.append((args, kwargs)) or numbers(1))
    x = numbers(1)
    for inputs in (x, [x, x], (x, x), (), None, (None,)):
        data_parallel(module, inputs, TWO)
    data_parallel(module, (), TWO, module_kwargs={"y": 3})
    assert [[type(arg) for arg in args] for args, _ in seen] == [
        *([Tensor], [list], [Tensor, Tensor], [], [], [type(None)], [])
    ]
    assert seen[-1] == ((), {"y": 3})


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_that_differ_are_named_before_anything_runs(slots: int):
    """Torch drops the surplus rows silently."""
    calls: list[Any] = []
    shim = DataParallel(Apply(lambda *args, **kwargs: calls.append(args)), ["cpu"] * slots)
    x = numbers(8, 2)
    message = r"rows differ: inputs\[0\]\['a'\] has 8 along dim 0, inputs\[1\] has 1 along dim 0, kwargs\['z'\] has 8"
    with pytest.raises(ValueError, match=f"^DataParallel: {message}") as caught:
        shim({"a": x}, x[:1], z=x)
    assert "in_dims" not in str(caught.value)  # which a DataParallel does not have
    with pytest.raises(ValueError, match=f"^data_parallel: {message}"):
        data_parallel(Apply(print), ({"a": x}, x[:1]), ["cpu"] * slots, module_kwargs={"z": x})
    assert calls == []


class Opaque:
    def __init__(self) -> None:
        self.tensor = numbers(4)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "opaque": (Opaque, r"inputs\[0\]\['k'\]\[1\] is a.* Opaque, which holds tensors.*dataclass"),
    "module": (lambda: nn.Linear(2, 2), r"inputs\[0\]\['k'\]\[1\] is the nn.Module Linear"),
    "numpy": (lambda: numbers(4).numpy(), r"inputs\[0\]\['k'\]\[1\] is a numpy array of shape \(4,\).*as_tensor"),
    "packed": (
        lambda: nn.utils.rnn.pack_sequence([numbers(3), numbers(2)]),
        r"inputs\[0\]\['k'\]\[1\] is a PackedSequence, which cannot be split by rows. Pass the padded tensor",
    ),
    "sparse": (lambda: numbers(4, 2).to_sparse(), r"inputs\[0\]\['k'\]\[1\] is a sparse tensor.*to_dense"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_is_refused(make: Any, message: str):
    """Torch gives every replica the whole, with its tensors on the first device, or splits nonsense."""
    shim = DataParallel(Apply(lambda *_: pytest.fail("it ran")), TWO)
    with pytest.raises(TypeError, match=f"^DataParallel: {message}") as caught:
        shim({"k": [numbers(4), make()]})
    assert "in_dims" not in str(caught.value)


def test_a_dim_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"DataParallel: dim 2 is out of range for inputs\[1\] of shape \(5, 2\)"):
        DataParallel(nn.Bilinear(2, 2, 1), TWO, dim=2)(numbers(5, 2, 2), numbers(5, 2))


def test_shards_are_views_of_the_input():
    x = numbers(4, 2)
    outputs_of(lambda x: x.zero_(), x)
    assert_same_tree(x, torch.zeros_like(x))


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", [1, 4])
def test_0_dim_outputs_become_a_vector(dim: int, rows: int):
    message = (
        f"Was asked to gather along dimension {dim}, but all input tensors were scalars; will instead unsqueeze and "
        "return a vector."
    )
    x = numbers(rows, rows)
    with pytest.warns(UserWarning, match=message):
        out = outputs_of(lambda x: {"loss": x.sum(), "x": x}, x, dim=dim)
    assert_close_tree(out, {"loss": torch.stack([part.sum() for part in x.chunk(2, dim)]), "x": x})


def test_one_device_gives_back_what_the_module_returns():
    returned = {"loss": torch.tensor(1.0), "n": 3, "s": {1}, "o": object()}
    assert outputs_of(lambda x: returned, numbers(4), slots=1) is returned
    error = KeyError("raw")
    with pytest.raises(KeyError, match="raw") as caught:
        outputs_of(lambda x: fail(error), numbers(4), slots=1)
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("value", [None, "text", 3, 2.5, True, float("nan"), torch.float32, (), b"b"], ids=repr)
def test_values_that_are_no_tensors_are_returned_once(value: Any):
    """Torch fails on numbers, and makes garbage of a str."""
    assert_same_tree(outputs_of(lambda x: (x, value), numbers(5)), (numbers(5), value))
    assert_same_tree(outputs_of(lambda x: value, numbers(5)), value)


DIFFERENT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numbers": (lambda x: {"n": len(x)}, r"output\['n'\] differs between shards: 3 in shard 0, 2 in shard 1"),
    "none": (
        lambda x: [x if len(x) == 3 else None],
        r"shards differ in structure: output\[0\] is a leaf in shard 0, None in shard 1",
    ),
    "keys": (lambda x: {str(len(x)): x}, r"shards differ in structure: output is .*'3'.*'2'"),
    "lengths": (lambda x: [x] * len(x), "shards differ in structure: output is .* 3 .*shard 0, .* 2 .*shard 1"),
    "shapes": (lambda x: x[None], r"output has shapes \(1, 3\), \(1, 2\), which cannot be concatenated along dim 0"),
    "dtypes": (lambda x: x if len(x) == 3 else x.float(), "output has dtypes .*float64.*float32"),
    "numpy": (lambda x: x.numpy(), "output is a numpy array, which is not joined: return torch.as_tensor"),
}


@pytest.mark.parametrize(("fn", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_outputs_that_cannot_be_joined_are_named(fn: Any, message: str):
    with pytest.raises(ValueError, match=f"^DataParallel: {message}") as caught:
        outputs_of(fn, numbers(5))
    assert "out_dims says" not in str(caught.value)


def test_outputs_on_the_cpu_by_its_old_name():
    message = "Using -1 to represent CPU tensor is deprecated"
    for slots in (1, 2):
        shim = DataParallel(mlp(), ["cpu"] * slots, output_device=-1)
        with pytest.warns(FutureWarning, match=message):
            out = shim(numbers(3, 3))
        assert_close_tree(out, shim.module(numbers(3, 3)))


def test_output_device_is_honoured_on_one_device():
    """Torch ignores it."""
    out = DataParallel(nn.Linear(3, 2).double(), ["cpu"], output_device="meta")(numbers(5, 3))
    assert (out.device.type, out.shape) == ("meta", (5, 2))


def test_outputs_are_what_one_device_makes_of_requires_grad():
    x = numbers(4, 2)
    kept, left = outputs_of(lambda x: (x * 2, x.detach()), x.requires_grad_())
    assert (kept.requires_grad, left.requires_grad) == (True, False)


# ---------------------------------------------------------------- methods to override


class Traced(DataParallel):
    """Each of the four methods calls torch-like code of its own and notes that it was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.calls.append(f"replicate {len(device_ids)}")
        return super().replicate(module, device_ids)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.calls.append(f"scatter {len(device_ids)}")
        return super().scatter(inputs, kwargs, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.calls.append(f"parallel_apply {len(replicas)} {len(inputs)} {len(kwargs)}")
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.calls.append(f"gather {len(outputs)} {output_device}")
        return super().gather(outputs, output_device)


@pytest.mark.parametrize(
    ("slots", "rows", "calls"),
    [
        (4, 8, ["scatter 4", "replicate 4", "parallel_apply 4 4 4", "gather 4 cpu"]),
        (4, 3, ["scatter 4", "replicate 3", "parallel_apply 3 3 3", "gather 3 cpu"]),
        (2, 1, ["scatter 2", "replicate 1", "parallel_apply 1 1 1", "gather 1 cpu"]),
        (1, 5, ["scatter 1"]),
    ],
)
def test_the_order_of_the_methods(slots: int, rows: int, calls: list[str]):
    shim = Traced(mlp(), ["cpu"] * slots)
    assert_close_tree(shim(numbers(rows, 3)), shim.module(numbers(rows, 3)))
    assert shim.calls == calls


class WithCallback(DataParallel):
    """A pattern of many programs: every part of every replica learns who it is."""

    def replicate(self, module: Any, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        context = [object() for _ in module.modules()]
        for i, replica in enumerate(replicas):
            for j, part in enumerate(replica.modules()):
                part.ctx, part.copy_id = context[j], i
                part.__data_parallel_replicate__(i) if hasattr(part, "__data_parallel_replicate__") else None
        return replicas


class Knows(nn.Linear):
    copy_id: int
    ctx: object
    number: int

    def __data_parallel_replicate__(self, number: int) -> None:
        self.number = number

    def forward(self, input: Tensor) -> Tensor:
        SEEN.append((self.number, self.copy_id, self.ctx, len(input)))
        return super().forward(input)


SEEN: list[Any] = []


@each_executor
def test_replicas_may_be_told_who_they_are(executor: Any):
    module, x = nn.Sequential(Knows(3, 2), nn.Sequential(Knows(2, 2))).double(), numbers(5, 3)
    shim = WithCallback(module, ["cpu"] * 2, executor=executor)
    got = None
    for _ in range(2):
        SEEN.clear()
        with many_cores():
            got = value_and_grads(shim, module, x)
        assert sorted(seen[:2] for seen in SEEN) == [(0, 0), (0, 0), (1, 1), (1, 1)]
        assert len({id(seen[2]) for seen in SEEN}) == 2
        assert {seen[0]: seen[3] for seen in SEEN} == {0: 3, 1: 2}
        assert not any(hasattr(part, "copy_id") or hasattr(part, "number") for part in module.modules())
    for part in module.modules():
        vars(part).update(number=None, copy_id=None, ctx=None)
    assert_close_tree(got, value_and_grads(module, module, x))


def test_replicate_may_change_what_super_returns():
    class Frozen(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [replica.eval() for replica in super().replicate(module, device_ids)]

    module, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double(), numbers(5, 3)
    assert_close_tree(Frozen(module, TWO)(x), module[0](x))
    assert module.training
    assert all(part.training for part in module.modules())


def test_replicate_may_return_other_modules():
    class Copies(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [copy.deepcopy(module) for _ in device_ids]

    class Same(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [module] * len(device_ids)

    class Torch(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return fdp.nn.replicate(module, device_ids, not torch.is_grad_enabled())

    module, x = mlp(), numbers(5, 3)
    assert_close_tree(Copies(module, TWO)(x), module(x))
    for kind in (Same, Torch):
        assert_close_tree(value_and_grads(kind(module, TWO), module, x), value_and_grads(module, module, x))


def test_replicas_that_are_the_module_keep_their_own_buffers():
    class Same(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [module] * len(device_ids)

    norm, other, x = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double(), numbers(6, 3)
    Same(norm, TWO)(x)
    for part in x.chunk(2):
        other(part)
    assert_close_tree(norm.state_dict(), other.state_dict())


def test_scatter_may_be_another():
    class Interleaved(DataParallel):
        """Every second row, in one shard more than there are rows for by chunks."""

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            n = len(device_ids)
            shards = [tuple(tensor[i::n] for tensor in inputs) for i in range(n)]
            return shards, [dict(kwargs, rank=i) for i in range(n)]

    ranks: list[Any] = []
    shim = Interleaved(Apply(lambda x, rank: ranks.append(rank) or x * 2), ["cpu"] * 3, executor="sequential")
    x = numbers(4, 2)
    assert_same_tree(shim(x), torch.cat([x[0::3], x[1::3], x[2::3]]) * 2)
    assert ranks == [0, 1, 2]


def test_scatter_may_change_what_super_returns():
    class Tagged(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            args, keywords = super().scatter(inputs, kwargs, device_ids)
            return args, tuple({**each, "rank": rank} for rank, each in enumerate(keywords))

    shim = Tagged(Apply(lambda x, rank: x + rank), TWO)
    assert_same_tree(shim(numbers(5)), numbers(5) + torch.tensor([0, 0, 0, 1, 1]))


def test_scatter_may_use_fewer_devices():
    class First(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return super().scatter(inputs, kwargs, device_ids[:2])

    seen: list[int] = []
    shim = First(Apply(lambda x: seen.append(len(x)) or x), ["cpu"] * 4, executor="sequential")
    assert_same_tree(shim(numbers(6)), numbers(6))
    assert seen == [3, 3]


def test_parallel_apply_may_be_another():
    class Loop(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [replica(*args, **named) for replica, args, named in zip(replicas, inputs, kwargs, strict=True)]

    class Library(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return fdp.nn.parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    class Scaled(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [2 * out for out in super().parallel_apply(replicas, inputs, kwargs)]

    module, x = mlp(), numbers(5, 3)
    want = value_and_grads(module, module, x)
    for kind in (Loop, Library):
        assert_close_tree(value_and_grads(kind(module, ["cpu"] * 3), module, x), want)
    assert_close_tree(Scaled(module, ["cpu"] * 3)(x), 2 * module(x))


def test_gather_may_be_another():
    class Listed(DataParallel):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return outputs, output_device

    class Mean(DataParallel):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return super().gather([out[None] for out in outputs], output_device).mean()

    x = numbers(4)
    outputs, device = Listed(Apply(lambda x: {len(x): object()}), TWO)(x)
    assert (len(outputs), device) == (2, CPU)
    assert_close_tree(Mean(Apply(lambda x: x.sum()), TWO)(x), x.sum() / 2)


def test_the_methods_work_when_called_by_themselves():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    inputs, kwargs = shim.scatter((x,), {}, shim.device_ids)
    replicas = shim.replicate(shim.module, shim.device_ids)
    outputs = shim.parallel_apply(replicas, inputs, kwargs)
    out = shim.gather(outputs, "cpu")
    assert_close_tree(out, module(x))
    weight = next(module.parameters())
    assert_close_tree(torch.autograd.grad(out.sum(), weight), torch.autograd.grad(module(x).sum(), weight))
    assert [type(replica) for replica in replicas] == [nn.Sequential] * 2


def test_forward_may_be_another():
    """Programs that balance their GPUs copy torch's forward and change it."""

    class Mine(DataParallel):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            shards, named = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(shards)])
            return self.gather(self.parallel_apply(replicas, shards, named), "cpu")

    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), numbers(6, 3)
    other = copy.deepcopy(module)
    got = value_and_grads(Mine(module, TWO), module, x)
    assert_close_tree(got, value_and_grads(DataParallel(other, TWO), other, x))
    assert_close_tree(module.state_dict(), other.state_dict())


class Graph:
    """Nodes, and how many of them: what a library hands to its wrapper one by one."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class OfGraphs(DataParallel):
    """As wrappers of graph libraries are written for torch: forward takes a list, keyword arguments are None."""

    def forward(self, graphs: list[Graph]) -> Any:
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, None)
        return self.gather(outputs, cast(Any, self.output_device))

    def scatter(self, graphs: list[Graph], device_ids: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        each = -(-len(graphs) // len(device_ids))
        parts = [graphs[i : i + each] for i in range(0, len(graphs), each)]
        return [Graph(torch.cat([graph.nodes for graph in part])) for part in parts]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_wrapper_for_lists_of_graphs(count: int):
    class OnNodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, graph: Graph) -> Tensor:
            return self.inner(graph.nodes)

    module, x = OnNodes(), numbers(2 * count, 3)
    wrapped = OfGraphs(module, ["cpu"] * 3)
    got = value_and_grads(lambda x: wrapped([Graph(part) for part in x.split(2)]), module, x)
    assert_close_tree(got, value_and_grads(module.inner, module, x))


def test_scatter_may_leave_out_keyword_arguments():
    class Positional(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return super().scatter(inputs, kwargs, device_ids)[0], None

    module, x = mlp(), numbers(5, 3)
    assert_close_tree(value_and_grads(Positional(module, TWO), module, x), value_and_grads(module, module, x))


@pytest.mark.parametrize("name", ["forward", "replicate", "scatter", "parallel_apply", "gather"])
def test_methods_take_what_torch_s_take(name: str):
    own, torchs = (inspect.signature(getattr(kind, name)) for kind in (DataParallel, nn.DataParallel))
    parts = [[(p.name, p.kind, p.default) for p in each.parameters.values()] for each in (own, torchs)]
    assert parts[0] == parts[1]


def test_lengths_are_compared():
    shim = DataParallel(mlp(), TWO)
    with pytest.raises(AssertionError, match="The number of modules 2 is not equal to the number of inputs 1"):
        shim.parallel_apply([shim.module] * 2, [(1,)], [{}, {}])


# ---------------------------------------------------------------- state


def trip_by_torch(shim: Any) -> Any:
    file = io.BytesIO()
    torch.save(shim, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


TRIPS = {"pickle": lambda shim: pickle.loads(pickle.dumps(shim)), "deepcopy": copy.deepcopy, "torch": trip_by_torch}


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_copies_and_files(trip: Any):
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, ["cpu"] * 3, dim=0, weights=[1, 2, 1], buffers="mean", executor="threads")
    shim(x)
    again = trip(shim)
    assert type(again) is DataParallel
    for name in ("device_ids", "output_device", "src_device_obj", "dim", "_weights", "_executor", "training"):
        assert getattr(again, name) == getattr(shim, name)
    assert_same_tree(again(x).detach(), shim(x).detach())
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert_close_tree(shim(x), module(x))
    assert_close_tree(again(x), again.module(x))


def test_keys_have_the_prefix():
    shim = DataParallel(nn.BatchNorm1d(2), TWO)
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(shim.state_dict()) == [f"module.{name}" for name in names]
    assert [name for name, _ in shim.named_parameters()] == ["module.weight", "module.bias"]


class Inner(nn.Module):
    """A module with a child that is called like the one of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm1d(2),
    "mlp": mlp,
    "inner": Inner,
    "wrapper": lambda: DataParallel(nn.Linear(2, 2), ["cpu"]),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("strict", [True, False])
def test_keys_of_the_wrapper_and_of_the_module_are_taken(make: Any, strict: bool):
    source = make()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    for state in (source.state_dict(), DataParallel(source, ["cpu"]).state_dict()):
        kept = dict(state)
        shim = DataParallel(make(), ["cpu"])
        result = shim.load_state_dict(state, strict)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same_tree(dict(shim.module.state_dict()), dict(source.state_dict()))
        assert dict(state) == kept


def test_versions_of_a_state_dict_are_kept():
    """BatchNorm of version 1 had no num_batches_tracked: only the version tells that it may be missing."""
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    shim = DataParallel(nn.BatchNorm1d(2), TWO)
    with pytest.raises(RuntimeError, match=r'Missing key.*"module.num_batches_tracked"'):
        shim.load_state_dict(state)
    state._metadata[""]["version"] = 1  # pyright: ignore[reportAttributeAccessIssue]
    shim.load_state_dict(state)


@pytest.mark.parametrize("assign", [True, False])
def test_keys_that_do_not_fit_are_named(assign: bool):
    shim = DataParallel(nn.Linear(2, 2), TWO)
    with pytest.raises(RuntimeError, match=r'Missing key.*"module.bias"'):
        shim.load_state_dict({"weight": torch.zeros(2, 2)}, assign=assign)
    with pytest.raises(RuntimeError, match=r'Missing key.*"module.weight", "module.bias".*\n.*Unexpected key.*"other"'):
        shim.load_state_dict({"other": torch.zeros(2)}, assign=assign)
    with pytest.raises(RuntimeError, match="Missing key"):
        shim.load_state_dict({})
    shim.load_state_dict({"weight": torch.zeros(2, 2)}, strict=False, assign=assign)
    assert_same_tree(shim.module.weight.detach(), torch.zeros(2, 2))


# ---------------------------------------------------------------- what the caller has set


def test_gradients_are_off_where_they_are_off():
    module, x = mlp(), numbers(5, 3).requires_grad_()
    shim = DataParallel(module, TWO)
    with many_cores():
        with torch.no_grad():
            assert not shim(x).requires_grad
        with torch.inference_mode():
            assert shim(x).is_inference()
        assert_close_tree(value_and_grads(shim, module, x), value_and_grads(module, module, x))


@each_executor
def test_the_state_of_the_thread_is_that_of_the_caller(executor: Any):
    """Torch leaves most of it behind."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        product = x @ x.mT
        state = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled())
        seen.append((*state, product.dtype, torch.zeros(()).device.type, torch.zeros(()).dtype, variable.get()))
        return product

    shim = DataParallel(Apply(fn), ["cpu"] * 4, executor=executor)
    x = numbers(4, 3, 3).float()
    token, before = variable.set("set"), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with many_cores(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            out = shim(x)
    finally:
        torch.set_default_dtype(before)
        variable.reset(token)
    assert seen == [(False, True, False, torch.bfloat16, "meta", torch.float16, "set")] * 4
    assert out.dtype is torch.bfloat16


def test_autocast_gives_the_gradients_of_one_device():
    module, x = mlp().float(), numbers(6, 3).float()

    def under_autocast(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).double()

        return run

    for _ in range(2):
        got = value_and_grads(under_autocast(DataParallel(module, ["cpu"] * 3)), module, x)
        assert_close_tree(got, value_and_grads(under_autocast(module), module, x), 2e-2)


def test_the_call_has_a_name_in_profiles():
    shim = DataParallel(mlp(), TWO)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        shim(numbers(4, 3))
    events = [event.key for event in profile.key_averages()]
    assert events.count("DataParallel.forward") == 1


# ---------------------------------------------------------------- exceptions


class Odd(Exception):
    """No string makes one."""

    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(a, b)


@each_executor
@pytest.mark.parametrize("error", [KeyError("a\nb"), Odd(1, b=2), StopIteration(3), AssertionError()], ids=repr)
def test_the_exception_itself_arrives(error: Exception, executor: Any):
    """Torch raises another one made of its text."""
    error.__notes__ = []
    with many_cores(), pytest.raises(type(error), match=f"^{re.escape(str(error))}") as caught:
        outputs_of(lambda x: fail(error) if 2 in x else x, torch.arange(6), slots=3, executor=executor)
    assert caught.value is error
    name = type(error).__name__
    assert error.__notes__ == [
        f"Caught {name} in replica 1 on device cpu.",
        "in shard 1 of 3, rows 2:4, on cpu",
    ]


@each_executor
def test_the_first_of_several_failures_is_raised(executor: Any):
    errors = {2: ValueError("second"), 4: KeyError("third")}

    def fn(x: Tensor) -> Tensor:
        return fail(errors[int(x[0])]) if int(x[0]) in errors else x

    with many_cores(), pytest.raises(ValueError, match="second") as caught:
        outputs_of(fn, torch.arange(6), slots=3, executor=executor)
    assert caught.value.__notes__ == [
        "Caught ValueError in replica 1 on device cpu.",
        "in shard 1 of 3, rows 2:4, on cpu",
        "also in shard 2 of 3, rows 4:6, on cpu: KeyError: 'third'",
    ]


def test_one_chunk_on_several_devices_has_notes_too():
    with pytest.raises(ValueError, match="alone") as caught:
        outputs_of(lambda x: fail(ValueError("alone")), numbers(1))
    assert "Caught ValueError in replica 0 on device cpu." in caught.value.__notes__


@each_executor
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(kind: type[BaseException], executor: Any):
    """Torch dies of a KeyError."""
    shim = DataParallel(Apply(lambda x: fail(kind("stop")) if x[0] else x), TWO, executor=executor)
    with many_cores(), pytest.raises(kind, match="stop"):
        shim(torch.arange(4))
    with many_cores():
        assert_same_tree(shim(torch.zeros(4)), torch.zeros(4))


@each_executor
def test_after_a_failure_the_next_call_works(executor: Any):
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.trace = input
            return fail(ValueError("negative")) if input.min() < 0 else super().forward(input)

    module, x = nn.Sequential(Picky(3, 2), nn.BatchNorm1d(2)).double(), numbers(6, 3).abs()
    shim = DataParallel(module, TWO, executor=executor)
    bad = torch.cat([x[:3], -x[3:]])
    with many_cores():
        for _ in range(2):
            with pytest.raises(ValueError, match="negative"):
                shim(bad)
            assert not hasattr(module[0], "trace")
            want = torch.cat([copy.deepcopy(module)(part) for part in x.chunk(2)])
            assert_close_tree(shim(x).detach(), want.detach())


def test_a_warning_of_the_module_is_the_user_s():
    def fn(x: Tensor) -> Tensor:
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return x

    with many_cores(), pytest.warns(RuntimeWarning, match="mine"):
        outputs_of(fn, numbers(4))
