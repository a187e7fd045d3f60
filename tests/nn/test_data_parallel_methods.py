"""Methods of DataParallel that a subclass overrides, as it does with torch's."""

import copy
import inspect
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import DataParallel
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.nn.modules_of_data_parallel import Apply, mlp, value_and_grads

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]

each_executor = pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])


class Traced(DataParallel):
    """Each of the four methods calls torch-like code of its own and notes that it was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.calls.append(f"replicate {len(device_ids)}")
        return super().replicate(module, device_ids)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.calls.append(f"scatter {len(device_ids)}")
        return super().scatter(inputs, kwargs, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.calls.append(f"parallel_apply {len(replicas)} {len(inputs)} {len(kwargs)}")
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.calls.append(f"gather {len(outputs)} {output_device}")
        return super().gather(outputs, output_device)


@pytest.mark.parametrize(
    ("slots", "rows", "calls"),
    [
        (4, 8, ["scatter 4", "replicate 4", "parallel_apply 4 4 4", "gather 4 cpu"]),
        (4, 3, ["scatter 4", "replicate 3", "parallel_apply 3 3 3", "gather 3 cpu"]),
        (2, 1, ["scatter 2", "replicate 1", "parallel_apply 1 1 1", "gather 1 cpu"]),
        (1, 5, ["scatter 1"]),
    ],
)
def test_the_order_of_the_methods(slots: int, rows: int, calls: list[str]):
    shim = Traced(mlp(), ["cpu"] * slots)
    assert_close_tree(shim(numbers(rows, 3)), shim.module(numbers(rows, 3)))
    assert shim.calls == calls


class WithCallback(DataParallel):
    """A pattern of many programs: every part of every replica learns who it is."""

    def replicate(self, module: Any, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        context = [object() for _ in module.modules()]
        for i, replica in enumerate(replicas):
            for j, part in enumerate(replica.modules()):
                part.ctx, part.copy_id = context[j], i
                part.__data_parallel_replicate__(i) if hasattr(part, "__data_parallel_replicate__") else None
        return replicas


class Knows(nn.Linear):
    copy_id: int
    ctx: object
    number: int

    def __data_parallel_replicate__(self, number: int) -> None:
        self.number = number

    def forward(self, input: Tensor) -> Tensor:
        SEEN.append((self.number, self.copy_id, self.ctx, len(input)))
        return super().forward(input)


SEEN: list[Any] = []


@each_executor
def test_replicas_may_be_told_who_they_are(executor: Any):
    module, x = nn.Sequential(Knows(3, 2), nn.Sequential(Knows(2, 2))).double(), numbers(5, 3)
    shim = WithCallback(module, ["cpu"] * 2, executor=executor)
    got = None
    for _ in range(2):
        SEEN.clear()
        with many_cores():
            got = value_and_grads(shim, module, x)
        assert sorted(seen[:2] for seen in SEEN) == [(0, 0), (0, 0), (1, 1), (1, 1)]
        assert len({id(seen[2]) for seen in SEEN}) == 2
        assert {seen[0]: seen[3] for seen in SEEN} == {0: 3, 1: 2}
        assert not any(hasattr(part, "copy_id") or hasattr(part, "number") for part in module.modules())
    for part in module.modules():
        vars(part).update(number=None, copy_id=None, ctx=None)
    assert_close_tree(got, value_and_grads(module, module, x))


def test_replicate_may_return_other_modules():
    class Copies(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [copy.deepcopy(module) for _ in device_ids]

    class Same(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return [module] * len(device_ids)

    class Torch(DataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            return fdp.nn.replicate(module, device_ids, not torch.is_grad_enabled())

    module, x = mlp(), numbers(5, 3)
    assert_close_tree(Copies(module, TWO)(x), module(x))
    for kind in (Same, Torch):
        assert_close_tree(value_and_grads(kind(module, TWO), module, x), value_and_grads(module, module, x))


def test_scatter_may_be_another():
    class Interleaved(DataParallel):
        """Every second row, in one shard more than there are rows for by chunks."""

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            n = len(device_ids)
            shards = [tuple(tensor[i::n] for tensor in inputs) for i in range(n)]
            return shards, [dict(kwargs, rank=i) for i in range(n)]

    ranks: list[Any] = []
    shim = Interleaved(Apply(lambda x, rank: ranks.append(rank) or x * 2), ["cpu"] * 3, executor="sequential")
    x = numbers(4, 2)
    assert_same_tree(shim(x), torch.cat([x[0::3], x[1::3], x[2::3]]) * 2)
    assert ranks == [0, 1, 2]


def test_scatter_may_use_fewer_devices():
    class First(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return super().scatter(inputs, kwargs, device_ids[:2])

    seen: list[int] = []
    shim = First(Apply(lambda x: seen.append(len(x)) or x), ["cpu"] * 4, executor="sequential")
    assert_same_tree(shim(numbers(6)), numbers(6))
    assert seen == [3, 3]


def test_parallel_apply_may_be_another():
    class Loop(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [replica(*args, **named) for replica, args, named in zip(replicas, inputs, kwargs, strict=True)]

    class Library(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return fdp.nn.parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    class Scaled(DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [2 * out for out in super().parallel_apply(replicas, inputs, kwargs)]

    module, x = mlp(), numbers(5, 3)
    want = value_and_grads(module, module, x)
    for kind in (Loop, Library):
        assert_close_tree(value_and_grads(kind(module, ["cpu"] * 3), module, x), want)
    assert_close_tree(Scaled(module, ["cpu"] * 3)(x), 2 * module(x))


def test_gather_may_be_another():
    class Listed(DataParallel):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return outputs, output_device

    class Mean(DataParallel):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return super().gather([out[None] for out in outputs], output_device).mean()

    x = numbers(4)
    outputs, device = Listed(Apply(lambda x: {len(x): object()}), TWO)(x)
    assert (len(outputs), device) == (2, CPU)
    assert_close_tree(Mean(Apply(lambda x: x.sum()), TWO)(x), x.sum() / 2)


def test_the_methods_work_when_called_by_themselves():
    module, x = mlp(), numbers(5, 3)
    shim = DataParallel(module, TWO)
    inputs, kwargs = shim.scatter((x,), {}, shim.device_ids)
    replicas = shim.replicate(shim.module, shim.device_ids)
    outputs = shim.parallel_apply(replicas, inputs, kwargs)
    out = shim.gather(outputs, "cpu")
    assert_close_tree(out, module(x))
    weight = next(module.parameters())
    assert_close_tree(torch.autograd.grad(out.sum(), weight), torch.autograd.grad(module(x).sum(), weight))
    assert [type(replica) for replica in replicas] == [nn.Sequential] * 2


def test_forward_may_be_another():
    """Programs that balance their GPUs copy torch's forward and change it."""

    class Mine(DataParallel):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            shards, named = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(shards)])
            return self.gather(self.parallel_apply(replicas, shards, named), "cpu")

    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), numbers(6, 3)
    other = copy.deepcopy(module)
    got = value_and_grads(Mine(module, TWO), module, x)
    assert_close_tree(got, value_and_grads(DataParallel(other, TWO), other, x))
    assert_close_tree(module.state_dict(), other.state_dict())


