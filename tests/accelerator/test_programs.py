"""Random programs give on several devices what they give on one, or the error that was planned."""

import pytest
import torch

import fdp
from tests.accelerator.programs import Program
from tests.common.comparing import assert_close_tree

DEVICES = list(fdp.available_devices())
BLOCKS = [range(20), *[pytest.param(range(n, n + 100), marks=pytest.mark.deep) for n in range(20, 2020, 100)]]


def on_the_host(found: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().cpu() for x in found]


def check(number: int) -> None:
    """What a program gives, beside one device."""
    program = Program.drawn(number)
    devices = [DEVICES[i] for i in program.devices]
    error = program.error()
    if error is not None:
        with pytest.raises(type(error), match=str(error)):
            program.on(devices)
    else:
        assert_close_tree(on_the_host(program.on(devices)), on_the_host(program.on_one(DEVICES[0])))


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("numbers", BLOCKS, ids=lambda block: f"{block.start}-{block.stop - 1}")
def test_random_programs(numbers: range):
    for number in numbers:
        try:
            check(number)
        except BaseException as error:
            error.add_note(f"program {number}: {Program.drawn(number)}")
            raise
