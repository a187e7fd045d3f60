"""Where DataParallel differs from torch.nn.DataParallel: each difference, with what both do."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import parallel

import fdp
from tests.accelerator.beside_torch import (
    CPU,
    DEVICES,
    ROWS,
    assert_same,
    by_fdp,
    by_torch,
    doing,
    function,
    loss_of,
    running,
    there,
    wrapped,
)
from tests.accelerator.torch_copies import torch_copies
from tests.common.containers import Batch
from tests.common.numbers import numbers

pytestmark = pytest.mark.usefixtures("four_cores")


Found = tuple[type[Exception], str] | Any
"""What a call returns, or the error that it raises."""


class Differs(NamedTuple):
    """A forward of a module, its arguments, and what becomes of them."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    torchs: Found
    ours: Found
    options: Any = None


def rows_of(x: Tensor) -> Tensor:
    return x.to(DEVICES[0])


APART = RuntimeError, "expected all tensors to be on the same device"
DIFFERENCES: dict[str, Differs] = {
    # Torch drops the surplus chunks silently, or fails when it pairs them.
    "rows": Differs(
        lambda self, x, y: x,
        (ROWS, ROWS[:1]),
        rows_of(ROWS[:4]),
        (ValueError, r"rows differ: inputs\[0\] has 8 along dim 0, inputs\[1\] has 1 along dim 0"),
    ),
    "rows-of-keyword": Differs(
        lambda self, x, y: x,
        (ROWS,),
        (AssertionError, "number of modules 2 is not equal to the number of kwargs_tup 1"),
        (ValueError, r"rows differ: inputs\[0\] has 8 along dim 0, kwargs\['y'\] has 1"),
        {"y": ROWS[:1]},
    ),
    # Torch calls the devices that have no rows without positional arguments.
    "few-rows-and-an-option": Differs(
        lambda self, x, flag: x * flag,
        (ROWS[:1],),
        (TypeError, "missing 1 required positional argument: 'x'"),
        there[:1] * 2.0,
        {"flag": 2.0},
    ),
    # Torch cannot cut it.
    "number-in-a-tensor": Differs(
        lambda self, x, y: x * y,
        (ROWS, torch.tensor(2.0)),
        (RuntimeError, "chunk expects at least a 1-dimensional tensor"),
        there * 2,
    ),
    # Torch joins the real parts beside the imaginary ones.
    "complex-along-a-negative-dim": Differs(
        lambda self, x: torch.complex(x, x + 1),
        (ROWS[:, :2],),
        (RuntimeError, "Tensor must have a last dimension of size 2"),
        torch.complex(there[:, :2], there[:, :2] + 1),
        {"dim": -1},
    ),
    # Torch does not look inside: inputs stay on their device, outputs fail.
    "dataclass": Differs(lambda self, batch: batch.x * self.weight, (Batch(ROWS),), APART, there * rows_of(numbers(3))),
    "dataclass-out": Differs(
        lambda self, x: Batch(x, [x]), (ROWS,), (TypeError, "'Batch' object is not iterable"), Batch(there, [there])
    ),
    # Torch fails for numbers.
    "number-out": Differs(lambda self, x: (3, x), (ROWS,), (TypeError, "'int' object is not iterable"), (3, there)),
    "numbers-that-differ-out": Differs(
        lambda self, x: (len(x), x),
        (ROWS[:7],),
        (TypeError, "'int' object is not iterable"),
        (ValueError, r"output\[0\] differs between shards: .*4 in shard 0, 3 in shard 1"),
    ),
    # Torch's replicas have none, without gradients those elsewhere.
    "parameters": Differs(
        lambda self, x: x.new_full((1,), len(list(self.parameters()))),
        (ROWS,),
        rows_of(numbers(2) * 0),
        rows_of(numbers(2) * 0 + 1),
    ),
    # Torch runs the module on every device and joins as many outputs.
    **{
        f"nothing-to-split-{value}": Differs(
            lambda self, x: self.weight * 0, (value,), rows_of(numbers(6) * 0), rows_of(numbers(3) * 0)
        )
        for value in (2.0, None, "text", [1, {"a": 2}])
    },
}


