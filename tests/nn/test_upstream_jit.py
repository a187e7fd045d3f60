"""What test/jit/test_data_parallel.py of PyTorch asserts of scripted modules, on virtual devices."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from fdp.nn import gather, parallel_apply, replicate
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.nn.modules_of_data_parallel import grads_of

TWO = ("cpu", "cpu")


pytestmark = pytest.mark.usefixtures("float64_side_by_side")


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2))


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Torch warns of torch.jit wherever it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


with without_warnings():

    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.m = block()

        @torch.jit.script_method
        def forward(self, x):
            return self.m(x)

    class Around(torch.jit.ScriptModule):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @torch.jit.script_method
        def forward(self, x):
            return self.inner(x)


class Holder(nn.Module):
    """A Python module around others."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def shared() -> nn.Module:
    part = Scripted()
    return Holder(Holder(part), part)


SCRIPTS: dict[str, Callable[[], Any]] = {
    "in-python": lambda: Holder(Scripted()),
    "shared": shared,
    "traced": lambda: torch.jit.trace(Holder(block()), torch.ones(2, 2)),
    "in-script": lambda: Around(Scripted()),
    "function": lambda: torch.jit.script(block()),
}


def check_replicas(name: str) -> None:
    with without_warnings():
        module = SCRIPTS[name]()
        x = numbers(4, 2)
        replicas = replicate(module, TWO)
        for replica in replicas:
            assert [tensor.device.type for tensor in replica.state_dict().values()].count("cpu") == len(
                replica.state_dict()
            )
        module.eval()  # a call in training changes the buffers of the first replica
        want = module(x)
        for replica in replicate(module, TWO):
            assert_same_tree(replica(x), want)
        halves = torch.cat([module(half) for half in x.chunk(2)])  # a trace knows of no evaluation
        grads = torch.autograd.grad((halves**2).sum(), list(module.parameters()))
        got = gather(parallel_apply(replicate(module, TWO), x.chunk(2)), "cpu")
        assert_close_tree(torch.autograd.grad((got**2).sum(), list(module.parameters())), grads)


def test_python_submodule_script():
    check_replicas("in-python")
    with without_warnings():
        (replica,) = replicate(Holder(Scripted()), {"cpu"})
        assert replica(numbers(4, 2)).shape == (4, 2)


def test_shared_module():
    check_replicas("shared")
    with without_warnings():
        for replica in replicate(shared(), TWO):
            assert replica.parts[0].parts[0] is replica.parts[1]


def test_traced_module():
    check_replicas("traced")


@pytest.mark.parametrize("name", SCRIPTS)
def test_replicas_of_scripts_have_all_tensors(name: str):
    with without_warnings():
        module = SCRIPTS[name]()
        for replica in replicate(module, TWO):
            assert_same_tree(dict(replica.named_parameters()), dict(module.named_parameters()))
            assert_same_tree(dict(replica.named_buffers()), dict(module.named_buffers()))


def tensors_of_script(module: Any) -> list[Tensor]:
    """What the script itself computes with."""
    script: Any = getattr(module, "_c", module)
    own = [tensor for kind in (torch._C.ParameterDict, torch._C.BufferDict) for _, tensor in kind(script).items()]
    return own + [tensor for _, part in torch._C.ModuleDict(script).items() for tensor in tensors_of_script(part)]


def test_tensor_sharing():
    with without_warnings():
        module = Around(Scripted())
        first, second = replicate(module, TWO)
        own, same, other = map(tensors_of_script, (module, first, second))
    assert len(own) == len(list(module.state_dict())) == 9
    assert [tensor.data_ptr() for tensor in same] == [tensor.data_ptr() for tensor in own]
    assert {tensor.data_ptr() for tensor in other}.isdisjoint(tensor.data_ptr() for tensor in own)
    assert_same_tree(other, own)


def test_tensor_sharing_with_forward():
    with without_warnings():
        module, x = Around(Scripted()), numbers(4, 2)
        first, second = replicate(module, TWO)
        before = module(x)
        before.sum().backward()
        with torch.no_grad():
            for param in module.parameters():
                param.data -= param.grad
        after = module(x)
        assert not torch.allclose(before, after)
        assert_close_tree(first(x), after)
        assert_close_tree(second(x), before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_data_parallel_of_scripts(name: str):
    """Values, gradients, and the buffers that the first replica has written."""
    with without_warnings():
        module = SCRIPTS[name]()
        alone, x = copy.deepcopy(module), numbers(6, 2)
        got = DataParallel(module, TWO)(x)
        halves = [copy.deepcopy(alone)(half) for half in x.chunk(2)]
        assert_close_tree(got, torch.cat(halves))
        alone(x[:3])
        assert_close_tree(dict(module.named_buffers()), dict(alone.named_buffers()))
        (got**2).sum().backward()
        want = torch.cat([alone(half) for half in x.chunk(2)])
        grads = torch.autograd.grad((want**2).sum(), list(alone.parameters()))
        assert_close_tree(grads_of(module), list(grads))


def test_script_module_with_a_python_child():
    """Today's torch.jit lets nobody build one; its check is kept for those who do all the same."""
    message = "Cannot replicate network where python modules are children of ScriptModule"

    class Ignoring(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(2, 2)

    with without_warnings():
        assert all(isinstance(part, torch.jit.ScriptModule) for part in Ignoring().modules())
        module: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
        for put in (setattr, lambda script, name, child: script.add_module(name, child)):
            with pytest.raises(
                RuntimeError, match="Cannot re-assign modules in a ScriptModule with non-scripted module"
            ):
                put(module, "child", nn.Linear(2, 2))
        module._modules._python_modules["child"] = nn.Linear(2, 2)
        for network in (module, nn.Sequential(module)):
            with pytest.raises(RuntimeError, match=message):
                replicate(network, TWO)
            with pytest.raises(RuntimeError, match=message):
                DataParallel(network, TWO)(numbers(2, 2))
