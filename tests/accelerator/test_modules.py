"""Modules and files on virtual devices that need more than operations: lazy ones, bags of words, what was saved."""

import copy
import doctest
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp.testing import install_virtual_accelerator
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

_, ONE, TWO, _ = install_virtual_accelerator(4)
CPU = torch.device("cpu")


def value_and_grads(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """The output, and the gradients of its sines in the input and in the parameters, on the CPU."""
    x = x.clone().requires_grad_()
    out = run(x)
    grads = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
    return out.detach().cpu(), [grad.cpu() for grad in grads]


def test_its_example():
    text = (install_virtual_accelerator.__doc__ or "").replace("  # doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(text, {}, "install_virtual_accelerator", None, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=report.append).attempted > 3
    assert "".join(report) == ""


# ---- lazy modules


def test_a_lazy_module_is_moved_once_it_has_run():
    module, x = (
        nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.LazyBatchNorm1d(dtype=torch.float64)),
        numbers(5, 3),
    )
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        module.to(ONE)
    module(x)
    there = copy.deepcopy(module).to(ONE)
    assert_close_tree(value_and_grads(there, there, x.to(ONE)), value_and_grads(module, module, x))


# ---- bags of embeddings


# ---- files


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("source", [CPU, TWO], ids=str)
@pytest.mark.parametrize("map_location", ["virtual:1", ONE, {"cpu": "virtual:1", "virtual:2": "virtual:1"}], ids=repr)
def test_loading_to_a_device(source: torch.device, map_location: Any):
    x = numbers(4, 3)
    value = {"x": x.to(source), "column": x.to(source)[:, 1], "state": nn.Linear(2, 2).to(source).state_dict()}
    found = torch.load(saved(value), map_location=map_location)
    assert {t.device for t in (found["x"], found["column"], *found["state"].values())} == {ONE}
    assert_close_tree((found["x"].cpu(), found["column"].cpu()), (x, x[:, 1]))
    found["x"].mul_(2)
    assert_close_tree((found["x"] + 1).cpu(), x * 2 + 1)


def test_loading_to_the_current_device():
    with torch.accelerator.device_index(2):
        assert torch.load(saved(numbers(2)), map_location="virtual").device == TWO
    assert torch.load(saved(numbers(2).to(TWO)), map_location="cpu").device == CPU
    with pytest.raises(RuntimeError, match="virtual:7 does not exist"):
        torch.load(saved(numbers(2)), map_location="virtual:7")
    torch.load(saved(numbers(2)))  # torch keeps the place of a load that failed, also for pickle, until one succeeds
