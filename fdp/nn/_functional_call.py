"""Calling a module with other tensors in place of its own, from any number of threads."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fdp._execution.guards import stand_in_for_functional_call
from fdp._trees import torch_private
from fdp.nn._recipe import recipe_of
from fdp.nn._stand_in import Tensors, stand_in


@stand_in_for_functional_call
def functional_call(
    module: nn.Module,
    params_and_buffers: Tensors | Sequence[Tensors],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with other tensors in place of its own, from any number of threads.

    `functional_call(module, tensors, args) == torch.func.functional_call(module, tensors, args)`.

    Calls run on clones, as those of `functional` do. What forward writes to attributes, lists, dicts and sets of the
    module is lost.

    >>> import torch
    >>> from fdp import functional_call
    >>> functional_call(torch.nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, torch.ones(2))
    tensor([3.])

    Args:
        module: The module; it keeps its own tensors throughout.
        params_and_buffers: Tensors by name, in one dict or several. The module's own stand for those left out. Buffers
            are written in place, and an only dict gets the buffers that forward puts under its names. A list or an
            attribute in which a parameter is a second time has the given tensor, too.
        args: Positional arguments. What is not a tuple is the only one.
        kwargs: Keyword arguments.
        tie_weights: One name of a tied tensor stands for all of its names.
        strict: Missing and unexpected names are errors.

    Returns:
        What the module returns.

    Raises:
        TypeError: Not a module, or a value that is not a tensor.
        ValueError: Not dicts, a name in several dicts, or different values for names that are tied.
        RuntimeError: A scripted module, a `DataParallel`, or names that do not fit when `strict`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional_call: expected a torch.nn.Module, got {kind(module)}")
    options = {"tie_weights": tie_weights, "strict": strict}
    if torch.compiler.is_dynamo_compiling():
        return torch.func.functional_call(module, params_and_buffers, args, kwargs, **options)
    given, kwargs = _merge(params_and_buffers), kwargs or {}
    args = () if args is None else args if isinstance(args, tuple) else (args,)
    recipe, states = recipe_of(module)
    known = {name: x for name, x in given.items() if tie_weights and name in recipe.names and isinstance(x, Tensor)}
    plain = len({recipe.names[name] for name in known}) == len(given) and not torch_private.is_tracing()
    plain = plain and not isinstance(module, torch.jit.ScriptModule | nn.DataParallel)
    plain = plain and (not strict or given.keys() == recipe.usual.keys())
    tensors = given if plain else {} if recipe.in_place else known
    with stand_in(module, recipe, states, tensors) as made:
        if plain:
            return made.modules[0](*args, **kwargs)
        # Torch says what is wrong with the names, or ties the tensors in its own way.
        return torch_private.functional_call(made.modules[0], given, args, kwargs, **options)


def _merge(given: Tensors | Sequence[Tensors]) -> Tensors:
    """One dict of several; the messages are torch's."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, Sequence):
        expected = "Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts"
        raise ValueError(f"{expected}, but got {type(given)}")
    if not all(isinstance(tensors, dict) for tensors in given):
        raise ValueError("Expected all elements of parameter_and_buffer_dicts to be dictionaries")
    repeated = [name for name, count in Counter(chain.from_iterable(given)).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated} appeared in multiple dictionaries; behavior of functional call is ambiguous")
    return {name: tensor for tensors in given for name, tensor in tensors.items()}


def kind(value: object) -> str:
    return f"the class {value.__name__}; make an instance" if isinstance(value, type) else type(value).__name__
