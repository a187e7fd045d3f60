"""Modules as functions, and torch.nn.parallel on the plan and the trees of fdp.

It imports `_transforms`, `_collectives`, `_execution`, `_placement` and `_trees`.
"""

from fdp._transforms.batch_norm_warning import BatchNormWarning as BatchNormWarning
from fdp.nn._convert_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from fdp.nn._parallel_apply import parallel_apply as parallel_apply
from fdp.nn._replicate import replicate as replicate
from fdp.nn._scatter_gather import gather as gather
from fdp.nn._scatter_gather import scatter as scatter
from fdp.nn._scatter_gather import scatter_kwargs as scatter_kwargs
from fdp.nn._sync_batch_norm import SyncBatchNorm as SyncBatchNorm
