"""Functions that compilers see, mapped by shards that run side by side."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, jvp

import fdp
from tests.common.programs import run_program
from tests.execution.side_by_side import X, f, threads

pytestmark = pytest.mark.usefixtures("switching")


def test_guarded_functions_still_compile():
    threads(torch.mul, X[0], X)
    module = nn.Linear(3, 3).double()
    params = {name: tensor.detach() * 2 for name, tensor in module.named_parameters()}

    def call(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (x,))

    def tangent(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1]

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(params, X), call(params, X))
    compiled = torch.compile(tangent, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X[0], X), tangent(X[0], X))


@pytest.mark.parametrize("compiler", ["later", pytest.param("first", marks=pytest.mark.deep)])
def test_guarded_random_functions_still_compile(compiler: str):
    program = """
import warnings, torch, fdp
warnings.simplefilter("ignore")
fdp.dp_apply(torch.mul, torch.ones(2), torch.ones(4, 2), fdp.virtual_devices(2), executor="threads")
def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(2)
def restored(x):
    state = torch.get_rng_state()
    y = torch.rand(2)
    torch.set_rng_state(state)
    return x + y
x = torch.zeros(2)
want = seeded(x)
print(torch.equal(torch.compile(seeded, backend="eager")(x), want))
compiled = torch.compile(restored, backend="eager")
print(torch.equal(compiled(x), compiled(x)), torch.random.manual_seed(3) is torch.default_generator)
"""
    imported = "import torch._dynamo\n" if compiler == "first" else ""
    result = run_program(imported + program)
    assert result.stdout == "True\nTrue True\n", result.stderr


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.deep)])
def test_a_compiled_function_is_mapped(backend: str):
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend)
    w, devices = torch.randn(3, dtype=torch.float64), fdp.virtual_devices(4)
    for rows in (8, 7, 5):
        torch.testing.assert_close(fdp.dp_apply(compiled, w, X[:rows], devices), f(w, X[:rows]))
        got = fdp.grad(lambda w, x: compiled(w, x).mean(), devices=devices)(w, X[:rows])
        torch.testing.assert_close(got, grad(lambda w, x: f(w, x).mean())(w, X[:rows]))


class NoWeakRef:
    __slots__ = ()

    def __call__(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return f(w, x)


class NoHash(NoWeakRef):
    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("fn", [NoHash(), NoWeakRef(), NoHash().__call__, functools.partial(f), lambda w, x: f(w, x)])
def test_any_callable_beside_compiled_ones(fn: Any):
    torch.compile(f, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(threads(fn, X[0], X), f(X[0], X))
        torch.testing.assert_close(threads(torch.mul, X[0], X), X[0] * X)  # a function of C
