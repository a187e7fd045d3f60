"""`functional` in several threads, and what it keeps of a module."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import dp_apply, functional, functional_call
from tests.common.depth import few
from tests.nn.odd_modules import (
    BY_NAME,
    Cached,
    Recursive,
    X,
    assert_untouched,
    called,
    close,
    contents,
    each_module,
    other_tensors,
    seeded,
    tensors,
    with_closure,
)

pytestmark = pytest.mark.usefixtures("float64")


class CallsPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return functional_call(self.fc, {}, x)


def wrong_calls(call: Callable[[int], tuple[Any, Any]], calls: int, threads: int = 4) -> list[object]:
    """The calls that failed or did not give what they should, with threads that change as often as they can."""
    wrong: list[object] = []

    def run(i: int) -> None:
        for n in range(calls):
            try:
                ours, expected = call(i)
                if not all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(expected), strict=True)):
                    wrong.append((i, n))
            except Exception as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    return wrong


def counted():
    class Counted(nn.Sequential):
        n = 0

        def forward(self, x):
            self.n = self.n + 1
            return super().forward(x)

    return Counted(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3))


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("make", "calls"), [(counted, 35), (with_closure, 35), (Recursive, 4)])
def test_threads(make, calls, times):
    module, (x,) = seeded(make), X()
    apply, _ = functional(module)
    states = [other_tensors(module) for _ in range(4)]
    expected = [functional(seeded(make))[0](state, x) for state in states]

    def call(i):
        params, buffers = states[i]
        merged = {**params, **{name: b.clone() for name, b in buffers.items()}}
        out = functional_call(module, merged, x)
        again = out, {name: merged[name] for name in buffers}
        return (apply(states[i], x), again), (expected[i], expected[i])

    assert wrong_calls(call, calls * times) == []


@pytest.mark.parametrize("through", ["apply", "functional_call"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", [CallsPart, Recursive])
def test_calls_of_parts_in_forward_leave_nothing(make, closure, through):
    module, (x,) = make(), X()
    if closure:
        module.register_forward_hook(lambda mod, args, out: out + module.fc.bias)
    apply, _ = functional(module)

    def refs() -> list[weakref.ref[Tensor]]:
        params, _ = other_tensors(module)
        with torch.no_grad():
            apply((params, {}), x) if through == "apply" else functional_call(module, params, x)
        return [weakref.ref(p) for p in params.values()]

    gc.disable()
    try:
        for _ in range(3):
            assert [ref() for ref in refs() if ref() is not None] == []
    finally:
        gc.enable()


def test_call_that_begins_while_another_is_in_place():
    started, go = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x):
            started.set()
            assert go.wait(30)
            return super().forward(x)

    module, (x,) = Waiting(3, 3), X()
    module.register_forward_hook(lambda mod, args, out: out + module.bias)
    apply, _ = functional(module)
    before, states, outs = contents(module), [other_tensors(module) for _ in range(2)], {}
    threads = [threading.Thread(target=lambda i=i: outs.update({i: apply(states[i], x)[0]})) for i in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # by now it has met the module in the middle of the other call
    go.set()
    for thread in threads:
        thread.join()
    assert_untouched(module, before)
    for i, (params, _) in enumerate(states):
        close(outs[i], nn.functional.linear(x, **params) + params["bias"])


def test_calls_while_another_thread_compiles():
    module, (x,) = with_closure(), X()
    own, begun, done = contents(module), threading.Event(), threading.Event()
    given = [other_tensors(module)[0] for _ in range(4)]
    expected = [torch.func.functional_call(with_closure(), params, x) for params in given]

    def backend(graph, example):
        begun.set()
        done.wait(60)
        return graph.forward

    compiled = torch.compile(nn.Linear(3, 3), backend=backend)
    compiling = threading.Thread(target=compiled, args=(x,))
    compiling.start()
    try:
        assert begun.wait(60)
        assert wrong_calls(lambda i: (functional_call(module, dict(given[i]), x), expected[i]), 35) == []
        with pytest.raises(RuntimeError, match="wrote in place"):
            dp_apply(lambda _, x: x.add_(1), (), x.clone(), ["cpu", "cpu"])
    finally:
        done.set()
        compiling.join()
    assert_untouched(module, own)


def test_threads_that_call_a_part_of_one_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, weights):
            own = functional_call(self.fc, {}, x)
            outs: list[Any] = [None] * 4

            def work(i):
                outs[i] = [functional_call(self.fc, {"weight": weights[i]}, x) for _ in range(20)]

            workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            [worker.start() for worker in workers]
            [worker.join() for worker in workers]
            return own, outs, functional_call(self.fc, {}, x)

    module, (x,) = Outer(), X()
    apply, _ = functional(module)
    weights = [torch.randn(3, 3) for _ in range(4)]
    for _ in range(3):
        params, _ = other_tensors(module)
        own, outs, again = apply((params, {}), x, weights)[0]
        expected = nn.functional.linear(x, params["fc.weight"], params["fc.bias"])
        close([own, again], [expected, expected])
        for weight, several in zip(weights, outs, strict=True):
            close(several, [nn.functional.linear(x, weight, params["fc.bias"])] * 20)


def fails(mod, args):
    raise ArithmeticError("in forward")


@few()
@each_module
@pytest.mark.parametrize("through", ["apply", "functional_call"])
@pytest.mark.parametrize("failing", [False, True])
def test_no_reference_is_left(make, args, through, failing):
    module, inputs = seeded(make), args()
    apply, _ = functional(module)
    if failing:
        list(module.modules())[-1].register_forward_pre_hook(fails)

    def call() -> list[weakref.ref[Tensor]]:
        params, buffers = other_tensors(module)
        with torch.no_grad(), contextlib.suppress(ArithmeticError):
            if through == "apply":
                apply((params, buffers), *inputs)
            else:
                functional_call(module, {**params, **buffers}, inputs)
        return [weakref.ref(tensor) for tensor in [*params.values(), *buffers.values()]]

    gc.disable()
    try:
        for _ in range(2):
            refs = call()
            if make in IN_CYCLES:  # clones are in cycles as their modules are
                gc.collect()
            assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


IN_CYCLES = [BY_NAME[name][0] for name in ("aliases", "partial", "patched forward")]


def test_functional_call_does_not_keep_modules():
    def call(make, args):
        module = seeded(make)
        functional_call(module, {}, args())
        return weakref.ref(module)

    refs = {name: call(make, args) for name, (make, args) in BY_NAME.items() if make is not Cached}
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == []


def test_a_clone_goes_with_its_call():
    module = nn.Linear(3, 3)
    ((_, clone),) = called(lambda: functional_call(module, {}, torch.ones(3)))
    assert clone() is None


def test_another_module_at_the_same_address():
    addresses = set()
    for _ in range(100):
        module, x = nn.Linear(3, 3), torch.ones(3)
        addresses.add(id(module))
        close(functional_call(module, {}, x), module(x))
        del module
    assert len(addresses) < 100
