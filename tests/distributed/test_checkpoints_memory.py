"""What saving and restoring take of memory."""

import sys
from pathlib import Path

import pytest
import torch

from fdp.distributed import Checkpoints
from tests.common.programs import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in /proc")

SIZE = 80 * 2**20  # bytes of a state, in two tensors: malloc keeps no memory of such tensors for the next ones

STATUS = """
import torch
from pathlib import Path
from fdp.distributed import Checkpoints, init, launch

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
"""

PEAK = """
checkpoints = Checkpoints({directory!r})
state = [torch.ones({size} // 8) for _ in range(2)]
checkpoints.save(0, 0)
checkpoints.restore()
Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
before = status("VmRSS")
result = {call}
print((status("VmHWM") - before) / {size})
"""


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("checkpoints.save(1, state)", 0.2),
        ("checkpoints.save(1, state, wait=False), checkpoints.wait()", 1.2),
        ("Checkpoints({saved!r}).restore()", 1.2),
        ("Checkpoints({saved!r}).restore(like=state)", 1.2),
    ],
)
def test_memory_is_taken_for_one_copy_at_most(tmp_path: Path, call: str, most: float):
    Checkpoints(tmp_path / "saved").save(1, [torch.ones(SIZE // 8) for _ in range(2)])
    call = call.format(saved=str(tmp_path / "saved"))
    ended = run_program(STATUS + PEAK.format(directory=str(tmp_path / "own"), size=SIZE, call=call))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert most - 0.4 < float(ended.stdout) < most


PEAKS = """
def peak():
    with init(timeout=30) as mesh:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        step, state = Checkpoints({directory!r}, mesh=mesh).restore()
        return (status("VmHWM") - before) / {size}

print(*launch(peak, 2, timeout=60, start_method="fork"))
"""


def test_each_process_takes_memory_for_the_state_once(tmp_path: Path):
    Checkpoints(tmp_path).save(1, [torch.ones(SIZE // 8) for _ in range(2)])
    ended = run_program(
        STATUS + PEAKS.format(directory=str(tmp_path), size=SIZE)
    )  # small processes, which reuse no memory
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(0.8 < float(peak) < 1.3 for peak in ended.stdout.split())
