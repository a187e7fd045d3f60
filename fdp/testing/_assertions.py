"""The law of data parallelism, checked for a user's function on sample arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp._placement.devices import as_devices, virtual_devices
from fdp._transforms.arguments import check_function, input_args
from fdp._trees.message_lists import listed
from fdp._trees.types import AUTO, Auto, AuxWeight, Devices, Dims, Executor, Function, Reduction, Tree
from fdp.testing._case import WHERE, Case, CheckedRun, Way
from fdp.testing._causes import agrees_in_sequence, cause_of
from fdp.testing._sample import Arguments, Sample


def assert_data_parallel(
    fn: Function,
    params: Tree,
    inputs: Tree,
    *,
    kwargs: Mapping[str, Tree] | None = None,
    in_dims: Dims = 0,
    kwarg_dims: Dims = 0,
    out_dims: Dims | Auto = AUTO,
    has_aux: bool = False,
    reduction: Reduction | None = None,
    count: Function | None = None,
    aux_dims: Dims | Auto = AUTO,
    aux_weight: AuxWeight = "rows",
    slots: Sequence[int] = (1, 2, 3, 4),
    weights: Sequence[float] | None = None,
    executors: Sequence[Executor] = ("sequential", "threads"),
    devices: Devices = None,
    dtype: torch.dtype | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Assert, on sample arguments, that splitting a function's batch over slots changes neither values nor gradients.

    For every `n` in `slots`, `dp_apply(fn, params, inputs, virtual_devices(n)) == fn(params, inputs)`, and for a loss
    `value_and_grad(fn, devices=virtual_devices(n))(params, *inputs)` gives the value and gradients of one device.

    >>> import torch
    >>> from fdp.testing import assert_data_parallel
    >>> w, x = torch.randn(3, 2), torch.randn(7, 3)
    >>> assert_data_parallel(lambda w, x: (x @ w).softmax(1), w, x)
    >>> assert_data_parallel(lambda w, x: (x @ w).softmax(0), w, x)
    Traceback (most recent call last):
    AssertionError: assert_data_parallel: out differs on 2 slots, executor 'sequential', from one call with all 7 rows:
    ... Usual cause: rows that see each other: ...

    `fn` is taken for a loss if its output is a 0-dim float and nothing says how to join it (neither `out_dims` nor
    `fn.out_dims`), or if `has_aux`, `reduction` or `count` is given; else for a function to `dp_apply`. The gradients
    of the latter are those of its outputs along random directions, the same in every run. Gradients are compared in
    the floating-point leaves of `params` and of the inputs that are split along a dimension; those that a function to
    `dp_apply` cannot be differentiated in, such as the running statistics of a BatchNorm, are left out.

    All runs get copies of the tensors, and a write in place to them is found however it was made: through `.data`, by
    numpy, to inference tensors. What `fn` reaches in other ways, such as a numpy array or a module that it closes over,
    is not watched. torch's generators are left as they are. A batch shows what it can show: take a few rows more than
    slots, which the slots do not divide, and different kinds of rows, such as some with padding.

    Args:
        fn: The function of one shard: row-wise, or a loss.
        params, inputs, kwargs, in_dims, kwarg_dims, out_dims: As in `dp_apply`. Output leaves under `"stack"` and
            `"list"` have no counterpart on one device and are not compared.
        has_aux, reduction, count, aux_dims, aux_weight: As in `value_and_grad`; for losses.
        slots: How many slots to try; one is always tried, first, and gives the values of `fn` bit by bit.
        weights: Relative rows of the slots, as in `dp_apply`; of more than are tried at a time, the first count.
        executors: Which executors to try.
        devices: Try these at the end too, one per slot; copies of the sample are on the first of them in all runs. By
            default all slots are on the device of the sample.
        dtype: Convert floating-point arguments to this; `torch.float64` tells mistakes from rounding best, where
            `fn` has no tensors of its own in another. By default they stay as they are.
        rtol, atol: Tolerances, both or none. By default those of `torch.testing.assert_close` for the dtype of each
            leaf; `atol` for numbers of magnitude 1, and in proportion to the largest in the leaf (if above 1), for
            gradients in all leaves (if above 0.01). For half precision it is as large as `rtol`.

    Raises:
        AssertionError: Values or gradients differ, `fn` raises on several slots only, writes in place, or gives other
            results when called again. The message names the first leaf that differs, and the cause if one of the usual
            ones fits when tried.
        ValueError: Nothing is split, there are fewer than 2 rows, or options do not fit; what `dp_apply` and
            `value_and_grad` raise on one slot.
        TypeError: The same.
    """
    check_function(fn, WHERE)
    if isinstance(slots, int | str) or not slots or any(type(n) is not int or n < 1 for n in slots):
        raise ValueError(f"{WHERE}: slots must be a sequence of positive numbers of slots, got {slots!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{WHERE}: dtype must be a real floating-point dtype, got {dtype!r}")
    if (rtol is None) != (atol is None):
        raise ValueError(f"{WHERE}: pass both rtol and atol, or none of them")
    tolerance = None if rtol is None or atol is None else (rtol, atol)
    across = () if devices is None else as_devices(devices, WHERE)
    most = max(*slots, len(across))
    if weights is not None and len(weights) < most:
        raise ValueError(f"{WHERE}: {len(weights)} weights for up to {most} slots; expected one per slot")
    args = input_args(params, inputs, in_dims, kwargs or {}, kwarg_dims, WHERE)
    sample = Sample.of(args, dtype, across, WHERE)
    # All generators of the devices: a check must not change what the program draws afterwards.
    gpus = {device.index for device in (sample.device, *across) if device.type == "cuda"}
    with torch.random.fork_rng(gpus), torch.inference_mode(False), torch.enable_grad():
        case = Case(fn, sample, None, out_dims, sample.places(), tolerance, weights)
        plain = case.whole(())
        _check_unwritten(case, plain.arguments, "in one call on the whole batch")
        if has_aux or reduction is not None or count is not None or _is_loss(plain, fn, out_dims):
            if out_dims is not AUTO:
                raise ValueError(f"{WHERE}: out_dims is for dp_apply; the value of a loss is joined by reduction")
            loss: dict[str, Any] = {"reduction": reduction or "mean", "count": count, "has_aux": has_aux}
            case = case._replace(loss=loss | {"aux_dims": aux_dims, "aux_weight": aux_weight})
        numbers = dict.fromkeys((1, *slots))
        ways = [Way(virtual_devices(n, sample.device), executor) for executor in executors for n in numbers]
        ways += [Way(across, "auto")] if across else []
        case._replace(places=[]).split(ways[0])  # what is wrong with the call itself is raised here
        _check(case._replace(places=case.differentiable()), ways)


