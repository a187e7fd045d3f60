"""What the processes of these tests need: imported once, and not in each of them."""

import gc

import hypothesis as hypothesis
import pytest as pytest
import torch._decomp.decompositions_for_jvp
import torch._dynamo  # which the first torch.func.grad imports, for a second

import fdp as fdp

gc.collect()
gc.freeze()  # no process changes these pages by looking for garbage, so that they are not copied
