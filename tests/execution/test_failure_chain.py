"""A failure as the user sees it: the exception alone, nothing of how fdp came to it, and nothing kept by it."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.depth import few
from tests.common.threads import wake_workers

DEVICES = fdp.virtual_devices(3)
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads"])


class OddError(Exception):
    """The user's."""


def on_slots(fn: Any, w: Tensor, x: Tensor, executor: Any) -> Any:
    return fdp.parallel_apply(fn, fdp.replicate(w, DEVICES), fdp.scatter(x, DEVICES), executor=executor)


def through_shim(fn: Any, w: Tensor, x: Tensor, executor: Any) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(w)
            self.norm = fdp.nn.SyncBatchNorm(1).double()

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x[:, None, None].double())
            return fn(self.w, x)

    return fdp.DataParallel(Model(), DEVICES, executor=executor)(x)


def backward(fn: Any, w: Tensor, x: Tensor, executor: Any) -> Any:
    fdp.dp_apply(fn, w.clone().requires_grad_(), x, DEVICES, executor=executor).sum().backward()


CALLS: dict[str, Callable[[Any, Tensor, Tensor, Any], Any]] = {
    "dp_apply": lambda fn, w, x, e: fdp.dp_apply(fn, w, x, DEVICES, executor=e),
    "shard_map": lambda fn, w, x, e: fdp.shard_map(fn, devices=DEVICES, in_dims=(None, 0), executor=e)(w, x),
    "parallel_apply": on_slots,
    "grad": lambda fn, w, x, e: fdp.grad(lambda w, x: fn(w, x).mean(), devices=DEVICES, executor=e)(w, x),
    "vjp": lambda fn, w, x, e: torch.func.vjp(lambda w: fdp.dp_apply(fn, w, x, DEVICES, executor=e), w)[1](x),
    "backward": backward,
    "DataParallel": through_shim,
}


def fails(where: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that fails there, in the second shard."""

    def hook(grad: Tensor) -> None:
        raise OddError("backward")

    def fn(w: Tensor, x: Tensor) -> Tensor:
        second = fdp.axis_index() == 1
        if where == "without collectives" and second:
            raise OddError(where)
        if where == "without collectives":
            return w * x
        if where == "before one" and second:
            raise OddError(where)
        total = fdp.psum(w * x.sum())
        if where == "after one" and second:
            raise OddError(where)
        if where == "backward" and second and total.requires_grad:
            total.register_hook(hook)
        return total * x

    return fn


def chain(error: BaseException) -> list[BaseException]:
    """What an exception was raised from, or while handling what."""
    others = [other for other in (error.__cause__, error.__context__) if other is not None]
    return [error, *(found for other in others for found in chain(other))]


CASES = [
    (name, where)
    for name in CALLS
    for where in ("without collectives", "before one", "after one", "backward")
    if where != "backward" or name in ("grad", "backward")
]
each_case = pytest.mark.parametrize(("name", "where"), CASES, ids=map(", ".join, CASES))


@few()
@each_executor
@each_case
def test_a_failure_comes_alone(name: str, where: str, executor: Any):
    fn = fails(where)
    with pytest.raises(OddError, match=r"collective|one|backward") as caught:
        CALLS[name](fn, torch.ones((), dtype=torch.float64), torch.arange(3.0, dtype=torch.float64), executor)
    assert chain(caught.value) == [caught.value]


@few()
@each_executor
@pytest.mark.parametrize(("name", "where"), [*CASES, *((name, "nowhere") for name in CALLS)])
def test_nothing_is_kept(name: str, where: str, executor: Any):
    """Not even for the garbage collector, whether the call fails or not."""
    fn, refs = fails(where), list[weakref.ref[Any]]()

    def seen(w: Tensor, x: Tensor) -> Tensor:
        y = w * 1
        refs.extend(map(weakref.ref, (w, x, y)))
        out = fn(y, x)
        refs.append(weakref.ref(out))
        return out

    def once() -> None:
        w, x = torch.ones((), dtype=torch.float64), torch.arange(3.0, dtype=torch.float64)
        with contextlib.suppress(OddError):
            CALLS[name](seen, w, x, executor)

    once()  # torch loads something in the first call of a process, and the error of that holds the arguments
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            once()
            assert len(refs) >= 3
            wake_workers()
            assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()