def _is_loss(run: CheckedRun, fn: Function, out_dims: Dims | Auto) -> bool:
    out = run.results[0][1]
    joined = out_dims is not AUTO or getattr(fn, "out_dims", AUTO) is not AUTO
    return not joined and isinstance(out, torch.Tensor) and out.ndim == 0 and out.is_floating_point()


def _check(case: Case, ways: Sequence[Way]) -> None:
    """Raise at the first run on slots that is not like the one call on the whole batch."""
    whole = case.whole(case.places)
    repeats = _check_repeats(case, whole)
    for way in ways:
        try:
            run = case.split(way)
            found = case.differences(whole, run, bitwise=len(way.devices) == 1 and repeats)
        except Exception as error:
            if len(way.devices) == 1:  # misuse
                raise
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise AssertionError(
                f"{WHERE}: the function works on one slot, but {way}, there was a {type(error).__name__}: {error}"
                f"{notes}. Usual cause: {agrees_in_sequence(case, whole, way) or _usual_of(error)}"
            ) from error
        _check_unwritten(case, run.arguments, str(way))
        if found:
            leaf, text = found[0]
            others = f"; {len(found) - 1} more too, from {found[1][0].path} on" if len(found) > 1 else ""
            raise AssertionError(
                f"{WHERE}: {leaf.path} differs {way}, from one call with all {case.sample.rows} rows: {text}{others}. "
                f"{cause_of(case, whole, leaf, way)}"
            )


def _check_unwritten(case: Case, arguments: Arguments, place: str) -> None:
    """Raise if a run wrote to its arguments."""
    if written := case.sample.written(arguments):
        raise AssertionError(
            f"{WHERE}: the function wrote in place to {listed(written)}, {place}. It must be pure: work on "
            "x.clone(), or return the new value"
        )


def _check_repeats(case: Case, whole: CheckedRun) -> bool:
    """Raise if a second call gives other results; whether they are the same bits."""
    again = case.whole(case.places)
    if found := case.differences(whole, again):
        raise AssertionError(
            f"{WHERE}: {found[0][0].path} differs between two calls with the same arguments, on one device. Usual "
            "cause: random numbers, or state that the function keeps. Draw them outside and pass them as an input with "
            "a row for each of the batch, or switch dropout off for this (module.eval()). seed= makes a run "
            "repeatable, but each slot draws numbers of its own, which are not those of one device"
        )
    return not case.differences(whole, again, bitwise=True)


def _usual_of(error: Exception) -> str:
    if str(error).startswith(("dp_apply: ", "value_and_grad: ")):
        return "an output that is not made row by row, or is joined in another way than it is made"
    return (
        "a fixed batch size, or a tensor that every slot gets whole although it has a row for each of the batch (None "
        "in in_dims, or closed over)"
    )
