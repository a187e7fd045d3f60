"""What users do, from end to end, against the same function on one device."""

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as torch_pytree

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.depth import few
from tests.common.numbers import COUNTS, numbers

BATCHES = (36, 13, 9, 3, 1, 0)
FULL = tuple(rows for rows in BATCHES if rows > 0)

# ---- last batch: an MLP with LayerNorm, and batches that do not divide by the number of slots


def mlp() -> tuple[Any, tuple[Any, Any]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    return fdp.functional(module)


@pytest.mark.parametrize("rows", FULL)
@pytest.mark.parametrize("slots", COUNTS)
def test_last_batch_of_a_mean_over_rows(slots: int, rows: int):
    apply, (params, buffers) = mlp()
    x, y = numbers(rows, 5), torch.arange(rows) % 3

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        logits, _ = apply((params, buffers), x)
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).double().mean()}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "in_dims": (None, None, 0, 0)}
    with unharmed(params, x):
        (value, aux), grads = fdp.value_and_grad(loss, **options)(params, buffers, x, y)
        out, new_buffers = fdp.dp_apply(apply, (params, buffers), x, fdp.virtual_devices(slots))
    want_grads, (want, want_aux) = torch.func.grad_and_value(loss, has_aux=True)(params, buffers, x, y)
    assert_close_tree((value, aux, grads), (want, want_aux, want_grads))
    assert_close_tree((out, new_buffers), apply((params, buffers), x))


def token_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T]: the longest row first, the rest of each row is padding that does not count."""
    tokens = torch.arange(rows * 6).reshape(rows, 6) % 11
    lengths = torch.arange(rows).flip(0) % 6 + 1
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(6) >= lengths[:, None], -100)
    return tokens, labels


def token_loss(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens that are no padding."""
    logits = torch.tanh(params["embed"][tokens]) @ params["head"]  # (B, T, 11)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def valid_tokens(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


TOKEN_PARAMS = {"embed": numbers(11, 4), "head": numbers(4, 11)}


@few(4)
@pytest.mark.parametrize("rows", FULL)
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_last_batch_of_a_mean_over_tokens(slots: int, rows: int, microbatches: int):
    batch = token_batch(rows)
    grads, value = torch.func.grad_and_value(token_loss)(TOKEN_PARAMS, *batch)
    options: Any = {"devices": fdp.virtual_devices(slots), "count": valid_tokens, "microbatches": microbatches}
    assert_close_tree(fdp.value_and_grad(token_loss, **options)(TOKEN_PARAMS, *batch), (value, grads))


@pytest.mark.parametrize("slots", [2, 3, 4, 7])
def test_rows_are_the_wrong_weights_for_tokens(slots: int):
    batch = token_batch(13)
    grads, value = torch.func.grad_and_value(token_loss)(TOKEN_PARAMS, *batch)
    by_rows = fdp.value_and_grad(token_loss, devices=fdp.virtual_devices(slots))(TOKEN_PARAMS, *batch)
    assert not torch.allclose(by_rows[0], value, rtol=1e-4)
    assert not torch.allclose(by_rows[1]["head"], grads["head"], rtol=1e-4)


def test_rows_without_tokens_do_not_spread():
    """Whole shards of padding have the loss 0 / 0."""
    tokens, labels = token_batch(9)
    labels[3:] = -100
    grads, value = torch.func.grad_and_value(token_loss)(TOKEN_PARAMS, tokens, labels)
    got = fdp.value_and_grad(token_loss, devices=fdp.virtual_devices(3), count=valid_tokens)(
        TOKEN_PARAMS, tokens, labels
    )
    assert_close_tree(got, (value, grads))


def test_zero_rows_are_one_clear_error_for_a_mean():
    apply, state = mlp()
    x, y = numbers(0, 5), torch.zeros(0, dtype=torch.int64)
    seen: dict[str, set[str]] = {"gradient": set(), "tokens": set(), "output": set()}
    for slots in COUNTS:
        devices = fdp.virtual_devices(slots)
        with pytest.raises(ValueError, match="there are no rows, and the mean over zero rows is not defined") as info:
            fdp.value_and_grad(lambda p, x, y: F.cross_entropy(apply((p, {}), x)[0], y), devices=devices)(
                state[0], x, y
            )
        seen["gradient"].add(str(info.value))
        with pytest.raises(ValueError, match="count is zero on all shards") as info:
            fdp.grad(token_loss, devices=devices, count=valid_tokens)(TOKEN_PARAMS, *token_batch(0))
        seen["tokens"].add(str(info.value))
        with pytest.raises(ValueError, match="the mean over zero rows is not defined") as info:
            fdp.dp_apply(lambda p, x: apply((p, {}), x)[0].mean(), state[0], x, devices, out_dims="mean")
        seen["output"].add(str(info.value))
        # What is no mean has zero rows as a result.
        assert_same_tree(fdp.dp_apply(apply, state, x, devices)[0], apply(state, x)[0])
    assert all(len(messages) == 1 for messages in seen.values())


# ---- Hugging-Face-like forward: keyword inputs of all kinds, and a dataclass that behaves like an ordered dict


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Fields that are not None are items too, in the order of the fields."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None
    attentions: Any = None
    tag: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                OrderedDict.__setitem__(self, field.name, value)

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"{type(self).__name__} has no deletion")

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(f"{type(self).__name__} has no assignment")


@dataclasses.dataclass
class RegisteredOutput(ModelOutput):
    """Registered as Hugging Face does it: by its items, of which None is none."""


def _flatten(output: RegisteredOutput) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output.keys())


def _flatten_with_keys(output: RegisteredOutput) -> Any:
    return [(torch_pytree.MappingKey(key), value) for key, value in output.items()], list(output.keys())


