"""These tests have a process of their own: a virtual accelerator, once installed, is there for every test after it.

Tests of other folders do not run after it: in tests/nn one of lazy modules has failed then.
"""

from fdp.testing import install_virtual_accelerator

install_virtual_accelerator(4)
