"""What waits for what, where a program has streams of its own, and which device is the current one."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from fdp.data.prefetch import memory_of
from tests.accelerator.double import host_waits
from tests.accelerator.double.streams import Stream
from tests.common.numbers import numbers

DEVICES = fdp.available_devices()
virtual: Any = torch.get_device_module("virtual")


def on_a_stream(fn: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A function that does its work on a stream of its own."""

    def called(_: Any, x: Tensor) -> Tensor:
        here, side = virtual.current_stream(x.device), Stream(x.device)
        side.wait_stream(here)
        with side:
            out = fn(x)
        here.wait_stream(side)
        return out

    return called


COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: fdp.psum(x * 2) + 1,
    "all_gather": lambda x: fdp.all_gather(x * 2) + 1,
    "two": lambda x: fdp.psum(fdp.ppermute(x * 2, [(i, (i + 1) % 4) for i in range(4)])) + 1,
}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_slots_with_streams_of_their_own_meet(name: str, executor: Any):
    x = numbers(8, 3).to(DEVICES[0])
    plain = fdp.dp_apply(lambda _, x: COLLECTIVES[name](x), None, x, DEVICES)
    got = fdp.dp_apply(on_a_stream(COLLECTIVES[name]), None, x, DEVICES, executor=executor)
    assert torch.equal(got.cpu(), plain.cpu())


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_gradients_of_slots_with_streams_of_their_own(executor: Any):
    w, x = numbers(3).to(DEVICES[0]), numbers(8, 3).to(DEVICES[0])

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x * w - fdp.pmean((x * w).sum(0))).square().sum(1).mean()

    def there(w: Tensor, x: Tensor) -> Tensor:
        return on_a_stream(lambda x: loss(w, x))(None, x)

    want = fdp.value_and_grad(loss, devices=DEVICES)(w, x)
    got = fdp.value_and_grad(there, devices=DEVICES, executor=executor)(w, x)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


# ---- prefetch


def test_prefetch_waits_for_what_its_source_was_made_of():
    data = numbers(12, 3).to(DEVICES[0]) * 2  # the devices may not have computed it yet
    batches = (part + 1 for part in data.split(3))
    got = [batch.shards for batch in fdp.prefetch(batches, DEVICES[:2])]
    assert [torch.cat([x.cpu() for x in shards]).tolist() for shards in got] == [
        (part + 1).tolist() for part in data.cpu().split(3)
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_batches_of_the_host_are_there_when_they_are_handed_on(dim: int):
    batches = [numbers(6, 6) + i for i in range(4)]
    with host_waits.counted() as waits:
        ahead = fdp.prefetch(batches, DEVICES[:2], dim)
        got = [fdp.gather(batch.map(lambda x: x * 2), dim) for batch in ahead]
    assert not waits
    for out, batch in zip(got, batches, strict=True):
        assert torch.equal(out.cpu(), batch * 2)


def test_a_source_of_prefetch_sees_the_current_device():
    seen = []

    def source() -> Iterator[Tensor]:
        for _ in range(4):
            seen.append(torch.accelerator.current_device_index())
            yield torch.ones(4, device="virtual")

    with torch.accelerator.device_index(2):
        before = virtual.current_stream(2)
        for batch in fdp.prefetch(source(), DEVICES):
            assert [x.device for x in batch.shards] == list(DEVICES)
            assert [(x * 2).tolist() for x in batch.shards] == [[2.0]] * 4
        assert (torch.accelerator.current_device_index(), virtual.current_stream(2)) == (2, before)
    assert seen == [2] * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
def test_the_memory_of_a_tensor(layout: torch.layout):
    x = torch.eye(3).to_sparse(layout=layout) if layout is not torch.strided else torch.eye(3)
    parts = memory_of(x)
    assert {part.layout for part in parts} == {torch.strided}
    assert sum(part.nbytes for part in parts) >= 12


def test_the_memory_of_a_nested_tensor():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [part.layout for part in memory_of(x)] == [torch.strided] * 2


# ---- random numbers


def test_rows_need_devices_that_draw_alike(monkeypatch: pytest.MonkeyPatch):
    sizes = iter([132, 132, 132, 108])
    models = {i: SimpleNamespace(name=f"GPU {size}", multi_processor_count=size) for i, size in enumerate(sizes)}
    monkeypatch.setattr(virtual, "get_device_properties", lambda device: models[device.index], raising=False)

    def draw(_: Any, x: Tensor) -> Tensor:
        return torch.rand_like(x)

    x = torch.ones(8, device=DEVICES[0])
    fdp.dp_apply(draw, None, x, DEVICES[:3], seed=1, randomness="rows")
    fdp.dp_apply(draw, None, x, DEVICES, seed=1)
    with pytest.raises(ValueError, match=r"dp_apply: randomness='rows' needs devices that .*virtual:3 \(cpu, GPU 108"):
        fdp.dp_apply(draw, None, x, DEVICES, seed=1, randomness="rows")
