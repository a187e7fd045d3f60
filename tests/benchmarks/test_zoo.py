"""What `make zoo` says of a model, without the packages that it takes models from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import check, report
from benchmarks.zoo.check import Verdict
from benchmarks.zoo.model import ROWS, Model, prepared
from tests.common.containers import Output


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return Output(logits=self.linear(x).tanh())


class Centred(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x - x.mean(0))


class Transposed(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).T


class Noisy(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + torch.rand(len(x), 1)


class Broken(Plain):
    def forward(self, x: Tensor) -> Any:
        raise RuntimeError("no such input")


class Huge(Plain):
    def forward(self, x: Tensor) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


class DynamicCache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.keys])


class Caching(Plain):
    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        out = self.linear(x)
        return Output(logits=out, hidden=DynamicCache(out.exp()) if use_cache else None)


class Detached(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).detach()


class MeetingBackwards(Plain):
    """Its gradient is not a mean over rows, its output is by rows."""

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        return out.detach() + (out - out.detach()) * len(x)


class NeedsCache(Caching):
    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        if not use_cache:
            raise RuntimeError("not without")
        return super().forward(x)


class Failing(Plain):
    """Where its parameters are others than its own, as in a call of fdp."""

    def forward(self, x: Tensor) -> Any:
        if not self.linear.weight.requires_grad:
            raise RuntimeError("not the module's own")
        return self.linear(x)


class Differing(Plain):
    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        return out if self.linear.weight.requires_grad else out * 1.001


class Keeping(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        self.kept.setdefault("bias", self.linear.bias.exp())
        return self.linear(x) * self.kept["bias"]


VERDICTS = {
    Plain: (check.WORKS, ""),
    Caching: (check.CACHE, ""),
    Centred: (check.MEETS, "out of a row depends on the other rows"),
    Transposed: (check.MEETS, "out of shape [2, 5] has no row for each sample"),
    Noisy: (check.DRAWS, "two calls by itself differ in eval mode"),
    Broken: (check.ALONE, "RuntimeError: no such input"),
    Huge: (check.SLOW, "out of memory"),
    NeedsCache: (check.ALONE, "with use_cache=False RuntimeError: not without"),
    Detached: (check.ALONE, "no gradients: its output has no gradient"),
    MeetingBackwards: (check.MEETS, "the gradients of 2 of 2, among them linear.weight"),
    Keeping: (
        check.KEEPS,
        "torch.func.functional_call differs too: the gradients of 1 of 2, among them linear.bias",
    ),
    Failing: (check.RAISES, "RuntimeError: not the module's own"),
    Differing: (check.DIFFERS, "dp_apply: out"),
}


def verdict_on(kind: type[nn.Module]) -> Verdict:
    x = torch.randn(ROWS, 3, dtype=torch.float64)
    return check.verdict(iter([lambda: Model(prepared(kind()), {"x": x})]))


@pytest.mark.parametrize("kind", VERDICTS, ids=lambda kind: kind.__name__)
def test_verdicts(kind: type[nn.Module]):
    assert verdict_on(kind) == VERDICTS[kind]


def test_the_first_way_that_runs_is_taken():
    def no_way() -> Model:
        raise ImportError("no such package")

    x = torch.randn(ROWS, 3, dtype=torch.float64)
    ways = [no_way, lambda: Model(Broken(), {"x": x}), lambda: Model(prepared(Plain()), {"x": x})]
    assert check.verdict(iter(ways)).kind == check.WORKS
    assert check.verdict(iter(ways[:2])).kind == check.ALONE
    assert check.verdict(iter(ways[:1])) == (check.BUILD, "ImportError: no such package")


def test_the_page_counts_what_could_be_compared():
    verdicts = {kind.__name__: Verdict(*each) for kind, each in VERDICTS.items()}
    old = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    page = report.page(old, {"library": report.Tried({"torch": "2"}, verdicts)})
    assert "| library | **2 of 4** | 1 | 1 | 3 | 1 | 1 | 3 | 0 | 1 |" in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter")
    assert "old" not in page
    assert "`Failing`: `RuntimeError: not the module's own`" in page
