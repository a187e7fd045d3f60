"""The command line: `python -m fdp`."""

import sys

from fdp import __version__
from fdp._command import run


def main() -> int:
    """Run the command that the arguments of this process name, and return its exit code."""
    return run(sys.argv[1:], __version__)


if __name__ == "__main__":
    sys.exit(main())
