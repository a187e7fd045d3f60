"""fdp.nn.replicate, as torch.nn.parallel has it and where it does better."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from fdp import DataParallel
from fdp.nn import parallel_apply, replicate
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.numbers import numbers

pytestmark = pytest.mark.usefixtures("float64")


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


class Scale(nn.Module):
    """Buffers of two kinds, a plain tensor, a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("learned", numbers(3).requires_grad_())
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)
        self.plain = numbers(3)
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.log.append(len(x))
        return x * self.weight * self.learned + self.plain


def test_the_first_replica_has_the_modules_own_tensors():
    module = Scale()
    first, second, third = replicate(module, cpus(3))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in own.items():
        assert first.get_parameter(name) is tensor if name == "weight" else first.get_buffer(name) is tensor
        for other in (second, third):
            copied = other.get_buffer(name) if name != "weight" else other.weight
            assert_same_tree(copied, tensor)
            assert copied.data_ptr() != tensor.data_ptr()
    assert second.weight.data_ptr() != third.weight.data_ptr()


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_are_modules_of_the_same_class(detach: bool):
    """Torch's replicas name no parameters."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), Scale())
    for replica in replicate(module, cpus(3), detach):
        assert replica is not module
        assert type(replica) is nn.Sequential
        assert [type(part) for part in replica.modules()] == [type(part) for part in module.modules()]
        assert all(part is not own for part, own in zip(replica.modules(), module.modules(), strict=True))
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in module.named_parameters()]
        assert list(replica.state_dict()) == list(module.state_dict())
        assert replica[2].nothing is replica[2].absent is None
        assert "absent" in replica[2]._parameters
        assert "nothing" in replica[2]._buffers


def test_what_replicas_write_in_place():
    """The first writes to the module's own buffers, the others to theirs."""
    module = Scale()
    replicas = replicate(module, cpus(3))
    parallel_apply(replicas, [numbers(rows, 3) for rows in (1, 2, 3)])
    assert_same_tree([module.seen, *(replica.seen for replica in replicas)], [torch.ones(3)] * 4)
    parallel_apply(replicas[1:], [numbers(1, 3)] * 2)
    assert_same_tree(
        [replica.seen for replica in replicas], [torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 2.0)]
    )
    assert_same_tree(module.seen, torch.ones(3))


def test_replicas_have_hooks_of_their_own_and_share_lists():
    """Torch's replicas share both with the module."""
    module, calls = Scale(), []
    module.register_forward_hook(lambda part, args, out: calls.append(part))
    first, second = replicate(module, cpus(2))
    first.register_forward_hook(lambda part, args, out: out * 0)
    parallel_apply([first, second], [numbers(1, 3), numbers(2, 3)])
    assert first.log is second.log is module.log
    assert module.log == [1, 2]
    assert [id(part) for part in calls] == [id(first), id(second)]
    assert len(module._forward_hooks) == len(second._forward_hooks) == 1


def test_gradients_of_replicas_add_up():
    module, x = Scale(), numbers(6, 3)
    replicas = replicate(module, cpus(3))
    outputs = parallel_apply(replicas, x.chunk(3))
    (torch.cat(outputs) * x.cos()).sum().backward()
    got = (module.weight.grad, module.learned.grad)
    module.weight.grad = module.learned.grad = None
    (module(x) * x.cos()).sum().backward()
    assert_close_tree(got, (module.weight.grad, module.learned.grad))


def test_an_unused_parameter_has_no_gradient():
    """Torch gives it zeros."""
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    outputs = [replica["used"](numbers(3, 2)) for replica in replicate(module, cpus(2))]
    torch.cat(outputs).sum().backward()
    assert module["used"].weight.grad is not None
    assert [param.grad for param in module["unused"].parameters()] == [None, None]


def test_detached_replicas():
    module = Scale()
    with unharmed(list(module.parameters())):
        first, second = replicate(module, cpus(2), detach=True)
    assert first.weight is module.weight
    assert not second.weight.requires_grad
    assert not second.learned.requires_grad
    second(numbers(2, 3)).sum()
    assert module.weight.grad is None
    with torch.no_grad():
        assert not replicate(module, cpus(2))[1].weight.requires_grad


def test_copies_need_a_gradient_where_the_original_does():
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    for replica in replicate(module, cpus(3)):
        assert (replica.weight.requires_grad, replica.bias.requires_grad) == (False, True)


def test_shared_tensors_and_modules_stay_shared():
    module = nn.Module()
    module.a, module.b = nn.Linear(2, 2), nn.Linear(2, 2)
    module.b.weight, module.c = module.a.weight, module.a
    for replica in replicate(module, cpus(2)):
        assert replica.a is replica.c
        assert replica.a.weight is replica.b.weight
        assert replica.a.bias is not replica.b.bias


