"""Calls of collectives that are to fail, and that the next call works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.threads import within

SLOTS = 3
LIMIT = 60.0  # seconds, of which a call takes few: the first one loads parts of torch
DEVICES = fdp.virtual_devices(SLOTS)
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "psum": fdp.psum,
    "pmean": fdp.pmean,
    "pmax": fdp.pmax,
    "pmin": fdp.pmin,
    "all_gather": lambda x: fdp.all_gather(x, stack=True),
    "psum_scatter": fdp.psum_scatter,
    "all_to_all": lambda x: fdp.all_to_all(x, split_dim=0, concat_dim=1),
    "ppermute": lambda x: fdp.ppermute(x, [(0, 1), (1, 2), (2, 0)]),
}


each_slot = pytest.mark.parametrize("slot", range(SLOTS))
each_name = pytest.mark.parametrize("name", COLLECTIVES)


class OddError(Exception):
    """That of the user."""


def works(executor: Any) -> None:
    """The next call does, forward and backward."""
    within(LIMIT, lambda: _works(executor))


def _works(executor: Any) -> None:
    w = torch.ones((), requires_grad=True)
    out = fdp.dp_apply(lambda w, x: fdp.psum((w * x).sum()) * x, w, torch.ones(SLOTS), DEVICES, executor=executor)
    out.sum().backward()
    assert torch.equal(out, torch.full((SLOTS,), float(SLOTS)))
    assert w.grad == SLOTS**2


def call(fn: Callable[[int, Tensor], Any], executor: Any, **options: Any) -> Any:
    """Run a function of the slot's number and a tensor."""

    def body(w: Tensor, x: Tensor) -> Any:
        return fn(fdp.axis_index(), w * x)

    w, x = torch.ones((), requires_grad=True), torch.ones(SLOTS, 3, 2)
    return within(LIMIT, lambda: fdp.dp_apply(body, w, x, DEVICES, executor=executor, out_dims="list", **options))


def argument(x: Tensor) -> Tensor:
    return x.sum(0)
