"""A process that a shard has forked: it has none of the other shards."""

import os


def is_forked(process: int) -> bool:
    """Whether this is a child of the process with that id."""
    return os.getpid() != process


def check_process(process: int, where: str = "fdp") -> None:
    """Raise in a child that a shard of a call has forked."""
    if is_forked(process):
        raise RuntimeError(
            f"{where}: this process was forked inside a shard, and the other shards of the call are not in it. "
            "It can make calls of its own. End it with os._exit, as multiprocessing does"
        )
