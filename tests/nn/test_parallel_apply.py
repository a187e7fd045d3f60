"""fdp.nn.parallel_apply, and all four together."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fdp import DataParallel
from fdp.nn import gather, parallel_apply, replicate, scatter_kwargs
from fdp.nn._device_ids import imbalance, warn_of_imbalance
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import COUNTS, numbers
from tests.common.threads import many_cores

pytestmark = pytest.mark.usefixtures("float64")


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


# ---------------------------------------------------------------- parallel_apply


def test_each_module_is_called_with_its_inputs():
    modules = [nn.Linear(3, 2), nn.Linear(3, 4), torch.neg]
    xs = [numbers(rows, 3) for rows in (1, 2, 3)]
    want = [module(x) for module, x in zip(modules, xs, strict=True)]
    for inputs in ([(x,) for x in xs], [[x] for x in xs], xs):
        assert_same_tree(parallel_apply(modules, inputs), want)


def test_keyword_arguments():
    got = parallel_apply([torch.add, torch.add], [(numbers(2), 1), (numbers(3), 2)], [{"alpha": 2}, {}])
    assert_same_tree(got, [numbers(2) + 2, numbers(3) + 2])
    assert_same_tree(parallel_apply([dict], [()], [{"a": 1}]), [{"a": 1}])


def test_no_modules():
    """Torch raises an IndexError."""
    assert parallel_apply([], []) == []


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("inputs 2", {"inputs": [1, 2]}),
        ("kwargs_tup 2", {"inputs": [1], "kwargs_tup": [{}, {}]}),
        ("devices 0", {"inputs": [1], "devices": []}),
    ],
    ids=["inputs", "kwargs", "devices"],
)
def test_as_many_of_everything_as_modules(name: str, others: dict[str, Any]):
    with pytest.raises(AssertionError, match=f"The number of modules 1 is not equal to the number of {name}$"):
        parallel_apply([len], **others)


def test_one_after_the_other_in_the_calling_thread():
    """Torch starts a thread for each module."""
    threads: list[threading.Thread] = []

    def run(x: int) -> int:
        threads.append(threading.current_thread())
        return x

    with many_cores():
        assert parallel_apply([run] * 4, [3, 1, 2, 0]) == [3, 1, 2, 0]
    assert threads == [threading.current_thread()] * 4


def test_the_exception_itself_arrives():
    """Torch makes another of its text."""

    class Custom(Exception):
        def __init__(self, number: int, *, text: str) -> None:
            super().__init__(number)
            self.text = text

    error = Custom(3, text="wonderful")

    def fail(x: Any) -> None:
        raise error

    with pytest.raises(Custom, match=r"^3\n") as caught:
        parallel_apply([torch.neg, fail, torch.neg], [numbers(1)] * 3)
    assert caught.value is error
    assert caught.value.text == "wonderful"
    assert caught.value.__notes__ == ["Caught Custom in replica 1 on device cpu.", "in shard 1 of 3, on cpu"]
    with pytest.raises(Custom, match=r"^3\n"):
        parallel_apply([fail], [numbers(1)])
    assert caught.value.__notes__.count("Caught Custom in replica 0 on device cpu.") == 1


def test_the_first_of_several_exceptions_arrives():
    def fail(x: str) -> None:
        raise KeyError(x)

    with pytest.raises(KeyError, match="'a'") as caught:
        parallel_apply([len, fail, fail], ["", "a", "b"])
    assert caught.value.__notes__[:2] == [
        "Caught KeyError in replica 1 on device cpu.",
        "in shard 1 of 3, on cpu",
    ]


def test_an_interrupt_passes():
    """Torch's main thread dies of a KeyError."""

    def interrupt(x: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        parallel_apply([len, interrupt], ["", ""])


@pytest.mark.parametrize("count", [1, 4])
def test_modules_see_what_the_caller_sees(count: int):
    """Torch's threads lose the dtype of autocast, inference mode and default devices."""

    def seen(_: Any) -> tuple[Any, ...]:
        return (
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.empty(0).device.type),
        )

    assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count
        assert seen(0) == (False, False, torch.float64, True, torch.bfloat16, "meta")
    with torch.inference_mode():
        assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count


@pytest.mark.parametrize("devices", [["cpu", "meta"], [torch.device("cpu"), None]], ids=["strings", "some-unknown"])
def test_devices_of_modules(devices: Any):
    """Torch wants devices of CUDA."""
    assert_same_tree(parallel_apply([torch.neg] * 2, [numbers(1)] * 2, devices=devices), [-numbers(1)] * 2)


def test_a_device_that_there_is_not():
    with pytest.raises(ValueError, match="parallel_apply: there is no accelerator with index 99"):
        parallel_apply([len], [""], devices=[99])


def test_without_tensors_the_device_is_that_of_the_parameters():
    class Failing(nn.Linear):
        def forward(self, *args: Any) -> Any:
            raise RuntimeError("no")

    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=r"^no\n") as caught:
            parallel_apply([Failing(1, 1, device=device)], [None])
        assert caught.value.__notes__[0] == f"Caught RuntimeError in replica 0 on device {device}."


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_composition_is_the_module(rows: int, count: int):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    x = numbers(rows, 3).requires_grad_()
    want = module(x)
    grads = torch.autograd.grad((want * want.cos()).sum(), [x, *module.parameters()])
    args, keywords = scatter_kwargs((x,), None, cpus(count))
    replicas = replicate(module, cpus(len(args)))
    got = gather(parallel_apply(replicas, args, keywords, cpus(len(args))), "cpu")
    assert_close_tree(got, want)
    assert_close_tree(torch.autograd.grad((got * got.cos()).sum(), [x, *module.parameters()]), grads)


@pytest.mark.parametrize("count", COUNTS)
def test_random_numbers_come_from_the_generator_of_the_device(count: int):
    """Replicas draw in turn: dropout is not that of the whole batch."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), numbers(8, 3)
    torch.manual_seed(3)
    want = torch.cat([module(part) for part in x.chunk(count)])
    drawn = torch.rand(1)
    for call in (
        DataParallel(module, cpus(count), executor="sequential"),
        lambda x: gather(parallel_apply(replicate(module, cpus(count))[: len(x.chunk(count))], x.chunk(count)), "cpu"),
    ):
        torch.manual_seed(3)
        assert_close_tree(call(x), want)
        assert_same_tree(torch.rand(1), drawn)


def test_notes_name_the_replica():
    def fail(*_: Any) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        parallel_apply([fail, fail], [None, None])
    assert caught.value.__notes__[0] == "Caught ValueError in replica 0 on device cpu."
    assert "also in shard 1 of 2" in "\n".join(caught.value.__notes__)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("figures", "poor", "rich"),
    [
        ([(4, 8), (4, 8)], None, None),
        ([(3, 8), (4, 8), (4, 6)], None, None),
        ([(4, 8), (2, 8), (3, 8)], 6, 5),
        ([(4, 5), (4, 8)], 5, 6),
        ([(2, 8), (4, 2)], 5, 6),  # memory comes first
    ],
    ids=["same", "three-quarters", "memory", "cores", "both"],
)
def test_gpus_of_which_one_is_weaker(figures: list[tuple[float, float]], poor: int | None, rich: int | None):
    message = imbalance([torch.device("cuda", 5 + i) for i in range(len(figures))], figures)
    if poor is None:
        assert message is None
    else:
        assert message is not None
        assert f"exclude GPU {poor}, which has less than 75% of the memory or cores of GPU {rich}" in message
    warn_of_imbalance([torch.device("cpu")] * 2)
