"""These tests have a process of their own: a virtual accelerator, once installed, is there for every test after it."""

from fdp.testing import install_virtual_accelerator

install_virtual_accelerator(4)
