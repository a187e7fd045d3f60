"""These tests have a process of their own: a virtual accelerator, once installed, is there for every test after it.

Tests of other folders do not run after it: in tests/nn one of lazy modules has failed then. It is the one of `double`,
which shows more of what can happen on GPUs.
"""

from tests.accelerator.double import install

install(4)
