"""The first hour with GPUs, as one command: see `__main__.py`."""