def check(found: Found, call: Callable[[], Any]) -> None:
    if isinstance(found, tuple) and isinstance(found[0], type):
        with pytest.raises(found[0], match=found[1]):
            call()
    else:
        assert_same(call(), found)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences(name: str):
    case = DIFFERENCES[name]
    for by, found in ((by_torch, case.torchs), (by_fdp, case.ours)):
        check(found, partial(by, doing(case.forward), *case.args, **(case.options or {})))


def test_what_torch_does_not_carry_into_its_threads():
    """Inference mode; and without gradients the replica on the first device alone has parameters."""
    module = doing(lambda self, x: x.new_tensor([torch.is_inference_mode_enabled() + 2 * len(list(self.parameters()))]))
    with torch.inference_mode():
        assert by_torch(module, ROWS).tolist() == [2, 0]
        assert by_fdp(module, ROWS).tolist() == [3, 3]


def test_a_text_in_an_output():
    """Torch makes a str of an iterator."""
    assert by_torch(doing(lambda self, x: ("text", x)), ROWS)[0].startswith("<map object at")
    assert by_fdp(doing(lambda self, x: ("text", x)), ROWS)[0] == "text"


class PerDevice(nn.Module):
    """One of its arguments comes once for each device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))

    def forward(self, x: Tensor, mixing: Tensor, *, shift: Tensor) -> Tensor:
        return (x * self.weight) @ mixing[0] + shift.sum()


@pytest.mark.parametrize(("order", "rows", "others"), [((0, 1), 8, 2), ((2, 0, 1), 7, 9), ((0, 1, 2, 3), 2, 2)])
def test_one_copy_for_each_device(order: Any, rows: int, others: int):
    """Arguments with other rows, which torch.chunk cuts into as many parts."""
    results = []
    for torchs in (False, True):
        module = PerDevice().to(DEVICES[order[0]])
        leaves = [t.requires_grad_() for t in (numbers(rows, 3), numbers(others, 3, 3), numbers(rows, 2))]
        with running(torchs):
            out = wrapped(torchs, module, order)(leaves[0], leaves[1], shift=leaves[2])
            loss_of(out).backward()
        results.append((out, module.weight.grad, [leaf.grad for leaf in leaves]))
    assert_same(*results)


def test_an_embedding_with_max_norm():
    """Torch's cannot write to the weight of the first replica, which is a view for autograd."""
    ids = torch.arange(8) % 6
    modules = [nn.Embedding(6, 2, max_norm=0.5, device=DEVICES[0]) for _ in range(3)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        by_torch(modules[0], ids)
    out, want = by_fdp(modules[1], ids), modules[2](ids.to(DEVICES[0]))
    assert_same(out, want)
    for module, result in ((modules[1], out), (modules[2], want)):
        loss_of(result).backward()
        assert module.weight.grad is not None
    assert_same(modules[1].weight.grad, modules[2].weight.grad)
    assert_same(modules[1].weight[:4], modules[2].weight[:4])


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.float())


def test_the_gradient_of_an_unused_parameter():
    """Torch makes it zero, which weight decay and momentum then act on."""
    for by, is_none in ((by_torch, False), (by_fdp, True)):
        module = Unused().to(DEVICES[0])
        with running(by is by_torch):
            by(module, ROWS).sum().backward()
        used, unused = module.used.weight.grad, module.unused.weight.grad
        assert used is not None
        assert (unused is None) is is_none
        assert unused is None or not unused.any()


def test_scalars():
    """Torch joins them along dim 0 only."""
    module = doing(lambda self, x: x.sum() * self.weight.sum())
    for by in (by_torch, by_fdp):
        assert by(module, ROWS, order=(0,)).shape == ()
        for rows, count in ((ROWS, 2), (ROWS[:1], 1)):
            with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were"):
                assert by(module, rows).shape == (count,)
    with pytest.raises(IndexError, match="Dimension specified as 1 but tensor has no dimensions"):
        by_torch(module, ROWS, dim=1)
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 1, but all input tensors were scalars"):
        assert by_fdp(module, ROWS, dim=1).shape == (2,)


