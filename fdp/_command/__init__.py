"""What `python -m fdp` runs. Importing fdp does not import it."""

from fdp._command._main import run as run