class Graph:
    """Nodes, and how many of them: what a library hands to its wrapper one by one."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class OfGraphs(DataParallel):
    """As wrappers of graph libraries are written for torch: forward takes a list, keyword arguments are None."""

    def forward(self, graphs: list[Graph]) -> Any:
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, None)
        return self.gather(outputs, cast(Any, self.output_device))

    def scatter(self, graphs: list[Graph], device_ids: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        each = -(-len(graphs) // len(device_ids))
        parts = [graphs[i : i + each] for i in range(0, len(graphs), each)]
        return [Graph(torch.cat([graph.nodes for graph in part])) for part in parts]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_wrapper_for_lists_of_graphs(count: int):
    class OnNodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, graph: Graph) -> Tensor:
            return self.inner(graph.nodes)

    module, x = OnNodes(), numbers(2 * count, 3)
    wrapped = OfGraphs(module, ["cpu"] * 3)
    got = value_and_grads(lambda x: wrapped([Graph(part) for part in x.split(2)]), module, x)
    assert_close_tree(got, value_and_grads(module.inner, module, x))


@pytest.mark.parametrize("name", ["forward", "replicate", "scatter", "parallel_apply", "gather"])
def test_methods_take_what_torch_s_take(name: str):
    own, torchs = (inspect.signature(getattr(kind, name)) for kind in (DataParallel, nn.DataParallel))
    parts = [[(p.name, p.kind, p.default) for p in each.parameters.values()] for each in (own, torchs)]
    assert parts[0] == parts[1]


def test_lengths_are_compared():
    shim = DataParallel(mlp(), TWO)
    with pytest.raises(AssertionError, match="The number of modules 2 is not equal to the number of inputs 1"):
        shim.parallel_apply([shim.module] * 2, [(1,)], [{}, {}])
