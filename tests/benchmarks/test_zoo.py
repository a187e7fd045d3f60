"""What `make zoo` says of a model, without the packages that it takes models from."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import check, report
from benchmarks.zoo.check import Verdict
from benchmarks.zoo.model import ROWS, Model, prepared
from tests.common.containers import Output


class Plain(nn.Module):
    """A model of one layer and of what it does with that."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.does, self.kept = nn.Linear(3, 2), does, dict[str, Tensor]()

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


class Caching(Plain):
    """The same, with a cache if it is asked for."""

    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        out = self.linear(x)
        if not (use_cache or self.does(self, x)):
            raise RuntimeError("not without")
        return Output(logits=out, hidden=DynamicCache(out.exp()) if use_cache else None)


class DynamicCache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.keys])


def fails(message: str, when: Callable[[Any], bool] = lambda model: True) -> Callable[[Any, Tensor], Any]:
    def does(model: Any, x: Tensor) -> Any:
        if when(model):
            raise RuntimeError(message)
        return model.linear(x)

    return does


def is_given(model: Any) -> bool:
    """Whether its parameters are others than its own, as in a call of fdp."""
    return not model.linear.weight.requires_grad


def meeting_backwards(model: Any, x: Tensor) -> Any:
    """Its gradient is not a mean over rows, its output is by rows."""
    out = model.linear(x)
    return out.detach() + (out - out.detach()) * len(x)


def keeping(model: Any, x: Tensor) -> Any:
    model.kept.setdefault("bias", model.linear.bias.exp())
    return model.linear(x) * model.kept["bias"]


MODELS: dict[str, Plain] = {
    "Plain": Plain(lambda model, x: Output(logits=model.linear(x).tanh())),
    "Caching": Caching(lambda model, x: True),
    "Centred": Plain(lambda model, x: model.linear(x - x.mean(0))),
    "Transposed": Plain(lambda model, x: model.linear(x).T),
    "Noisy": Plain(lambda model, x: model.linear(x) + torch.rand(len(x), 1)),
    "Broken": Plain(fails("no such input")),
    "Huge": Plain(fails("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
    "NeedsCache": Caching(lambda model, x: False),
    "Detached": Plain(lambda model, x: model.linear(x).detach()),
    "MeetingBackwards": Plain(meeting_backwards),
    "Keeping": Plain(keeping),
    "Failing": Plain(fails("not the module's own", is_given)),
    "Differing": Plain(lambda model, x: model.linear(x) * (1.001 if is_given(model) else 1)),
}
VERDICTS = {
    "Plain": (check.WORKS, ""),
    "Caching": (check.CACHE, ""),
    "Centred": (check.MEETS, "out of a row depends on the other rows"),
    "Transposed": (check.MEETS, "out of shape [2, 5] has no row for each sample"),
    "Noisy": (check.DRAWS, "two calls by itself differ in eval mode"),
    "Broken": (check.ALONE, "RuntimeError: no such input"),
    "Huge": (check.SLOW, "out of memory"),
    "NeedsCache": (check.ALONE, "with use_cache=False RuntimeError: not without"),
    "Detached": (check.ALONE, "no gradients: its output has no gradient"),
    "MeetingBackwards": (check.MEETS, "the gradients of 2 of 2, among them linear.weight"),
    "Keeping": (
        check.KEEPS,
        "torch.func.functional_call differs too: the gradients of 1 of 2, among them linear.bias",
    ),
    "Failing": (check.RAISES, "RuntimeError: not the module's own"),
    "Differing": (check.DIFFERS, "dp_apply: out"),
}


@pytest.mark.parametrize("name", MODELS)
def test_verdicts(name: str):
    x = torch.randn(ROWS, 3, dtype=torch.float64)
    assert check.verdict(iter([lambda: Model(prepared(MODELS[name]), {"x": x})])) == VERDICTS[name]


def test_the_first_way_that_runs_is_taken():
    def no_way() -> Model:
        raise ImportError("no such package")

    x = torch.randn(ROWS, 3, dtype=torch.float64)
    ways = [no_way, lambda: Model(MODELS["Broken"], {"x": x}), lambda: Model(prepared(MODELS["Plain"]), {"x": x})]
    assert check.verdict(iter(ways)).kind == check.WORKS
    assert check.verdict(iter(ways[:2])).kind == check.ALONE
    assert check.verdict(iter(ways[:1])) == (check.BUILD, "ImportError: no such package")


def test_the_page_counts_what_could_be_compared():
    verdicts = {name: Verdict(*each) for name, each in VERDICTS.items()}
    old = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    page = report.page(old, {"library": report.Tried({"torch": "2"}, verdicts)})
    assert "| library | **2 of 4** | 1 | 1 | 3 | 1 | 1 | 3 | 0 | 1 |" in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter")
    assert "old" not in page
    assert "`Failing`: `RuntimeError: not the module's own`" in page
