"""What comes out of a DataParallel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.nn.modules_of_data_parallel import mlp, outputs_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", [1, 4])
def test_0_dim_outputs_become_a_vector(dim: int, rows: int):
    message = (
        f"Was asked to gather along dimension {dim}, but all input tensors were scalars; will instead unsqueeze and "
        "return a vector."
    )
    x = numbers(rows, rows)
    with pytest.warns(UserWarning, match=message):
        out = outputs_of(lambda x: {"loss": x.sum(), "x": x}, x, dim=dim)
    assert_close_tree(out, {"loss": torch.stack([part.sum() for part in x.chunk(2, dim)]), "x": x})


def test_one_device_gives_back_what_the_module_returns():
    returned = {"loss": torch.tensor(1.0), "n": 3, "s": {1}, "o": object()}
    assert outputs_of(lambda x: returned, numbers(4), slots=1) is returned
    error = KeyError("raw")
    with pytest.raises(KeyError, match="raw") as caught:
        outputs_of(lambda x: fail(error), numbers(4), slots=1)
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def fail(error: BaseException) -> Any:
    raise error


DIFFERENT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numbers": (lambda x: {"n": len(x)}, r"output\['n'\] differs between shards: 3 in shard 0, 2 in shard 1"),
    "none": (
        lambda x: [x if len(x) == 3 else None],
        r"shards differ in structure: output\[0\] is a leaf in shard 0, None in shard 1",
    ),
    "keys": (lambda x: {str(len(x)): x}, r"shards differ in structure: output is .*'3'.*'2'"),
    "lengths": (lambda x: [x] * len(x), "shards differ in structure: output is .* 3 .*shard 0, .* 2 .*shard 1"),
    "shapes": (lambda x: x[None], r"output has shapes \(1, 3\), \(1, 2\), which cannot be concatenated along dim 0"),
    "dtypes": (lambda x: x if len(x) == 3 else x.float(), "output has dtypes .*float64.*float32"),
    "numpy": (lambda x: x.numpy(), "output is a numpy array, which is not joined: return torch.as_tensor"),
}


@pytest.mark.parametrize(("fn", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_outputs_that_cannot_be_joined_are_named(fn: Any, message: str):
    with pytest.raises(ValueError, match=f"^DataParallel: {message}") as caught:
        outputs_of(fn, numbers(5))
    assert "out_dims says" not in str(caught.value)


def test_outputs_on_the_cpu_by_its_old_name():
    message = "Using -1 to represent CPU tensor is deprecated"
    for slots in (1, 2):
        shim = DataParallel(mlp(), ["cpu"] * slots, output_device=-1)
        with pytest.warns(FutureWarning, match=message):
            out = shim(numbers(3, 3))
        assert_close_tree(out, shim.module(numbers(3, 3)))


def test_output_device_is_honoured_on_one_device():
    """Torch ignores it."""
    out = DataParallel(nn.Linear(3, 2).double(), ["cpu"], output_device="meta")(numbers(5, 3))
    assert (out.device.type, out.shape) == ("meta", (5, 2))
