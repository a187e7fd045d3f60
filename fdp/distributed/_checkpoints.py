"""The state of a training in files: a run that was killed goes on from the last one."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from fdp._execution.fold_in import fold_in
from fdp._execution.generators import device_generators
from fdp._execution.process_lock import exclusively
from fdp._placement.moves import bytes_of
from fdp._trees.types import Tree
from fdp.distributed._checkpoint_files import CheckpointFiles
from fdp.distributed._exchange import meet, objects, share
from fdp.distributed._portable import bytes_in, has_data, pack, unpack
from fdp.distributed._reports import Tag
from fdp.distributed._waits_and_failures import Epoch
from fdp.distributed._work_in_thread import in_thread

_CHUNK = 2**26  # bytes that are sent at once
_FORMAT = 1
_LOGGER = logging.getLogger("fdp.distributed")
_WRITERS: dict[int, futures.ThreadPoolExecutor] = {}
"""The thread that writes one file after the other, by process. Python waits for it at the end of the program."""
_PENDING: dict[tuple[int, Path], "futures.Future[None]"] = {}
"""What is being written, by process and directory."""


@final
class Checkpoints:
    """The states of a training, the last few of them, in files of a directory.

    `restore` gives what the last `save` was given. A file is written beside its place, brought to disk, and then
    renamed: a run may be killed at any moment, and what is there is whole. It holds checksums, so that a file that has
    been damaged since is found out. What was saved last counts, whatever its step.

    >>> import fdp, tempfile, torch
    >>> directory = tempfile.mkdtemp()
    >>> checkpoints = fdp.distributed.Checkpoints(directory)
    >>> checkpoints.save(10, {"w": torch.ones(2), "lr": 0.1})
    >>> checkpoints.restore()
    (10, {'w': tensor([1., 1.]), 'lr': 0.1})

    A loop that can be killed and started again, also on another number of processes::

        with fdp.distributed.init() as mesh:
            checkpoints = fdp.distributed.Checkpoints("runs/1", mesh=mesh)
            first, state = checkpoints.restore(like=state) or (0, state)
            for step in range(first, last):
                ...
                if (step + 1) % 100 == 0:
                    checkpoints.save(step + 1, state, wait=False)
            checkpoints.wait()

    Args:
        directory: Where the files are; made if it is not there. Only process 0 reads and writes it, and no two runs
            may use it at once. Files are for your user only (mode 0600).
        keep: How many files stay; older ones are removed.
        mesh: What `fdp.distributed.init` returned. By default this process is alone.

    Raises:
        ValueError, TypeError: `keep` is not a positive int.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2, mesh: Any = None) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"Checkpoints: keep must be an int, got {keep!r}")
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}")
        self._directory, self._mesh = Path(directory).absolute(), mesh
        self._files = CheckpointFiles(self._directory, keep)
        self._room: list[Any] = []  # where states are copied to that are written while the program goes on

    def save(self, step: int, tree: Tree, wait: bool = True) -> None:
        """Write a state, and with it torch's random generators of each process. All processes call it.

        With `wait=False` it returns when process 0 has copied the state to the CPU. The file is written while the
        program goes on; the next `save`, `restore` or `wait` waits for that, and so does the end of the program. Memory
        for the copy is taken once, and kept.

        Args:
            step: A number from 0 on, which `restore` returns. It is the same in all processes.
            tree: A tree of tensors, numbers, strings, bytes, dtypes, devices and sizes, of which process 0's is taken.
                Gradients and ties between tensors are not kept. It may have another structure than the last one.
            wait: Whether to return only when the file is on the disk.

        Raises:
            TypeError: A leaf of another type, with its path: of a module or an optimizer pass the `state_dict()`.
            ValueError: A bad `step`, or the processes have different ones.
            OSError: Process 0 could not write this state, or an earlier one with `wait=False` (then this one is not
                saved either). The files before it are as they were. In the other processes a RuntimeError.
        """
        with self._call("Checkpoints.save") as epoch:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"Checkpoints.save: step must be an int from 0 on, got {step!r}")
            if not isinstance(wait, bool):
                raise TypeError(f"Checkpoints.save: wait must be True or False, got {wait!r}")
            _wait_for(self._directory)
            own = step, _generator_states()
            everybody = [own] if epoch is None else objects(epoch, own, Tag("Checkpoints.save"))
            if len({other for other, _ in everybody}) > 1:
                raise ValueError(f"Checkpoints.save: the processes have different steps: {[s for s, _ in everybody]}")
            if _is_first(epoch):
                self._write(step, tree, [states for _, states in everybody], wait)

    def _write(self, step: int, tree: Tree, generators: list[Any], wait: bool) -> None:
        packed = pack(tree, "Checkpoints.save", None if wait else self._room)
        state = {"format": _FORMAT, "step": step, "generators": generators, **packed}
        if wait:
            self._files.write(step, state)
            return
        self._room = packed["leaves"]
        writer = _WRITERS.setdefault(os.getpid(), futures.ThreadPoolExecutor(1, "fdp-checkpoint"))

        def submit() -> None:
            _PENDING[os.getpid(), self._directory] = writer.submit(_write, self._files, step, state)

        in_thread(submit).result()  # an interrupt in `submit` would leave a thread that nobody ends

    def wait(self) -> None:
        """Until a state that was saved with `wait=False` is on the disk. All processes call it.

        >>> import fdp, tempfile, torch
        >>> checkpoints = fdp.distributed.Checkpoints(tempfile.mkdtemp())
        >>> w = torch.ones(2)
        >>> checkpoints.save(1, w, wait=False)
        >>> w = w.mul_(2)  # what is saved is a copy
        >>> checkpoints.wait()
        >>> checkpoints.restore()
        (1, tensor([1., 1.]))

        Raises:
            OSError: Process 0 could not write it. In the other processes a RuntimeError.
        """
        with self._call("Checkpoints.wait"):
            _wait_for(self._directory)

    def restore(self, like: Tree | None = None) -> tuple[int, Tree] | None:
        """What was saved last, and set torch's random generators as they were then. All processes call it.

        On another number of processes each generator gets a seed of its own, `fold_in(seed, process)`, in which `seed`
        comes from the saved ones. Of accelerators that are not there, generators are left out.

        Args:
            like: A tree with the containers, shapes and dtypes that are expected: tensors come to its devices, and
                require gradients where its do. By default they are on the CPU, in dicts, lists and tuples.

        Returns:
            The step and the tree, the same in all processes; None if nothing has been saved. Its tensors are no views
            of the file.

        Raises:
            ValueError: The tree differs from `like`, with the path; the file has another format.
            RuntimeError: None of the files is whole. One that is not, before one that is, gives a warning. Or another
                process has failed.
            OSError: Process 0 could not read, or not write an earlier state with `wait=False`. In the others a
                RuntimeError.
        """
        with self._call("Checkpoints.restore") as epoch:
            _wait_for(self._directory)
            state = self._files.newest() if _is_first(epoch) else None
            if state is not None and state.get("format") != _FORMAT:
                raise ValueError(f"Checkpoints.restore: expected format {_FORMAT}, found {state.get('format')!r}")
            if epoch is not None:
                state = _from_first(epoch, state, like)
            if state is None:
                return None
            tree = unpack(state, like, "Checkpoints.restore")
            _set_generators(state["generators"], epoch)
        return state["step"], tree

    @contextlib.contextmanager
    def _call(self, where: str) -> Iterator[Epoch | None]:
        """Around a call: what fails in one process fails in all."""
        if self._mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("Checkpoints: there are several processes; pass mesh=, so that one of them writes")
        peers = None if self._mesh is None else self._mesh.processes
        with contextlib.nullcontext() if peers is None else peers.begins(where):
            epoch = None if peers is None else peers.world.epoch
            try:
                yield epoch
            except BaseException as error:
                error.add_note(f"{where}: in {self._directory}")
                raise
            if epoch is not None:
                meet(epoch, Tag(f"the end of {where}"))


