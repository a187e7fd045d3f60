"""The law of plans: one that is kept changes no result, message or error."""

import itertools
import types
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_same
from property_tests.strategies import batches, devices, row_counts, slot_counts, weights
from tests.common.containers import tensors_of

NUMBERS = itertools.count()


def first(params: Any, batch: Any) -> Any:
    return params, batch


def unknown(function: types.FunctionType) -> Any:
    """The function, as one that was never called."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(NUMBERS)}")
    return types.FunctionType(code, function.__globals__)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of dp_apply: some that fit together, some that do not, each with others of their like."""
    slots = draw(slot_counts(3))
    rows = draw(row_counts(slots))
    batch = draw(batches(rows, special=True))
    params = draw(batches(draw(st.sampled_from([rows, 2])))).tree
    for tensor in tensors_of(params):
        if tensor.is_floating_point() and draw(st.booleans()):
            tensor.requires_grad_()
    dims = draw(st.sampled_from([batch.dims, batch.dims, None, 0, 1, True, "items", lambda x: 0]))
    options = {"in_dims": dims, "weights": draw(st.none() | weights(slots)), "out_dims": "list"}
    return (params, draw(st.sampled_from([batch.tree, (batch.tree,)])), draw(devices(slots))), options


def outcome(function: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    try:
        return fdp.dp_apply(function, *call[0], **call[1])
    except (TypeError, ValueError) as error:
        return str(error)


@given(st.lists(calls(), min_size=1, max_size=3))
def test_l15_a_plan_that_is_kept_changes_nothing(drawn: list[Any]):
    known = unknown(first)
    for call in (*drawn, *drawn):
        kept, anew = outcome(known, call), outcome(unknown(first), call)
        assert isinstance(kept, str) == isinstance(anew, str)
        if isinstance(kept, str):
            assert kept == anew
        else:
            assert_same(kept, anew)
