"""What the processes of these tests need: imported once, and not in each of them."""

import gc
import importlib

from tests.common.settings import load_forward_mode

# The first torch.func.grad imports the compiler.
for name in ("fdp", "hypothesis", "pytest", "torch._dynamo"):
    importlib.import_module(name)
load_forward_mode()
gc.collect()
gc.freeze()  # no process changes these pages by looking for garbage, so that they are not copied
