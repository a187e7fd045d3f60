"""Whether a function gives the same on several real devices as on the first of them."""

from collections.abc import Sequence
from typing import Any

import torch

from fdp._apply import dp_apply
from fdp._command._samples import Samples
from fdp._grad import value_and_grad
from fdp._tree import flatten
from fdp._typing import AUTO, Dims, Function, Tree
from fdp.testing._case import WHERE
from fdp.testing._compare import StructureError, Tolerance, first_of, leaves_of, magnitude

Named = tuple[str, Tree, Dims]


def difference_across(fn: Function, samples: Samples, devices: Sequence[torch.device]) -> str | None:
    """What differs if the samples, which are on the first device, are split over all of them."""
    run = _step if _is_loss(fn, samples, devices[:1]) else _apply
    place = f"on {', '.join(map(str, devices))}"
    want = run(fn, samples, devices[:1])
    try:
        got = run(fn, samples, devices)
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return f"{WHERE}: the function works on {devices[0]}, but {place}, there was a {_text(error)}{notes}"
    tolerance = Tolerance(samples.options.get("rtol"), samples.options.get("atol"))
    for one, other in zip(want, got, strict=True):
        if (text := _difference(one, other, tolerance)) is not None:
            return f"{WHERE}: {text}, {place}, from one call on {devices[0]}"
    return None


def _difference(want: Named, got: Named, tolerance: Tolerance) -> str | None:
    name, tree, dims = want
    scale = max(0.01, magnitude(flatten(tree, name).leaves)) if name == "grads" else None
    try:
        found = first_of(leaves_of(name, tree, dims, got[1], WHERE), tolerance, scale, bitwise=False)
    except StructureError as error:
        return str(error)
    return None if found is None else f"{found.leaf.path} differs: it {found.text}"


def _is_loss(fn: Function, samples: Samples, devices: Sequence[torch.device]) -> bool:
    """As `assert_data_parallel` decides it."""
    options = samples.options
    if options.get("has_aux") or options.get("reduction") is not None or options.get("count") is not None:
        return True
    if options.get("out_dims", AUTO) is not AUTO or getattr(fn, "out_dims", AUTO) is not AUTO:
        return False
    ((_, out, _),) = _apply(fn, samples._replace(options={**options, "out_dims": None}), devices)
    return isinstance(out, torch.Tensor) and out.ndim == 0 and out.is_floating_point()


def _apply(fn: Function, samples: Samples, devices: Sequence[torch.device]) -> list[Named]:
    options = samples.options
    chosen = {name: options[name] for name in ("kwargs", "in_dims", "kwarg_dims", "out_dims") if name in options}
    out = dp_apply(fn, samples.params, samples.inputs, devices, weights=_weights(options, devices), **chosen)
    dims = options.get("out_dims", AUTO)
    return [("out", out, getattr(fn, "out_dims", 0) if dims is AUTO else dims)]


def _step(fn: Function, samples: Samples, devices: Sequence[torch.device]) -> list[Named]:
    params, inputs, options = samples
    args = inputs if type(inputs) is tuple else (inputs,)
    dims = options.get("in_dims", 0)
    each = dims if type(inputs) is tuple and type(dims) is tuple else (dims,) * len(args)
    names = ("has_aux", "reduction", "count", "aux_dims", "kwarg_dims")
    chosen = {name: options[name] for name in names if options.get(name) is not None}
    step = value_and_grad(
        fn, devices=devices, in_dims=(None, *each), weights=_weights(options, devices), create_graph=False, **chosen
    )
    value, grads = step(params, *args, **(options.get("kwargs") or {}))
    grads_of: list[Named] = [("grads", grads, None)]
    if not options.get("has_aux"):
        return [("loss", value, None), *grads_of]
    return [("loss", value[0], None), ("aux", value[1], options.get("aux_dims", "mean")), *grads_of]


def _weights(options: dict[str, Any], devices: Sequence[torch.device]) -> Sequence[float] | None:
    weights = options.get("weights")
    return None if weights is None or len(weights) < len(devices) else weights[: len(devices)]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
