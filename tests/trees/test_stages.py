"""The stages of calls, as ranges in traces of torch.profiler."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fdp
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SLOTS = fdp.virtual_devices(3)
_C: Any = torch._C  # a part of it has no types
ALL_THREADS = _C._profiler._ExperimentalConfig(profile_all_threads=True)


def predict(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sin()


def loss(w: Tensor, x: Tensor) -> Tensor:
    return predict(w, x).mean()


def ranges(call: Any, **options: Any) -> list[Any]:
    """The ranges of fdp, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], **options) as found:
        call()
    events = [event for event in found.events() or [] if event.name.startswith("fdp.")]
    return sorted(events, key=lambda event: event.time_range.start)


def names(events: list[Any]) -> list[str]:
    return [event.name.removeprefix("fdp.") for event in events]


SHARDS = ["shard 0", "shard 1", "shard 2"]


def test_dp_apply():
    w, x = numbers(3, 2), numbers(7, 3)
    events = ranges(lambda: fdp.dp_apply(predict, w, x, SLOTS))
    assert names(events) == ["replicate", "scatter", *SHARDS, "gather"]
    for before, after in pairwise(events):
        assert before.time_range.end <= after.time_range.start
    for shard in events[2:5]:
        assert "aten::matmul" in [child.name for child in shard.cpu_children]


def test_functions_of_trees():
    x = numbers(7, 3)
    batch = fdp.scatter(x, SLOTS)
    assert names(ranges(lambda: fdp.scatter(x, SLOTS))) == ["scatter"]
    assert names(ranges(lambda: fdp.replicate(x, SLOTS))) == ["replicate"]
    assert names(ranges(lambda: fdp.gather(batch))) == ["gather"]
    assert names(ranges(lambda: fdp.parallel_apply(lambda x: x.sum(), batch))) == SHARDS


@pytest.mark.parametrize("microbatches", [1, 2])
def test_value_and_grad(microbatches: int):
    w, x = numbers(3, 2), numbers(7, 3)
    step = fdp.value_and_grad(loss, devices=SLOTS, microbatches=microbatches)
    count = Counter(names(ranges(lambda: step(w, x))))
    assert set(SHARDS) <= set(count)
    assert count["scatter"] >= 1
    assert count["reduce"] + count["gather"] >= 1


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("psum", lambda w, x: fdp.psum(x.sum(0))),
        ("pmean", lambda w, x: fdp.pmean(x.sum(0), weight="rows")),
        ("pmax", lambda w, x: fdp.pmax(x.sum(0))),
        ("all_gather", lambda w, x: fdp.all_gather(x).sum(0)),
    ],
)
def test_collectives(name: str, fn: Any):
    w, x = numbers(3), numbers(7, 3)

    events = ranges(lambda: fdp.dp_apply(fn, w, x, SLOTS, out_dims="stack"), experimental_config=ALL_THREADS)
    count = Counter(names(events))
    assert count[name] == 1
    assert {shard: count[shard] for shard in SHARDS} == dict.fromkeys(SHARDS, 1)


def test_shards_on_threads():
    """The profiler looks at the calling thread alone, unless it is told otherwise."""
    w, x = numbers(3, 2), numbers(7, 3)
    with many_cores():
        events = ranges(lambda: fdp.dp_apply(predict, w, x, SLOTS, executor="threads"), experimental_config=ALL_THREADS)
    assert sorted(names(events)) == sorted(["replicate", "scatter", *SHARDS, "gather"])


def test_nested_calls():
    def outer(w: Tensor, x: Tensor) -> Tensor:
        return fdp.dp_apply(predict, w, x, SLOTS[:2])

    count = Counter(names(ranges(lambda: fdp.dp_apply(outer, numbers(3, 2), numbers(8, 3), SLOTS[:2]))))
    assert count == {"shard 0": 3, "shard 1": 3, "replicate": 3, "scatter": 3, "gather": 3}


def test_a_stage_ends_with_an_exception():
    def fails(w: Tensor, x: Tensor) -> Tensor:
        raise ValueError("no")

    def call() -> None:
        with pytest.raises(ValueError, match="no"):
            fdp.dp_apply(fails, None, numbers(4), SLOTS)
        torch.ones(1).neg()

    with profile() as found:
        call()
    (neg,) = [event for event in found.events() or [] if event.name == "aten::neg"]
    assert neg.cpu_parent is None


@pytest.mark.parametrize("is_profiled", [pytest.param(False, marks=pytest.mark.deep), True])
def test_compiled_code_has_no_stages_and_no_graph_breaks(is_profiled: bool):
    def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sharded = fdp.gather(fdp.scatter(x, SLOTS[:2]))
        return fdp.dp_apply(predict, w, sharded, SLOTS[:2]), fdp.dp_apply(loss, w, x, SLOTS[:2], out_dims="mean")

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    w, x = numbers(3, 2), numbers(7, 3)
    if is_profiled:
        assert names(ranges(lambda: torch.testing.assert_close(compiled(w, x), step(w, x)))).count("scatter") == 3
    else:
        torch.testing.assert_close(compiled(w, x), step(w, x))