def _unflatten(values: Any, keys: Any) -> RegisteredOutput:
    return RegisteredOutput(**dict(zip(keys, values, strict=True)))


torch_pytree.register_pytree_node(RegisteredOutput, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)

KINDS = pytest.mark.parametrize("kind", [ModelOutput, RegisteredOutput])
PARAMS = {"embed": numbers(11, 4), "w": numbers(4, 4), "head": numbers(4, 11)}
SUMMED = {"loss": "sum"}  # the rest is joined by rows
NAMES = [f"row {i}" for i in range(8)]


def forward(
    kind: type[ModelOutput],
    params: Any,
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    num_items: Tensor,
    return_all: bool,
    names: list[str],
    extra: None,
) -> ModelOutput:
    """`loss` is a sum over this batch divided by the items of the whole one, as in gradient accumulation."""
    assert num_items.ndim == 0
    assert return_all is True
    assert extra is None
    assert len(names) == len(input_ids) == len(attention_mask)
    first = params["embed"][input_ids] * attention_mask[..., None]
    second = torch.tanh(first @ params["w"])
    third = second + first
    logits = third @ params["head"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / num_items
    return kind(loss=loss, logits=logits, hidden=(first, second, third), tag="causal")


def inputs(rows: int = 8) -> dict[str, Any]:
    input_ids, labels = token_batch(rows)
    return {
        "input_ids": input_ids,
        "attention_mask": (labels != -100).double(),
        "labels": labels,
        "num_items": (labels != -100).sum(),
        "return_all": True,
        "names": NAMES[:rows],
        "extra": None,
    }


def run(kind: type[ModelOutput], slots: int, kwargs: dict[str, Any], fn: Any = forward, out_dims: Any = SUMMED) -> Any:
    """Split by keywords: names that are not mentioned are split along 0, and the list of names by its items."""
    return fdp.dp_apply(
        lambda params, **kwargs: fn(kind, params, **kwargs),
        *(PARAMS, (), fdp.virtual_devices(slots)),
        kwargs=kwargs,
        kwarg_dims={"names": "items"},
        out_dims=out_dims,
    )


@KINDS
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("rows", [8, 3, 1])
def test_hugging_face_like_forward(kind: type[ModelOutput], slots: int, rows: int):
    kwargs = inputs(rows)
    with unharmed(kwargs, PARAMS):
        out = run(kind, slots, kwargs)
    want = forward(kind, PARAMS, **kwargs)
    assert type(out) is kind
    assert_close_tree(out, want)
    assert list(out) == list(want) == ["loss", "logits", "hidden", "tag"]
    assert [field.name for field in dataclasses.fields(out)] == ["loss", "logits", "hidden", "attentions", "tag"]
    assert out.attentions is None
    assert type(out.hidden) is tuple
    assert out.tag == "causal"
    assert out["logits"] is out.logits
    for hidden, other in zip(out.hidden, want.hidden, strict=True):
        assert_same_tree(hidden, other)


@KINDS
def test_an_output_of_specs_says_how_an_output_is_joined(kind: type[ModelOutput]):
    dims = kind(loss="sum", logits=0, hidden=(0, 0, 0), tag=0)
    assert_close_tree(run(kind, 3, inputs(), out_dims=dims), forward(kind, PARAMS, **inputs()))


@KINDS
@pytest.mark.parametrize("slots", COUNTS)
def test_hugging_face_like_gradients(kind: type[ModelOutput], slots: int):
    def loss(params: Any, **kwargs: Any) -> Any:
        out = forward(kind, params, **kwargs)
        return out.loss, out

    options: Any = {"has_aux": True, "reduction": "sum", "kwarg_dims": {"names": "items"}}
    options |= {"aux_dims": {"loss": "sum"}, "devices": fdp.virtual_devices(slots)}
    (value, out), grads = fdp.value_and_grad(loss, **options)(PARAMS, **inputs())
    want = torch.func.grad_and_value(lambda params: forward(kind, params, **inputs()).loss)(PARAMS)
    assert_close_tree((grads, value), want)
    assert_close_tree(out, forward(kind, PARAMS, **inputs()))


@pytest.mark.parametrize("slots", [1, 3])
def test_labels_that_are_too_few(slots: int):
    kwargs = inputs() | {"labels": token_batch(6)[1]}
    with unharmed(kwargs), pytest.raises(ValueError, match="dp_apply: rows differ: ") as info:
        run(ModelOutput, slots, kwargs)
    for part in (
        "kwargs['input_ids'] has 8 along dim 0",
        "kwargs['labels'] has 6 along dim 0",
        "has 8 along its items",
    ):
        assert part in str(info.value)


class CustomOutput:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("slots", [1, 3])
def test_a_class_that_is_not_known(slots: int):
    def fn(kind: Any, params: Any, **kwargs: Any) -> Any:
        return {"out": CustomOutput(params["w"]), "x": kwargs["input_ids"]}

    with pytest.raises(
        TypeError, match=r"dp_apply: out\['out'\] is a CustomOutput, which holds tensors but is no tree"
    ):
        run(ModelOutput, slots, inputs(), fn, out_dims=0)
    with pytest.raises(TypeError, match=r"dp_apply: kwargs\['extra'\] is a CustomOutput, which holds tensors"):
        run(ModelOutput, slots, inputs() | {"extra": CustomOutput(numbers(8))})


@KINDS
def test_a_loss_that_is_not_mentioned(kind: type[ModelOutput]):
    message = (
        r"dp_apply: out(\.loss|\['loss'\]) is a 0-dim tensor, .*'mean', 'sum', 'max', 'min', 'stack', 'list' or None"
    )
    with pytest.raises(ValueError, match=message):
        run(kind, 3, inputs(), out_dims=0)
