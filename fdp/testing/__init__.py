"""Helpers for testing data-parallel code, and for trying it without the hardware.

It imports any room but `_command`.
"""

from fdp.testing._assertions import assert_data_parallel as assert_data_parallel
from fdp.testing._faults import fail_slot as fail_slot
from fdp.testing._nonfinite import find_nonfinite as find_nonfinite
from fdp.testing._virtual_accelerator import install_virtual_accelerator as install_virtual_accelerator