def _write(files: CheckpointFiles, step: int, state: Any) -> None:
    try:
        files.write(step, state)
    except BaseException as error:
        error.add_note(f"Checkpoints.save: of step {step}, which was saved with wait=False, no file was written")
        # Perhaps no call will raise it.
        _LOGGER.error("%s: %s\n%s", type(error).__name__, error, error.__notes__[-1])
        raise


def _wait_for(directory: Path) -> None:
    """Until what is being written to a directory is there; its error is raised, once."""
    key = os.getpid(), directory
    if key in _PENDING:
        futures.wait([_PENDING[key]])
        _PENDING.pop(key).result()


def _is_first(epoch: Epoch | None) -> bool:
    return epoch is None or epoch.rank == 0


def _from_first(epoch: Epoch, state: Any, like: Tree | None) -> Any:
    """The state that process 0 has read, in all: nodes need not share a file system."""
    own = [x.to("meta") if has_data(x) else x for x in state["leaves"]] if state else []
    said = objects(epoch, state and {**state, "leaves": own}, Tag("Checkpoints.restore"))[0]
    if said is None:
        return None
    unpack(said, like, "Checkpoints.restore")  # an error where it does not fit
    leaves = said["leaves"]
    for i, x in enumerate(leaves):
        if has_data(x) and x.is_meta:
            leaves[i] = (
                state["leaves"][i] if state else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            )
            for piece in bytes_in(leaves[i]).split(_CHUNK):
                share(epoch, piece, 0, "Checkpoints.restore")
    return said


def _generator_states() -> dict[str, torch.Tensor]:
    with exclusively():
        states = {"cpu": torch.default_generator.get_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:  # generators that nobody has used are not there yet
        found = enumerate(device_generators(accelerator.type))
        states.update((f"{accelerator.type}:{i}", generator.get_state()) for i, generator in found)
    return states


def _set_generators(saved: list[dict[str, torch.Tensor]], epoch: Epoch | None) -> None:
    position, count = (0, 1) if epoch is None else (epoch.rank, epoch.size)
    seed = int.from_bytes(hashlib.sha256(bytes_of(saved[0]["cpu"])).digest()[:8])
    torch.manual_seed(fold_in(seed, position))
    if len(saved) != count:
        return
    accelerator, there = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    for name, state in saved[position].items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        elif accelerator is not None and device.type == accelerator.type and device.index < there:
            device_generators(device.type)[device.index].set_state(state)
