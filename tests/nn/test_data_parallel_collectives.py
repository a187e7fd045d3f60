"""Modules of a DataParallel that call collectives themselves: forward runs once."""

from typing import Any

import torch
from torch import nn

import fdp

X = torch.randn(8, 3, dtype=torch.float64)


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.seen: list[float] = []
        self.register_buffer("bound", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bound = self.bound + 1
        self.seen.append(x[0, 0].item())
        return x + fdp.psum(self.bn(x).square().sum(0))


class Counting(fdp.DataParallel[Summing]):
    made = 0

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.made += 1
        return super().replicate(module, device_ids)


def test_state_is_written_once():
    module = Summing().double()
    parallel = Counting(module, ["cpu", "cpu"])
    alone = [nn.BatchNorm1d(3).double() for _ in range(2)]
    for calls in (1, 2):
        parts = [bn(part) for bn, part in zip(alone, X.split(4), strict=True)]
        torch.testing.assert_close(parallel(X), X + sum(part.square().sum(0) for part in parts))
        means = torch.stack([bn.state_dict()["running_mean"] for bn in alone])
        torch.testing.assert_close(module.bn.running_mean, means[0])
        assert (module.bn.num_batches_tracked, module.bound) == (calls, calls)
        assert module.seen == [X[0, 0], X[4, 0]] * calls
        assert parallel.made == calls
