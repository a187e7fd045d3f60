"""Where the output of the ranks of `launch` goes. In a file of its own: only `launch` needs torch's launcher."""

from typing import final

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


@final
class Labelled(LogsSpecs):
    """Files for the output of each rank, which torch shows line by line; `run_rank` writes to them.

    Torch's own redirection looks at `sys.stdout.fileno()`, which a notebook or pytest has somewhere else.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def files(kind: str) -> dict[int, str]:
            return {rank: f"{self.root_log_dir}/{kind}-{rank}" for rank in envs}

        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, files("stdout"), files("stderr"), files("unused"))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)
