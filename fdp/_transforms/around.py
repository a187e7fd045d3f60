"""What is around a call, looked at once: it is part of the signature, and chooses the steps."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp._placement.slot import AXES
from fdp._trees import torch_private

_requires_grad: Any = operator.attrgetter("requires_grad")


class Around(NamedTuple):
    """What is around a call.

    Attributes:
        is_compiling: torch.compile traces it.
        has_grad: Grad mode is on.
        has_inference: Inference mode is on.
        is_transformed: A transform of torch.func is around it.
        is_forward: Forward mode is on.
        is_nested: It is inside a slot of another call.
        has_modes: Dispatch modes are on, such as that of fake tensors, or torch.jit traces it.
        needs_grad: Some tensor that is given requires grad.
        is_given_inference: Some tensor that is given was made in inference mode.
    """

    is_compiling: bool
    has_grad: bool
    has_inference: bool
    is_transformed: bool
    is_forward: bool
    is_nested: bool
    has_modes: bool
    needs_grad: bool
    is_given_inference: bool

    @property
    def is_tracking(self) -> bool:
        """Whether autograd records what the caller does."""
        return self.has_grad and not self.has_inference

    @property
    def needs_func(self) -> bool:
        """Whether gradients must be taken by torch.func: under its transforms, in inference mode, while compiling.

        Inside `forward_ad.dual_level` too: `detach`, which plain autograd needs here, would drop the tangents.
        """
        inside = self.is_nested or self.is_transformed or self.is_forward
        return self.is_compiling or inside or self.has_inference or self.is_given_inference


def look_around(given: Sequence[Tensor], is_compiling: bool) -> Around:
    """What is around a call with these tensors."""
    if is_compiling:  # a traced function cannot read context variables
        has_grad, is_transformed = torch.is_grad_enabled(), torch_private.is_transformed()
        needs_grad = any(x.requires_grad for x in given)
        return Around(True, has_grad, False, is_transformed, False, False, True, needs_grad, False)
    return Around(
        False,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_private.is_transformed(),
        torch_private.forward_level() >= 0,
        bool(AXES.get()),
        bool(torch_private.len_torch_dispatch_stack() or torch_private.is_tracing()),
        True in map(_requires_grad, given),
        True in map(Tensor.is_inference, given),
    )
