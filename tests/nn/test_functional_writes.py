"""What forward writes to a module under `functional`, and what stays of it."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

import copy
import warnings
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
def test_apply_keeps_nothing_of_one_write(how, failing):
    module = Single(raises_after(WRITES[how]) if failing else WRITES[how])
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


def test_apply_keeps_nothing_of_what_forward_writes():
    module = seeded(Writing)
    apply, (params, buffers) = functional(module)
    before = contents(module)
    deep = copy.deepcopy([module.calls, module.empty, module.queue, module.bag, module.pair])
    first = apply((params, buffers), torch.ones(2, 3))
    second = apply((params, buffers), torch.ones(2, 3))
    assert str(first) == str(second)  # as text, where 1 is not True
    assert first[1] == {"count": torch.ones(())}
    assert_untouched(module, before)
    assert deep == [module.calls, module.empty, module.queue, module.bag, module.pair]


def test_functional_call_keeps_buffers():
    module, oracle, x = seeded(Writing), seeded(Writing), torch.ones(2, 3)
    outs = functional_call(module, {}, x), torch.func.functional_call(oracle, {}, x)
    assert str(outs[0]) == str(outs[1])
    assert (module.count, len(module.queue), module.bag) == (1, 1, {1})
    assert (module.n, module.zero, module.none, vars(module.fc).get("last")) == (
        1,
        0,
        None,
        None,
    )  # torch's are written


def test_a_hook_that_forward_registers_is_refused():
    module = Single(lambda m: m.register_forward_hook(lambda mod, args, out: out))
    apply, state = functional(module)
    for call in (lambda: apply(state, torch.ones(3)), lambda: functional_call(module, {}, torch.ones(3))):
        with pytest.raises(
            RuntimeError, match="forward registers a hook on a module that is called with other tensors"
        ):
            call()
    assert len(module._forward_hooks) == 0


def test_a_module_that_is_called_itself_says_so_once():
    class Noting(nn.Linear):
        def forward(self, x):
            self.noted = True
            return super().forward(x)

    module = nn.Sequential(Noting(3, 3))
    module.register_forward_hook(lambda mod, args, out: module.training and None)
    apply, state = functional(module)
    with pytest.warns(
        UserWarning, match=r"Calls of this Sequential run on the module itself.*: _forward_hooks\.\d+ leads"
    ) as said:
        apply(state, torch.ones(3))
    assert [warning.filename for warning in said] == [__file__]
    assert vars(module[0])["noted"]  # what forward writes stays
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(state, torch.ones(3))


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
        functional_call(module, {}, torch.ones(3))
    assert module.note == [1]


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
def test_plain_tensor_written_in_place(which):
    module = InPlace()
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
