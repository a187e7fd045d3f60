"""Beyond one process: a mesh of slots x processes, on torch.distributed. Other rooms know of it by `Peers` only.

It imports `_collectives`, `_execution`, `_placement` and `_trees`.
"""

from fdp.distributed._checkpoints import Checkpoints as Checkpoints
from fdp.distributed._init import init as init
from fdp.distributed._launch import launch as launch
from fdp.distributed._mesh import Mesh as Mesh
