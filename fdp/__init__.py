"""Data parallelism for PyTorch as a pure function."""

import importlib
from typing import TYPE_CHECKING

from fdp import nn as nn
from fdp._collectives.activation_checkpoint import checkpoint_context as checkpoint_context
from fdp._collectives.api import all_gather as all_gather
from fdp._collectives.api import all_to_all as all_to_all
from fdp._collectives.api import axis_index as axis_index
from fdp._collectives.api import axis_rows as axis_rows
from fdp._collectives.api import axis_size as axis_size
from fdp._collectives.api import pmax as pmax
from fdp._collectives.api import pmean as pmean
from fdp._collectives.api import pmin as pmin
from fdp._collectives.api import ppermute as ppermute
from fdp._collectives.api import psum as psum
from fdp._collectives.api import psum_scatter as psum_scatter
from fdp._execution.fold_in import fold_in as fold_in
from fdp._placement.devices import available_devices as available_devices
from fdp._placement.devices import virtual_devices as virtual_devices
from fdp._placement.leaf_table import Picture as Picture
from fdp._placement.plan import Plan as Plan
from fdp._placement.planned_leaf import PlannedLeaf as PlannedLeaf
from fdp._placement.replicate import replicate as replicate
from fdp._placement.replicate import unreplicate as unreplicate
from fdp._placement.replicated import Replicated as Replicated
from fdp._placement.scatter import gather as gather
from fdp._placement.scatter import scatter as scatter
from fdp._placement.sharded import Sharded as Sharded
from fdp._placement.transfer_log import Collective as Collective
from fdp._placement.transfer_log import Transfer as Transfer
from fdp._placement.transfer_log import transfers as transfers
from fdp._placement.visualize import visualize as visualize
from fdp._transforms.apply import dp_apply as dp_apply
from fdp._transforms.apply import shard_map as shard_map
from fdp._transforms.explain import explain as explain
from fdp._transforms.grad import grad as grad
from fdp._transforms.grad import grad_and_value as grad_and_value
from fdp._transforms.grad import value_and_grad as value_and_grad
from fdp._transforms.parallel_apply import parallel_apply as parallel_apply
from fdp._trees.not_compiled import leave_alone as _leave_alone
from fdp._trees.types import AUTO as AUTO
from fdp.data.batches import Batches as Batches
from fdp.data.prefetch import prefetch as prefetch
from fdp.nn._backward import backward as backward
from fdp.nn._data_parallel import DataParallel as DataParallel
from fdp.nn._data_parallel import data_parallel as data_parallel
from fdp.nn._functional import functional as functional
from fdp.nn._functional_call import functional_call as functional_call
from fdp.nn._write_back import set_buffers as set_buffers
from fdp.nn._write_back import set_grads as set_grads

_leave_alone("fdp", but={"fdp._transforms.differentiate.Differentiation"})

__version__ = "0.2.0"

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