class Refused(Exception):
    def __init__(self, code: int, reason: str):
        super().__init__(code, reason)
        self.code = code


def refuse(self: nn.Module, x: Tensor) -> Any:
    raise Refused(len(x), "no")


def test_an_exception():
    """Torch raises another one, of another class if it cannot make one of that."""
    with pytest.raises(RuntimeError, match=r"Caught Refused in replica 0 on device 0\.\nOriginal Traceback") as lost:
        by_torch(doing(refuse), ROWS)
    assert type(lost.value) is RuntimeError
    with pytest.raises(Refused, match="no") as kept:
        by_fdp(doing(refuse), ROWS)
    assert kept.value.code == 4
    assert kept.value.__notes__[:2] == [
        "Caught Refused in replica 0 on device 0.",
        "in shard 0 of 2, rows 0:4, on virtual:0",
    ]
    with pytest.raises(Refused, match="no") as bare:
        by_fdp(doing(refuse), ROWS, order=(0,))
    assert not hasattr(bare.value, "__notes__")


def do_nothing(*_: Any) -> None: ...


def register(self: Any, x: Tensor) -> Tensor:
    self.register_forward_hook(do_nothing)
    return x * self.weight


def test_hooks_are_a_replicas_own():
    """Torch shares the dict of hooks between the module and its replicas, in threads that change it."""
    for by, count in ((by_torch, 4), (by_fdp, 0)):
        module = doing(register)
        for _ in range(2):
            by(module, ROWS)
        assert len(module._forward_hooks) == count


