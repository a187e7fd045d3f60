"""Objects that are no trees: what is found inside them, at any depth, and what is passed by reference."""

import collections
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import optree
import pytest
import torch

import fdp
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(2)
W = torch.tensor(2.0, dtype=torch.float64)


class Store(MutableMapping):
    """A mapping that hands out attributes of its own, with a weak reference to what it belongs to."""

    def __init__(self, parent: Any) -> None:
        self.__dict__["_mapping"] = {}
        self.__dict__["_parent"] = weakref.ref(parent)

    def __getattr__(self, name: str) -> Any:
        return self._mapping[name]

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Graph:
    """Keeps its tensors two levels deep, as graph libraries do."""

    def __init__(self, **tensors: Any) -> None:
        self.__dict__["_store"] = Store(self)
        self._store.update(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_store"], name)


class GraphOfNodes(Graph):
    @property
    def nodes(self) -> Any:
        raise AssertionError("a property was read")


class Held:
    def __init__(self, held: Any) -> None:
        self.held = held


class Private:
    __slots__ = ("__held", "unset")

    def __init__(self, held: Any) -> None:
        self.__held = held


class Cyclic:
    def __init__(self, held: Any) -> None:
        self.all = [self, {"me": self}]
        self.all.append(held)


class Proxy:
    """Answers for another class, and fails when it is asked anything else."""

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":  # which isinstance asks for
            raise AssertionError(f"{name} was read")
        return Proxy


def loss(w: torch.Tensor, batch: Any, y: torch.Tensor) -> torch.Tensor:
    return ((batch.x * w - y) ** 2).sum()


INSIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "graph": lambda x: Graph(x=x),
    "properties": lambda x: GraphOfNodes(x=x),
    "object": lambda x: Held(Held(x)),
    "five deep": lambda x: Held([{"a": (Held(collections.deque([x])),)}]),
    "slots": lambda x: Held(Private(Private(x))),
    "namespace": lambda x: types.SimpleNamespace(a=types.SimpleNamespace(b=x)),
    "partial": lambda x: Held(functools.partial(len, [x])),
    "set": lambda x: Held({x}),
    "mapping": lambda x: Held(types.MappingProxyType({"a": x})),
    "frozen set": lambda x: Held(frozenset([x])),
    "cycle": lambda x: Cyclic(x),
    "proxy": lambda x: Held(Proxy(x)),
    "module": lambda _: Held(torch.nn.Linear(1, 1)),
    "scripted": lambda _: Held([torch.jit.script(torch.nn.Linear(1, 1))]),
    "sharded": lambda x: Held(fdp.scatter(x, SLOTS)),
    "late in the queue": lambda x: Held([*([0] for _ in range(5000)), x]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_deep_in_an_object_is_found(name: str):
    obj = INSIDE[name](numbers(4))
    message = rf"is a {type(obj).__name__}, which holds tensors but is no tree that fdp knows\. Make"
    with pytest.raises(TypeError, match=rf"^scatter: tree\['k'\] {message}"):
        fdp.scatter({"k": obj}, SLOTS)
    with pytest.raises(TypeError, match=rf"^value_and_grad: args\[1\] {message}"):
        fdp.value_and_grad(loss, devices=SLOTS, reduction="sum")(W, obj, numbers(4))


def test_data_parallel_does_not_give_every_replica_all_of_such_an_object():
    module = fdp.DataParallel(torch.nn.Identity(), ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"is a Graph, which holds tensors"):
        module(Graph(x=numbers(4)), numbers(4))
    with pytest.raises(TypeError, match=r"is a Graph, which holds tensors"):
        module(Graph(x=numbers(4)))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_ways_out_have_the_numbers_of_one_device(slots: int):
    class Known(Graph): ...

    known, functions = Known, (lambda g: ((g.x,), None), lambda _, parts: Known(x=next(iter(parts))))
    optree.register_pytree_node(known, *functions, namespace="fdp")  # pyright: ignore[reportArgumentType]
    x, y, devices = numbers(5), numbers(5) + 1, fdp.virtual_devices(slots)
    gradient, value = torch.func.grad_and_value(loss)(W, Graph(x=x), y)
    found = fdp.value_and_grad(loss, devices=devices, reduction="sum")(W, Known(x=x), y)
    torch.testing.assert_close(found, (value, gradient))

    scale = Graph(x=torch.tensor(3.0, dtype=torch.float64))  # the same on all slots
    closed = fdp.dp_apply(lambda w, x: x * w * scale.x, W, x, devices)
    torch.testing.assert_close(closed, x * W * 3)


BY_REFERENCE: dict[str, Callable[[], Any]] = {
    "attributes": lambda: Held({"lr": [0.1, {"a": None}], "name": "x", "kind": torch.float32}),
    "cycle": lambda: Cyclic(3),
    "function": lambda: Held(lambda w=W: w),
    "closure": lambda: lambda: W,
    "method": lambda: Held(W).__init__,
    "class": lambda: Held(type("Kind", (), {"x": W})),
    "module": lambda: Held(torch),
    "logger": lambda: Held(logging.getLogger("fdp.test")),
    "thread": lambda: Held([threading.Thread(target=print, args=(W,)), threading.Lock(), threading.Event()]),
    "weak": lambda: Held(weakref.ref(W)),
    "generator": lambda: Held(x for x in [W]),
    "vocabulary": lambda: Held({str(i): i for i in range(100_000)}),
    "many numbers": lambda: Held([float(i) for i in range(100_000)]),
}


@pytest.mark.parametrize("name", BY_REFERENCE)
def test_an_object_without_tensors_is_passed_by_reference(name: str):
    obj = BY_REFERENCE[name]()
    sharded = fdp.scatter({"x": numbers(3), "o": obj}, SLOTS)
    assert all(shard["o"] is obj for shard in sharded.shards)


def test_a_class_of_tensors_is_no_such_object():
    """Also when it is met for the first time, with tensors in its attributes."""

    class Labelled(torch.Tensor): ...

    x = numbers(4).as_subclass(Labelled)
    x.label = numbers(4)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(fdp.dp_apply(lambda w, x: x * w, W, x, SLOTS), x * W)


def test_what_is_written_into_an_object_later_is_seen():
    obj = Held(Held(None))
    fdp.scatter([numbers(3), obj], SLOTS)
    obj.held.held = numbers(3)
    with pytest.raises(TypeError, match=r"tree\[1\] is a Held, which holds tensors"):
        fdp.scatter([numbers(3), obj], SLOTS)


def test_an_object_with_too_much_inside_is_refused():
    """Tensors may be behind what is looked at, and would be wrong without a word."""
    obj = Held([[i] for i in range(20_000)])
    message = r"tree\[1\] is a Held with more than 10,000 objects inside, too many .*close over"
    with pytest.raises(TypeError, match=message):
        fdp.scatter([numbers(3), obj], SLOTS)


def test_numpy_array_deep_in_an_object_is_not_split_either():
    obj = Graph(a=np.zeros((3, 2)), scalar=np.zeros(()))
    message = r"tree\['o'\] holds a numpy array of shape \(3, 2\), which is not split.*None"
    with pytest.raises(TypeError, match=message):
        fdp.scatter({"x": numbers(3), "o": obj}, SLOTS)
    sharded = fdp.scatter({"x": numbers(3), "o": obj}, SLOTS, {"x": 0, "o": None})
    assert sharded[0]["o"] is obj
    del obj._store["a"]
    assert fdp.scatter({"x": numbers(3), "o": obj}, SLOTS)[1]["o"] is obj


@pytest.mark.deep
def test_an_object_inside_a_compiled_call():
    plain, holding = Held(Held(3.0)), Held(Held(torch.tensor(3.0)))

    def run(x: torch.Tensor, held: Any) -> torch.Tensor:
        options: Any = {"in_dims": (0, None), "executor": "sequential"}
        return fdp.dp_apply(lambda w, x, h: x * w * h.held.held, torch.tensor(2.0), (x, held), SLOTS, **options)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(4), plain), torch.full((4,), 6.0))
    with pytest.raises(Exception, match=r"holds tensors|Observed exception"):
        compiled(torch.ones(4), holding)
