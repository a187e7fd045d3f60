"""Modules as functions: parameters and buffers go in, the output and new buffers come out."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fdp._transforms.dropped_buffers import note_changed
from fdp._trees import torch_private
from fdp._trees.message_lists import names, note_lists
from fdp._trees.registry import register_leaf
from fdp.nn._functional_call import kind
from fdp.nn._recipe import recipe_of
from fdp.nn._stand_in import Tensors, stand_in
from fdp.nn._write_back import misnamed, remember

State: TypeAlias = tuple[Tensors, Tensors]
_TENSOR_OR_NONE = (Tensor, type(None))  # a union takes ten times as long
_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")  # recurrent modules make them of what is bound


@final
class Apply:
    """A module as a function of its parameters and buffers. A copy has a module of its own, in any process."""

    __name__ = "apply"
    out_dims: tuple[int, str]

    def __init__(self, module: nn.Module) -> None:
        self.out_dims = (0, "mean")  # not of the class: what `functools.wraps` makes has it too
        self._module = module

    def __reduce__(self) -> Any:
        return Apply, (self._module,)

    def __call__(self, state: State, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """The module's output, and the buffers after the call."""
        params, buffers = _as_state(state)
        module = self._module
        if torch.compiler.is_dynamo_compiling():  # the compiler traces torch's own
            return _apply_traced(module, params, buffers, args, kwargs)
        recipe, states = recipe_of(module)
        _check_names(params, buffers, recipe.params, recipe.buffers)
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        given = {**params, **copies}
        try:
            with stand_in(module, recipe, states, given) as made:
                before = _versions(made.plain)
                out = made.modules[0](*args, **kwargs)
                if before and _versions(made.plain) != before:
                    _refuse_written(made.plain, before)
        except (TypeError, AttributeError) as error:
            note_lists(error, args, 1, "apply", "write apply(state, *batch), or pass tuple(batch) to dp_apply")
            raise
        # Where forward of a module that is called itself has deleted a buffer, torch leaves a mark of its own.
        new_buffers = {name: given[name] for name in buffers if isinstance(given.get(name, ...), _TENSOR_OR_NONE)}
        note_changed(module, copies, new_buffers)
        return out, new_buffers


register_leaf(Apply)  # among arguments it is a function


def functional(module: nn.Module, *, detach: bool = True) -> tuple[Apply, State]:
    """Split a module into a pure function and its state.

    With `apply, state = functional(module)`: `apply(state, x) == (module(x), buffers after that call)`.

    >>> import torch
    >>> from fdp import functional
    >>> apply, (params, buffers) = functional(torch.nn.BatchNorm1d(2))
    >>> out, new_buffers = apply((params, buffers), torch.ones(3, 2))
    >>> buffers["num_batches_tracked"], new_buffers["num_batches_tracked"]
    (tensor(0), tensor(1))

    Every call reads the module anew, so `module.eval()`, a plain attribute, a hook or another submodule shows in the
    next one. What forward writes shows in the new buffers only: a list or dict of the module that it fills is as before
    after the call, so return what you want to keep. Objects of other classes that the module holds are shared with it.
    Calls may run side by side in threads, if they run on clones.

    Calls run on clones of the module. Where a hook closes over the module, or an object inside refers to it or is of a
    kind that cannot be looked into, they run on the module itself, one at a time, and activation checkpointing in it
    would see the module's own tensors in the backward; `executor="threads"` refuses that.

    Args:
        module: Any module whose parameters have shapes. Its tensors and attributes are left as they are.
        detach: False gives the module's parameters themselves, by default aliases that do not require gradients.

    Returns:
        `apply(state, *args, **kwargs) -> (output, new_buffers)` and `state`, the pair of dicts `(params, buffers)` by
        name. They share the module's memory. `apply.out_dims` is `(0, "mean")`: join outputs, average buffers. Pickled,
        `apply` takes its module along.

    Raises:
        TypeError: Not a module, or one that cannot be called with other tensors. From `apply`: not a pair of dicts.
        ValueError: A lazy module that has not seen an input, or an embedding with `max_norm`. From `apply`: names are
            missing or unexpected.
        RuntimeError: From `apply`: forward wrote in place to a tensor that is neither a parameter nor a buffer.
    """
    check_module(module, "functional")
    params: Tensors = dict(module.named_parameters())
    buffers: Tensors = dict(module.named_buffers())
    remember(module, params)
    if detach:
        params = {name: tensor.detach() for name, tensor in params.items()}
        buffers = {name: tensor.detach() for name, tensor in buffers.items()}
    return Apply(module), (params, buffers)


def _apply_traced(module: nn.Module, params: Tensors, buffers: Tensors, args: Any, kwargs: Any) -> tuple[Any, Tensors]:
    _check_names(params, buffers, dict(module.named_parameters()), dict(module.named_buffers()))
    bound = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    kept = [(part, name, getattr(part, name)) for part in recurrent for name in _OF_PARAMETERS if hasattr(part, name)]
    out = torch.func.functional_call(module, bound, args, kwargs)
    for part, name, value in kept:  # else they are those of this call, and the next would be compiled anew
        setattr(part, name, value)
    return out, {name: bound[name] for name in buffers}


def check_module(module: nn.Module, where: str) -> None:
    """A module that can be called with other tensors."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected a torch.nn.Module, got {kind(module)}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{where}: a scripted module cannot be called with other tensors; pass the Python module")
    if isinstance(module, nn.DataParallel):
        raise TypeError(f"{where}: expected the module inside DataParallel; pass .module")
    named = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{where}: {lazy} have no shape yet; run a dummy forward first: module(example)")
    written = [name or "it" for name, part in module.named_modules() if getattr(part, "max_norm", None) is not None]
    if written:
        raise ValueError(
            f"{where}: {names(written)}: forward writes to weights that have max_norm. Set it to None, and write "
            "weight.copy_(weight.renorm(2, 0, max_norm)) under no_grad before each step"
        )


def _as_state(state: Any) -> State:
    if isinstance(state, tuple | list) and len(state) == 2 and all(isinstance(tree, Mapping) for tree in state):
        return state[0], state[1]
    raise TypeError(
        f"apply: the first argument must be the pair (params, buffers) that functional(module) returned, got "
        f"{kind(state)}. Call apply((params, buffers), *args)"
    )


def _check_names(params: Tensors, buffers: Tensors, own_params: Any, own_buffers: Any) -> None:
    if [*params, *buffers] == [*own_params, *own_buffers] and len(params) == len(own_params):
        return  # in the usual order
    wrong = misnamed("params", params, own_params, own_params) + misnamed("buffers", buffers, own_buffers, own_buffers)
    if wrong:
        hint = "Pass (params, buffers) with the names functional(module) returns"
        raise ValueError(f"apply: {'; '.join(wrong)}. {hint}")


def _versions(plain: Sequence[tuple[str, Tensor]]) -> list[int | None]:
    """How often each tensor has been written, as far as torch counts it: not those of inference mode."""
    return [None if tensor.is_inference() else torch_private.version(tensor) for _, tensor in plain]


def _refuse_written(plain: Sequence[tuple[str, Tensor]], before: list[int | None]) -> None:
    paths = [path for (path, _), old, new in zip(plain, before, _versions(plain), strict=True) if old != new]
    raise RuntimeError(
        f"apply: forward wrote in place to {names(paths)}, plain tensor attributes that all calls share. Register them "
        "as buffers, register_buffer(name, tensor): apply works on copies of those and returns them"
    )