class Closing(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.function = self.scale if how == "bound" else lambda x: x * self.weight
        if how == "override":
            self.forward = self.scale

    def scale(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("how", ["bound", "override"])
def test_methods_of_the_module_that_it_holds(how: str):
    """Torch runs them with the parameters of the first device on all of them; fdp does so with a closure alone."""
    for by, other in ((by_torch, how), (by_torch, "closure"), (by_fdp, "closure")):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            by(Closing(other).to(DEVICES[0]), ROWS)
    grads = []
    for call in (by_fdp, lambda module, x: module(x.to(DEVICES[0]))):
        module = Closing(how).to(DEVICES[0])
        call(module, ROWS).square().sum().backward()
        grads.append(module.weight.grad)
    assert_same(*grads)


def test_the_output_device_of_one_device():
    """Torch leaves the output where it is."""
    module = nn.Linear(3, 2, dtype=torch.float64)
    for form in (wrapped, function):
        module.to(DEVICES[1])
        with torch_copies():
            assert form(True, module, [1], output_device=2)(ROWS).device == DEVICES[1]
        for target in (2, "cpu", CPU, DEVICES[3]):
            out = form(False, module, [1], output_device=target)(ROWS)
            assert out.device == (DEVICES[2] if target == 2 else torch.device(target))


def test_the_cpu_as_a_target():
    """Torch takes the name, but no torch.device, and neither at construction."""
    outputs = [ROWS.to(device) for device in DEVICES[:2]]
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"), torch_copies():
        parallel.gather(outputs, CPU)
    assert fdp.nn.gather(outputs, CPU).device == CPU
    targets: tuple[Any, ...] = ("cpu", CPU)
    for target in targets:
        with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
            nn.DataParallel(nn.Linear(3, 2), output_device=target)
        shim = fdp.DataParallel(nn.Linear(3, 2).double().to(DEVICES[0]), output_device=target)
        assert shim.output_device == CPU
        assert shim(ROWS).device == CPU


@pytest.mark.parametrize("form", [wrapped, function])
@pytest.mark.parametrize("torchs", [False, True])
def test_minus_one_is_the_cpu(form: Any, torchs: bool):
    """Torch warns once more, in backward."""
    module, x = nn.Linear(3, 2, device=DEVICES[0], dtype=torch.float64), ROWS.clone().requires_grad_()
    with running(torchs):
        with pytest.warns(FutureWarning, match=r"Using -1 to represent CPU tensor is deprecated"):
            out = form(torchs, module, output_device=-1)(x)
        out.sum().backward()
    assert x.grad is not None
    assert out.device == x.grad.device == CPU


def test_the_device_of_a_module_in_parallel_apply():
    """Torch takes devices of CUDA only, and numbers."""
    x = ROWS.to(DEVICES[1])
    with pytest.raises(ValueError, match="Expected a cuda device, but got: virtual:1"), torch_copies():
        parallel.parallel_apply([nn.Identity()], [x], None, [DEVICES[1]])
    assert fdp.nn.parallel_apply([nn.Identity()], [x], None, [DEVICES[1]])[0] is x


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.real, self.complex = nn.Parameter(numbers(3)), nn.Parameter(numbers(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.complex * self.real.sum()


def test_complex_parameters_beside_real_ones():
    """Torch copies them in one buffer, in which a complex number may not start just anywhere."""
    with pytest.raises(RuntimeError, match="Tensor must have a storage_offset divisible by 2"):
        by_torch(Mixed().to(DEVICES[0]), ROWS)
    grads = []
    for call in (by_fdp, lambda module, x: module(x.to(DEVICES[0]))):
        module = Mixed().to(DEVICES[0])
        torch.view_as_real(call(module, ROWS)).square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert_same(*grads)


def rebind(self: Any, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return x


def write_and_fail(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    raise KeyError("lost")


def test_buffers_that_forward_replaces():
    """Torch loses them."""
    for by, count in ((by_torch, 0), (by_fdp, 2)):
        module = doing(rebind)
        for _ in range(2):
            by(module, ROWS)
        assert module.calls.tolist() == [count]
        assert module.calls.device == DEVICES[0]


def test_buffers_after_a_failure():
    """Those of the first replica are the module's own: what it wrote stays, as on one device."""
    for by in (by_torch, by_fdp):
        module = doing(write_and_fail)
        with pytest.raises(KeyError, match="lost"):
            by(module, ROWS)
        assert module.calls.tolist() == [1]


def test_functional_call():
    """Torch refuses."""
    module = doing(lambda self, x: x * self.weight)
    other = {"module.weight": (2 * module.weight).detach()}
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with nn.DataParallel module"):
        torch.func.functional_call(nn.DataParallel(module, [0, 1]), other, (ROWS,))
    assert_same(torch.func.functional_call(fdp.DataParallel(module, [0, 1]), other, (ROWS,)), 2 * module(there))


def test_dicts_with_other_keys():
    """Torch does not say which output it is."""
    outputs: list[Any] = [{"a": there}, {"b": there}]
    with pytest.raises(KeyError, match="a"), torch_copies():
        parallel.gather(outputs, 0)
    with pytest.raises(ValueError, match=r"a dict with keys \['a'\] in shard 0, a dict with keys \['b'\] in shard 1"):
        fdp.nn.gather(outputs, 0)


IDS: dict[str, tuple[Any, Any, Any]] = {
    "no-devices": ([], IndexError, ValueError),
    "set": ({0, 1}, TypeError, TypeError),
    "no-such-device": ([0, 7], None, ValueError),
    "negative": ([0, -1], None, ValueError),
}


@pytest.mark.parametrize(("ids", "torchs", "ours"), IDS.values(), ids=IDS)
def test_device_ids_that_cannot_be(ids: Any, torchs: Any, ours: Any):
    """Torch does not look whether they exist."""
    with pytest.raises(torchs, match=r"index out of range|not subscriptable") if torchs else contextlib.nullcontext():
        nn.DataParallel(nn.Linear(1, 1), ids)
    with pytest.raises(ours, match=r"device_ids is empty|must be None, a device or a seq|no accelerator with index"):
        fdp.DataParallel(nn.Linear(1, 1), ids)
