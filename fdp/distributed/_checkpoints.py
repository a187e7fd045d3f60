"""The state of a training in files: a run that was killed goes on from the last one."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from fdp._placement.moves import bytes_of
from fdp._placement.slot import EXCLUSIVE, fold_in
from fdp._trees.types import Tree
from fdp.distributed._checkpoint_files import load, newest, write
from fdp.distributed._portable import pack, unpack
from fdp.distributed._session import Tag, meet

_CHUNK = 2**26  # bytes that are sent at once
_FORMAT = 1


@final
class Checkpoints:
    """The states of a training, the last few of them, in files of a directory.

    `restore` gives what the last `save` was given. A file is written beside its place, brought to disk, and then
    renamed: a run may be killed at any moment, and what is there is whole. Its name holds its digest, so that a file
    that has been damaged since is found out. What was saved last counts, whatever its step.

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
                    checkpoints.save(step + 1, state)

    Args:
        directory: Where the files are; made if it is not there. Only process 0 reads and writes it, and no two runs
            may use it at once.
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
        self._directory, self._keep, self._mesh = Path(directory), keep, mesh

    def save(self, step: int, tree: Tree) -> None:
        """Write a state, and with it torch's random generators of each process. All processes call it.

        Args:
            step: A number from 0 on, which `restore` returns. It is the same in all processes.
            tree: A tree of tensors, numbers, strings, bytes, dtypes, devices and sizes, of which process 0's is taken.
                Gradients and ties between tensors are not kept.

        Raises:
            TypeError: A leaf of another type, with its path.
            ValueError: A bad `step`, or the processes have different ones.
            OSError: Process 0 could not write; the files before it are as they were. In the others a RuntimeError.
        """
        comm = self._wire()
        with _together(comm, "Checkpoints.save"):
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"Checkpoints.save: step must be an int from 0 on, got {step!r}")
        everybody = _from_all(comm, (step, _generator_states()))
        if len({other for other, _ in everybody}) > 1:
            raise ValueError(f"Checkpoints.save: the processes have different steps: {[s for s, _ in everybody]}")
        with _together(comm, "Checkpoints.save", self._directory):
            if comm is None or comm.rank == comm.ranks[0]:
                state = pack(tree, "Checkpoints.save")
                generators = [states for _, states in everybody]
                whole = {"format": _FORMAT, "step": step, "generators": generators, **state}
                write(self._directory, step, whole, self._keep)

    def restore(self, like: Tree | None = None) -> tuple[int, Tree] | None:
        """What was saved last, and set torch's random generators as they were then. All processes call it.

        On another number of processes each generator gets a seed of its own, `fold_in(seed, process)`, in which `seed`
        comes from the saved ones. Of accelerators that are not there, generators are left out.

        Args:
            like: A tree with the containers, shapes and dtypes that are expected: tensors come to its devices, and
                require gradients where its do. By default they are on the CPU, in dicts, lists and tuples.

        Returns:
            The step and the tree, the same in all processes; None if nothing has been saved.

        Raises:
            ValueError: The tree differs from `like`, with the path; the file has another format.
            RuntimeError: None of the files is whole. One that is not, before one that is, gives a warning.
            OSError: Process 0 could not read. In the others a RuntimeError.
        """
        comm = self._wire()
        found = None
        with _together(comm, "Checkpoints.restore", self._directory):
            if comm is None or comm.rank == comm.ranks[0]:
                found = newest(self._directory)
        data = _from_first(comm, None if found is None else found[1])
        if data is None:
            return None
        state = load(data)
        if state.get("format") != _FORMAT:
            raise ValueError(f"Checkpoints.restore: expected format {_FORMAT}, found {state.get('format')!r}")
        tree = unpack(state, like, "Checkpoints.restore")
        _set_generators(state["generators"], comm)
        return state["step"], tree

    def _wire(self) -> Any:
        if self._mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("Checkpoints: there are several processes; pass mesh=, so that one of them writes")
        processes = None if self._mesh is None else self._mesh.processes
        return None if processes is None else processes.comm


@contextlib.contextmanager
def _together(comm: Any, where: str, directory: Path | None = None) -> Iterator[None]:
    """Meet the other processes at the end: what fails in one fails in all."""
    try:
        yield
    except Exception as error:
        if directory is not None:
            error.add_note(f"{where}: in {directory}")
        if comm is not None:
            meet(comm, Tag(where), failure=error)()
        raise
    if comm is not None:
        meet(comm, Tag(where))()


def _from_all(comm: Any, value: Any) -> list[Any]:
    return [value] if comm is None else comm.objects(value, "Checkpoints")


def _from_first(comm: Any, data: bytes | None) -> bytes | None:
    """The bytes of process 0, in all: nodes need not share a file system."""
    if comm is None:
        return data
    size = _from_all(comm, None if data is None else len(data))[0]
    if size is None:
        return None
    parts = []
    for start in range(0, size, _CHUNK):
        part = bytes(min(_CHUNK, size - start)) if data is None else data[start : start + _CHUNK]
        parts.append(comm.share_bytes(part, 0, "Checkpoints"))
    return b"".join(parts)


def _generator_states() -> dict[str, torch.Tensor]:
    with EXCLUSIVE.held():
        states = {"cpu": torch.default_generator.get_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:  # generators that nobody has used are not there yet
        found = getattr(torch.get_device_module(accelerator), "default_generators", ())
        states.update((f"{accelerator.type}:{i}", generator.get_state()) for i, generator in enumerate(found))
    return states


def _set_generators(saved: list[dict[str, torch.Tensor]], comm: Any) -> None:
    position, count = (0, 1) if comm is None else (comm.position, len(comm.ranks))
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
            torch.get_device_module(device).set_rng_state(state, device.index)
