"""The process group of the double: it has the manners of NCCL."""

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdp
from tests.accelerator.double.group import LIMIT, LateGroup, process_group

core: Any = dist
DEVICES = fdp.available_devices()


def together(work: Callable[[LateGroup, int], Any], limit: datetime.timedelta = LIMIT, **options: Any) -> list[Any]:
    """What each of two processes returns, which are threads here."""
    store = core.HashStore()

    def run(rank: int) -> Any:
        return work(LateGroup(store, rank, 2, limit, **options), rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_sums_come_late():
    def work(group: LateGroup, rank: int) -> Any:
        x = torch.full((3,), rank + 1.0, device=DEVICES[rank])
        going = group.allreduce([x])
        early = x.tolist()
        going.wait()
        return early, x.tolist(), going.is_completed()

    assert together(work) == [([1.0] * 3, [3.0] * 3, True), ([2.0] * 3, [3.0] * 3, True)]


def test_the_other_collectives():
    def work(group: LateGroup, rank: int) -> Any:
        x = torch.full((2,), float(rank), device=DEVICES[rank])
        found = [torch.empty_like(x) for _ in range(2)]
        group.allgather([found], [x]).wait()
        options = dist.BroadcastOptions()
        options.rootRank = 1
        group.broadcast([x], options).wait()
        return [y.tolist() for y in (*found, x)]

    assert together(work) == [[[0, 0], [1, 1], [1, 1]]] * 2


def test_tensors_of_the_host():
    def refused(group: LateGroup, rank: int) -> Any:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            group.allreduce([torch.ones(1)])

    together(refused)

    def taken(group: LateGroup, rank: int) -> Any:
        x = torch.ones(1)
        group.allreduce([x]).wait()
        return x.item()

    assert together(taken, takes_host=True) == [2, 2]


def test_two_processes_on_one_device():
    def work(group: LateGroup, rank: int) -> Any:
        with pytest.raises(RuntimeError, match="Duplicate GPU detected : rank 1 and rank 0 both on virtual:0"):
            group.allreduce([torch.ones(1, device=DEVICES[0])])

    together(work)


def test_who_waits_too_long_aborts():
    def work(group: LateGroup, rank: int) -> Any:
        x = torch.ones(1, device=DEVICES[rank])
        group.allreduce([x]).wait()
        if rank == 1:
            return
        going = group.allreduce([x])
        with pytest.raises(RuntimeError):  # noqa: PT011  the words are those of gloo
            going.wait(datetime.timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match="the communicator was aborted: a wait of it has failed"):
            group.allreduce([x])

    together(work, datetime.timedelta(seconds=5))


def test_torch_finds_it():
    x = torch.ones(2, device=DEVICES[1])
    with process_group(takes_host=False):
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(1))
    with process_group(takes_host=True):
        dist.all_reduce(torch.ones(1))
        going: Any = dist.all_reduce(x, async_op=True)
        going.wait()
    assert x.tolist() == [1, 1]
