"""Data parallelism for PyTorch as a pure function."""

import importlib
from typing import TYPE_CHECKING

from fdp import nn as nn
from fdp._apply import dp_apply as dp_apply
from fdp._apply import parallel_apply as parallel_apply
from fdp._apply import shard_map as shard_map
from fdp._collectives import all_gather as all_gather
from fdp._collectives import all_to_all as all_to_all
from fdp._collectives import axis_index as axis_index
from fdp._collectives import axis_rows as axis_rows
from fdp._collectives import axis_size as axis_size
from fdp._collectives import pmax as pmax
from fdp._collectives import pmean as pmean
from fdp._collectives import pmin as pmin
from fdp._collectives import ppermute as ppermute
from fdp._collectives import psum as psum
from fdp._collectives import psum_scatter as psum_scatter
from fdp._context import fold_in as fold_in
from fdp._devices import available_devices as available_devices
from fdp._devices import virtual_devices as virtual_devices
from fdp._executors import thread_safe as thread_safe
from fdp._explain import explain as explain
from fdp._functional import functional as functional
from fdp._functional_call import functional_call as functional_call
from fdp._grad import grad as grad
from fdp._grad import grad_and_value as grad_and_value
from fdp._grad import value_and_grad as value_and_grad
from fdp._picture import Picture as Picture
from fdp._plan import Plan as Plan
from fdp._plan import PlannedLeaf as PlannedLeaf
from fdp._prefetch import prefetch as prefetch
from fdp._replicate import replicate as replicate
from fdp._replicate import unreplicate as unreplicate
from fdp._scatter import gather as gather
from fdp._scatter import scatter as scatter
from fdp._slots import Replicated as Replicated
from fdp._slots import Sharded as Sharded
from fdp._transfers import Collective as Collective
from fdp._transfers import Transfer as Transfer
from fdp._transfers import transfers as transfers
from fdp._typing import AUTO as AUTO
from fdp._visualize import visualize as visualize
from fdp.nn._data_parallel import DataParallel as DataParallel
from fdp.nn._data_parallel import data_parallel as data_parallel

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fdp import distributed as distributed
    from fdp import testing as testing
else:  # type checkers would let any name pass

    def __getattr__(name: str) -> object:
        """These are imported when they are first asked for: most programs do without, and start sooner."""
        if name in ("distributed", "testing"):
            return importlib.import_module(f"fdp.{name}")
        raise AttributeError(f"module 'fdp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), "distributed", "testing"})