def test_plain_tensors_are_shared():
    module = Scale()
    assert all(replica.plain is module.plain for replica in replicate(module, cpus(2)))


class Bound(nn.Module):
    """An override on the instance, as libraries make them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.how = self.double
        self.forward = self.how

    def double(self, x: Tensor) -> Tensor:
        return 2 * self.weight * x


def test_methods_on_the_instance_are_those_of_the_replica():
    """In torch they stay those of the module."""
    module = Bound()
    _, second = replicate(module, cpus(2))
    assert second.how.__self__ is second
    assert second.forward.__self__ is second
    with torch.no_grad():
        module.weight.fill_(5)
    assert_same_tree(second(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0, 16), torch.float64), ((3, 0, 8), torch.float64), ((2, 3), torch.complex128), ((), torch.float64)],
    ids=["no-rows", "no-columns", "complex", "0-dim"],
)
def test_odd_parameters(shape: tuple[int, ...], dtype: torch.dtype):
    """Torch makes empty parameters flat."""
    module = nn.Module()
    module.register_parameter("odd", nn.Parameter(numbers(*shape, dtype=dtype)))
    module.register_parameter("other", nn.Parameter(numbers(3)))
    for replica in replicate(module, cpus(3)):
        assert_same_tree([replica.odd, replica.other], [module.odd, module.other])


@pytest.mark.parametrize("make", [list, tuple, OrderedDict.fromkeys, iter], ids=["list", "tuple", "dict", "iterator"])
def test_any_iterable_of_devices(make: Callable[[Any], Any]):
    assert len(replicate(nn.Linear(1, 1), make(["cpu", "cpu:0"]))) == 2
    assert replicate(nn.Linear(1, 1), make([])) == []


def test_a_set_of_devices():
    (replica,) = replicate(nn.Linear(1, 1), {"cpu"})
    assert isinstance(replica, nn.Linear)


def test_copies_of_replicas():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for replica in replicate(module, cpus(2), detach=True):
        for copied in (copy.deepcopy(replica), pickle.loads(pickle.dumps(replica))):
            assert_same_tree(copied.state_dict(), module.state_dict())
            assert copied[0].weight is not replica[0].weight
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(replicate(module, cpus(2))[1])


def test_gradient_of_replicate():
    module = nn.Linear(3, 2)

    def run(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
        holder = nn.Linear(3, 2)
        del holder.weight, holder.bias
        holder.register_buffer("weight", weight)
        holder.register_buffer("bias", bias)
        return [(replica(x) ** 2) * (i + 1) for i, replica in enumerate(replicate(holder, cpus(3)))]

    inputs = (module.weight, module.bias, numbers(2, 3).requires_grad_())
    assert gradcheck(lambda *inputs: tuple(run(*inputs)), inputs)
    assert gradgradcheck(lambda *inputs: tuple(run(*inputs)), inputs)


def test_hooks_and_norms_may_be_put_on_replicas():
    module, x = nn.Sequential(nn.Linear(3, 2)), numbers(4, 3)
    first, second = replicate(module, cpus(2))
    seen: list[Any] = []
    second[0].register_forward_hook(lambda part, args, out: seen.append(out))
    nn.utils.parametrizations.weight_norm(second[0])
    assert_close_tree(second(x), module(x))
    first(x)
    assert len(seen) == 1
    assert not module[0]._forward_hooks


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda part, args, out: out * module.weight.sum())
    return module


LEADING_BACK: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "compiled": (lambda module: torch.compile(module, backend="eager"), "forward"),
    "compiled part": (lambda module: nn.Sequential(torch.compile(module, backend="eager")), r"0\.forward"),
    "compiled in place": (compiled_in_place, "_compiled_call_impl"),
    "hook that closes over it": (hooked, r"_forward_hooks\.\d+"),
}


@pytest.mark.parametrize(("make", "path"), LEADING_BACK.values(), ids=LEADING_BACK)
def test_what_leads_back_to_the_module_is_refused(make: Callable[[nn.Module], Any], path: str):
    """Torch's replicas compute with the module's own tensors."""
    module, x = make(nn.Linear(3, 2)), numbers(4, 3)
    want, said = module(x), f"there can be no replica of this .*: {path} leads back to it"
    with pytest.raises(RuntimeError, match=f"^replicate: {said}"):
        replicate(module, cpus(2))
    assert_close_tree(DataParallel(module, cpus(2))(x), want)
    assert len(list(module.parameters())) == 2
    assert_same_tree(module(x), want)


def test_replicas_made_in_inference_mode():
    module = nn.BatchNorm1d(2)
    with torch.inference_mode():
        for replica in replicate(module, cpus(2)):
            replica(numbers(3, 2))
    assert int(module.num_batches_tracked) == 1
    module(numbers(3, 2)).sum().backward()
