"""What forward writes to a module under `functional`, and what stays of it."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fdp import functional, functional_call
from tests.common.depth import few
from tests.nn.odd_modules import (
    Plain,
    Writing,
    assert_untouched,
    close,
    contents,
    seeded,
    with_closure_over_writing,
)

pytestmark = pytest.mark.usefixtures("float64")


class Single(nn.Module):
    """Writes one thing, and returns what it found of all."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.plain, self.note = nn.Linear(3, 3), nn.Sequential(), "note"
        self.register_buffer("count", torch.zeros(()))
        self.fc.register_forward_hook(lambda mod, args, out: out)
        self.items, self.empty = [1, 2], []
        self.write = write

    def forward(self, x):
        found = [(name, str(vars(part)), list(part._parameters)) for name, part in self.named_modules()]
        self.write(self)
        return self.fc(x), found


def raises_after(write):
    def both(module):
        write(module)
        raise ArithmeticError("in forward")

    return both


WRITES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "note", "other"),
    "new attribute": lambda m: setattr(m.fc, "new", 1),
    "no attribute": lambda m: delattr(m, "note"),
    "dict of attributes": lambda m: vars(m).update(note=2),
    "list": lambda m: m.items.append(3),
    "item of a list": lambda m: m.items.__setitem__(0, True),
    "empty list": lambda m: m.empty.append(3),
    "first hook": lambda m: m.register_forward_hook(lambda mod, args, out: out),
    "first hook with kwargs": lambda m: m.register_forward_hook(lambda mod, args, kwargs, out: out, with_kwargs=True),
    "second hook": lambda m: m.fc.register_forward_pre_hook(lambda mod, args: None),
    "no hook": lambda m: m.fc._forward_hooks.clear(),
    "first submodule": lambda m: m.plain.append(nn.Tanh()),
    "another submodule": lambda m: setattr(m, "new", nn.Tanh()),
    "submodule": lambda m: setattr(m, "plain", nn.Tanh()),
    "registries": lambda m: vars(m).update(_modules={"fc": m.fc}, _buffers={}),
    "first buffer": lambda m: m.fc.register_buffer("new", torch.zeros(())),
    "another buffer": lambda m: m.register_buffer("new", torch.zeros(()), persistent=False),
    "no buffer": lambda m: delattr(m, "count"),
    "parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.zeros(3, 3))),
    "no parameter": lambda m: setattr(m.fc, "bias", None),
    "mode": lambda m: m.eval(),
}


@few(2)
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_apply_keeps_nothing_of_one_write(how, failing, hooked):
    module = Single(raises_after(WRITES[how]) if failing else WRITES[how])
    if hooked:
        module.fc.register_forward_hook(lambda mod, args, out, owner=module: out)
    apply, state = functional(module)
    before = contents(module)
    if failing:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="in forward"):
                apply(state, torch.ones(3))
        module.write = WRITES[how]
        apply(state, torch.ones(3))
        return
    (_, first), new_buffers = apply(state, torch.ones(3))
    (_, second), _ = apply(state, torch.ones(3))
    assert first == second
    assert list(new_buffers) == ([] if how == "no buffer" else ["count"]) or how == "registries"
    assert_untouched(module, before)


@pytest.mark.parametrize("make", [Writing, with_closure_over_writing])
def test_apply_keeps_nothing_of_what_forward_writes(make):
    module = seeded(make)
    apply, (params, buffers) = functional(module)
    before = contents(module)
    deep = copy.deepcopy([module.calls, module.empty, module.queue, module.bag, module.pair])
    first = apply((params, buffers), torch.ones(2, 3))
    second = apply((params, buffers), torch.ones(2, 3))
    assert str(first) == str(second)  # as text, where 1 is not True
    assert first[1] == {"count": torch.ones(())}
    assert_untouched(module, before)
    assert deep == [module.calls, module.empty, module.queue, module.bag, module.pair]


@pytest.mark.parametrize("make", [Writing, with_closure_over_writing])
def test_functional_call_writes_what_torchs_writes(make):
    module, oracle, x = seeded(make), seeded(make), torch.ones(2, 3)
    for _ in range(2):
        given, theirs = {"fc.weight": torch.ones(3, 3)}, {"fc.weight": torch.ones(3, 3)}
        out, found = functional_call(module, given, x)
        expected, expected_found = torch.func.functional_call(oracle, theirs, x)
        close(out, expected)
        assert str(found) == str(expected_found)
    assert module.none is module.calls
    assert module.empty == {module.fc: [module.fc]}
    assert module.fc.last == (module.drop, module.fc.forward)
    assert [len(part._forward_hooks) for part in (module, oracle)] == [2, 2]
    for part, theirs in zip(module.modules(), oracle.modules(), strict=True):
        assert list(vars(part)) == list(vars(theirs))
    close(dict(module.state_dict()), dict(oracle.state_dict()))


def test_attribute_that_was_deleted_in_forward():
    class Deleting(nn.Linear):
        def forward(self, x):
            del self.note
            return super().forward(x)

    module = Deleting(3, 3)
    module.note = [1]
    apply, state = functional(module)
    for _ in range(2):
        apply(state, torch.ones(3))
    assert module.note == [1]
    functional_call(module, {}, torch.ones(3))
    assert not hasattr(module, "note")
    with pytest.raises(AttributeError, match="note"):
        apply(state, torch.ones(3))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.fc.history = {"all": [torch.zeros(3)]}
        self.others, self.pair = [nn.BatchNorm1d(3)], (torch.zeros(1),)

    def forward(self, x, which):
        if which == "list":
            self.fc.history["all"][0] += 1
        elif which == "tuple":
            self.pair[0].add_(1)
        elif which == "module":
            self.others[0](x)
        elif which == "other":
            self.fc.history["all"][0] = torch.ones(3)
        return self.fc(x)


WRITTEN = {"list": r"fc\.history\.all\.0", "tuple": r"pair\.0", "module": r"others\.0\.num_batches_tracked"}


@pytest.mark.parametrize("which", WRITTEN)
@pytest.mark.parametrize("hooked", [False, True])
def test_plain_tensor_written_in_place(which, hooked):
    module = InPlace()
    if hooked:
        module.fc.register_forward_hook(lambda mod, args, out: out + module.fc.bias)
    apply, state = functional(module)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"apply: forward wrote in place to \['{WRITTEN[which]}'\].*register_buffer"
        ):
            apply(state, torch.ones(2, 3), which)
        apply(state, torch.ones(2, 3), "none")
        apply(state, torch.ones(2, 3), "other")  # another tensor in its place is no write
    functional_call(module, {}, (torch.ones(2, 3), which))


def test_inference_tensors():
    module = Plain()
    with torch.inference_mode():
        module.tensor = torch.ones(3)
        apply, state = functional(module)
        close(apply(state, torch.ones(3))[0], module(torch.ones(3)))
    close(apply(state, torch.ones(3))[0], module(torch.ones(3)))
