"""Loops that keep their state on the slots give the numbers of a loop on one device."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_close, assert_same
from property_tests.functions import sines, summary, value_and_grads
from property_tests.places import moved
from property_tests.strategies import devices, executors, parameters, row_counts, slot_counts
from tests.common.containers import leaves_of, mapped

RATE, MOMENTUM = 0.1, 0.9


def loss_of(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.cos(summary(params) + torch.arange(3, device=x.device))
    return (torch.tanh(x * weight).sum(1) - y).square().mean()


def batch_of(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = sines(rows, 3) + step
    return x, x.sum(1).cos()


def zip_trees(fn: Any, *trees: Any) -> Any:
    """A tree from the leaves of several trees."""
    columns = zip(*map(leaves_of, trees), strict=True)
    return mapped(lambda _: fn(*next(columns)), trees[0])


def stepped(params: Any, momentum: Any, grads: Any) -> tuple[Any, Any]:
    """A step of gradient descent with momentum that makes new tensors."""
    momentum = zip_trees(lambda m, g: MOMENTUM * m + g, momentum, grads)
    return zip_trees(lambda p, m: p - RATE * m, params, momentum), momentum


def stepped_in_place(params: Any, momentum: Any, grads: Any) -> tuple[Any, Any]:
    """The same, written over the old ones."""
    zip_trees(lambda m, g: m.mul_(MOMENTUM).add_(g), momentum, grads)
    zip_trees(lambda p, m: p.sub_(RATE * m), params, momentum)
    return params, momentum


@given(st.data())
def test_training_on_slots_is_training_on_one_device(data: st.DataObject):
    slots = data.draw(slot_counts())
    where = data.draw(devices(slots))
    rows = data.draw(st.lists(row_counts(slots, at_least=1), min_size=1, max_size=4))
    params = data.draw(parameters(states=["plain"]))
    params = mapped(lambda leaf: leaf.clone(), params)  # ties and shared memory would be one state on one device
    momentum = mapped(torch.zeros_like, params)
    step = data.draw(st.sampled_from([stepped, stepped_in_place]))
    state: Any = fdp.replicate(params, where), fdp.replicate(momentum, where)
    value_and_grad = fdp.value_and_grad(loss_of, devices=where, executor=data.draw(executors()))
    for number, count in enumerate(rows):
        batch = batch_of(count, number)
        value, grads = value_and_grad(state[0], *batch)
        state = state[0].map(step, state[1], grads).unzip()
        want, (true_grads,) = value_and_grads(lambda p, batch=batch: loss_of(p, *batch), [params], [0])
        params, momentum = stepped(params, momentum, true_grads)
        assert_close(value, want.detach())
        for slot in range(slots):
            assert_close((state[0][slot], state[1][slot]), (params, momentum))


class Model(torch.nn.Module):
    """Parameters, and a buffer that forward writes to."""

    mean: torch.Tensor

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(params)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return loss_of(list(self.all), x, y)


@given(st.data())
def test_training_a_module_is_the_plain_loop(data: st.DataObject):
    slots = data.draw(slot_counts())
    where, executor = data.draw(devices(slots)), data.draw(executors())
    clip = data.draw(st.sampled_from([1e-2, 1e9]))
    leaves = [torch.ones(2, dtype=torch.float64), *leaves_of(data.draw(parameters(states=["plain"])))]
    plain, model = (Model([leaf.clone() for leaf in leaves]) for _ in range(2))
    apply, (params, buffers) = fdp.functional(model)

    def loss(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return apply((params, buffers), x, y)

    step = fdp.value_and_grad(
        loss, has_aux=True, aux_dims="mean", devices=where, executor=executor, in_dims=(None, None, 0, 0)
    )
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=RATE, momentum=MOMENTUM) for each in (model, plain))
    for number, count in enumerate(data.draw(st.lists(row_counts(slots, at_least=1), min_size=1, max_size=4))):
        batch = batch_of(count, number)
        theirs.zero_grad()
        plain(*batch).backward()
        (_, new), grads = step(params, buffers, *batch)
        fdp.set_grads(model, grads)
        fdp.set_buffers(model, new)
        norm, true_norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), clip) for each in (model, plain))
        assert_close(norm, true_norm)
        ours.step()
        theirs.step()
        (assert_same if slots == 1 else assert_close)(dict(model.state_dict()), dict(plain.state_dict()))


@given(st.data())
def test_parallel_apply_is_the_function_on_each_slot(data: st.DataObject):
    slots = data.draw(slot_counts())
    where, executor = data.draw(devices(slots)), data.draw(executors())
    params = data.draw(parameters(states=["plain"]))
    rows = data.draw(st.lists(row_counts(slots), min_size=1, max_size=3))

    def step(params: Any, total: torch.Tensor, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[Any, ...]:
        total = total + torch.tanh(x * summary(params) * scale).sum(0)
        return mapped(lambda leaf: leaf * 0.5 + total.sum(), params), total, x * 2

    scale = torch.tensor(1.5, dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    state: Any = fdp.replicate(params, where), fdp.replicate(total, where)
    each = [(params, total) for _ in range(slots)]
    for number, count in enumerate(rows):
        batch = fdp.scatter(batch_of(count, number)[0], where, keep_empty=True)
        *state, doubled = fdp.parallel_apply(step, *state, batch, kwargs={"scale": scale}, executor=executor)
        outputs = [step(*own, moved(x), scale=scale) for own, x in zip(each, batch.shards, strict=True)]
        each = [output[:2] for output in outputs]
        for slot, output in enumerate(outputs):
            assert_same((state[0][slot], state[1][slot], doubled[slot]), output)
        assert_same(fdp.gather(doubled, 0), batch_of(count, number)[0] * 2)
