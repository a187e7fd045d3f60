"""What ends a run that needs another way, in which it then begins anew. Functions are pure: nobody sees the first one.

| raised | in | caught, and begun anew, in |
|---|---|---|
| `Together` | `_collectives.meeting` | `_collectives.run`: all slots alive at once |
| `InOrder` | `_execution.threads`, by what only one thread can use | `_execution.threads`: one shard after the other |
| `Again` | `_collectives.run` | `_transforms.differentiate` and `nn._data_parallel`: the whole call |
"""

from typing import Any


class Restart(BaseException):
    """Ends a run from within; whoever began it catches it."""


class Together(Restart):
    """Raised by a collective in a shard that runs by itself: the shards begin anew, with all slots alive at once.

    Calls in between, which do not have this list of what was wanted, let it pass.
    """

    def __init__(self, wanted: list[str]) -> None:
        super().__init__(wanted[0])
        self.wanted = wanted


class InOrder(Restart):
    """Raised in a shard that does not fit beside others: those of a `run` side by side begin anew, in order."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run


class Again(Restart):
    """Raised by a call that leaves it to its caller to begin anew. `name` is the collective that slots have come to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def forget_restarts(error: BaseException) -> None:
    """Take restarts out of the contexts of an exception: nobody else is to see them."""
    at: BaseException | None = error
    while at is not None:
        while isinstance(at.__context__, Restart):
            at.__context__ = at.__context__.__context__
        at = at.__context__
