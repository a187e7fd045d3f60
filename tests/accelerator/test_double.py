"""The double by itself: it shows what GPUs do and the plain virtual accelerator does not."""

import contextvars
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fdp
from tests.accelerator.double import host_waits
from tests.accelerator.double.streams import Event, Stream, Unordered
from tests.common.numbers import numbers

DEVICES = fdp.available_devices()
virtual: Any = torch.get_device_module("virtual")
WHERE = contextvars.ContextVar("where", default="nowhere")


# ---- a backward


class Looks(torch.autograd.Function):
    """The identity; its backward notes where it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.seen.append((grads[0].device, threading.get_ident(), WHERE.get(), virtual.current_device()))
        return grads[0], None


def losses(seen: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [numbers(3, 3).to(device).requires_grad_() for device in DEVICES]
    return [Looks.apply(x, seen).sin().sum() for x in leaves], leaves


def test_a_backward_has_a_thread_for_each_device_and_no_context():
    seen: list[Any] = []
    ends, leaves = losses(seen)
    WHERE.set("here")
    grads = torch.autograd.grad(ends, leaves)
    assert {device for device, *_ in seen} == set(DEVICES)
    assert len({thread for _, thread, *_ in seen} | {threading.get_ident()}) == 5
    assert {where for *_, where, _ in seen} == {"nowhere"}
    assert all(device.index == current for device, *_, current in seen)
    assert all(torch.equal(g.cpu(), x.detach().cpu().cos()) for g, x in zip(grads, leaves, strict=True))


def test_a_backward_stays_in_its_thread_if_it_is_told_so():
    seen: list[Any] = []
    ends, leaves = losses(seen)
    WHERE.set("here")
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(ends)
    assert {thread for _, thread, *_ in seen} == {threading.get_ident()}
    assert {where for *_, where, _ in seen} == {"here"}
    assert all(device.index == current for device, *_, current in seen)
    assert all(x.grad is not None for x in leaves)


def test_what_devices_share_is_left_to_autograd():
    w = numbers(3).to(DEVICES[0]).requires_grad_()
    doubled = w * 2
    parts = [(doubled.to(device) * (i + 1)).sum() for i, device in enumerate(DEVICES)]
    grads = torch.autograd.grad(parts, [w])
    assert grads[0].tolist() == [20, 20, 20]


def test_hooks_and_checkpoints_see_the_device_of_their_tensors():
    seen: list[Any] = []
    with torch.autograd.set_multithreading_enabled(False):
        for device in DEVICES:
            x = numbers(3).to(device).requires_grad_()
            y = checkpoint(
                lambda x: [seen.append((x.device.index, virtual.current_device())), x.sin()][1], x, use_reentrant=False
            )
            seen.clear()
            y.register_hook(lambda g: seen.append((g.device.index, virtual.current_device())))
            y.sum().backward()
            assert seen == [(device.index, device.index)] * 2


# ---- streams


def test_who_does_not_wait_is_told():
    x = torch.ones(3, device=DEVICES[1])
    with (
        Stream(DEVICES[1]),
        pytest.raises(Unordered, match=r"aten::mul: stream \d+ of virtual:1 reads what .*fill.* on"),
    ):
        _ = x * 2


def test_who_writes_waits_for_readers():
    x, side = torch.ones(3, device=DEVICES[1]), Stream(DEVICES[1])
    side.wait_stream(virtual.current_stream(1))
    with side:
        _ = x * 2
    with pytest.raises(Unordered, match="stream 0 of virtual:1 writes to what aten::mul used"):
        x.add_(1)
    virtual.current_stream(1).wait_stream(side)
    x.add_(1)


@pytest.mark.parametrize("way", ["wait_stream", "event", "synchronize", "item", "copy"])
def test_ways_to_wait(way: str):
    x, side, here = torch.ones((), device=DEVICES[1]), Stream(DEVICES[1]), virtual.current_stream(1)
    if way == "wait_stream":
        side.wait_stream(here)
    elif way == "event":
        event = Event()
        event.record(here)
        event.wait(side)
    elif way == "synchronize":
        torch.accelerator.synchronize(1)
    elif way == "item":
        x.item()
    else:
        x.cpu()
    with side:
        assert (x * 2).device == DEVICES[1]
    assert virtual.current_stream(1) == here


def test_copies_between_devices_wait():
    x = torch.ones(3, device=DEVICES[1])
    y = x.to(DEVICES[2])
    x.add_(1)
    assert (y * 2).tolist() == [2, 2, 2]


def test_a_backward_waits_for_the_streams_of_its_forward():
    x, side = torch.ones(3, device=DEVICES[1], requires_grad=True), Stream(DEVICES[1])
    side.wait_stream(virtual.current_stream(1))
    with side:
        y = (x * 3).sum()
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]


# ---- the host


def test_the_host_waits():
    x, host = torch.ones(3, device=DEVICES[1]), torch.ones(3)
    with host_waits.counted() as waits:
        (x * 2).sum()
        host.pin_memory().to(DEVICES[1], non_blocking=True)
        x.to(DEVICES[0])
    assert not waits
    with host_waits.counted() as waits:
        host.to(DEVICES[1], non_blocking=True)
        host.pin_memory()[::2].to(DEVICES[1], non_blocking=True)
    assert waits == {"copy from the host in the function": 2}
    with host_waits.counted() as waits:
        x.sum().item()
        torch.equal(x, x)
        x.nonzero()
        x.cpu()
        host.to(DEVICES[1])
    names = ["item", "equal", "nonzero", "copy to the host", "copy from the host"]
    assert waits == {f"{name} in the function": 1 for name in names}


def test_the_line_that_waits_is_named():
    x = torch.ones(4, device=DEVICES[0])
    with host_waits.counted() as waits:
        fdp.dp_apply(lambda _, x: x, None, torch.ones(4), DEVICES[:2])
        fdp.dp_apply(lambda _, x: x.sum().item() * x, None, x, DEVICES[:2])
    assert {text.split(":")[0]: count for text, count in waits.items()} == {
        "copy from the host in _placement/moves.py": 2,
        "item in the function": 2,
    }
