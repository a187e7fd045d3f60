"""What a checkpoint meets on a disk: no room, no rights, files of others in its way, a kill at any moment."""

import ctypes
import errno
import multiprocessing
import os
import random
import resource
import stat
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.distributed import Checkpoints

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def in_a_child(work: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own, whose limits and rights it may change."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def send() -> None:
        torch.set_num_threads(1)  # a fork has not the threads that would help
        theirs.send(work(*args))

    child = context.Process(target=send)
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(30) else "it hangs"
    finally:
        child.kill()
        child.join()


def said(work: Callable[[], Any]) -> tuple[type, int | None, str, list[str]]:
    try:
        work()
    except Exception as error:
        return type(error), getattr(error, "errno", None), str(error), getattr(error, "__notes__", [])
    raise AssertionError("no error")


def saves_with_a_limit(directory: Path, wait: bool) -> list[Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    checkpoints = Checkpoints(directory)

    def save(count: int) -> None:
        checkpoints.save(2, torch.ones(count), wait=wait)
        checkpoints.wait()

    found = [said(lambda count=count: save(count)) for count in (30_000, 1_000_000)]
    checkpoints.save(3, 3, wait=wait)
    return [*found, checkpoints.restore()]


@pytest.mark.parametrize("wait", [True, False])
def test_a_file_without_room_is_an_os_error_that_says_what_to_do(tmp_path: Path, wait: bool):
    Checkpoints(tmp_path).save(1, 1)
    *errors, restored = in_a_child(saves_with_a_limit, tmp_path, wait)
    for kind, number, text, notes in errors:
        assert (kind, number) == (OSError, errno.EFBIG)
        assert "File too large. Make room, or save to another directory. The checkpoints before" in text
        assert text.endswith(f"'{tmp_path}/checkpoint.partial'")
        which = "Checkpoints.save: of step 2, which was saved with wait=False, no file was written"
        where = f"Checkpoints.{'save' if wait else 'wait'}: in {tmp_path}"
        assert notes == ([where] if wait else [which, where])
    assert restored == (3, 3)
    assert names(tmp_path) == ["000001-step-1.pt", "000002-step-3.pt"]


def saves_to_a_small_disk(directory: Path) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWNS if os.getuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER)
    if libc.mount(b"none", str(directory).encode(), b"tmpfs", 0, b"size=1m") != 0:
        return None
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, torch.zeros(50_000))
    found = [said(lambda: checkpoints.save(2, torch.ones(1_000_000)))]
    checkpoints.save(3, torch.ones(1_000_000), wait=False)
    found.append(said(lambda: checkpoints.save(4, 4)))
    return found, names(directory), [x[0] for x in [checkpoints.restore()] if x]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path):
    found = in_a_child(saves_to_a_small_disk, tmp_path)
    if found is None:
        pytest.skip("a file system of a known size can be mounted by root only")
    errors, there, steps = found
    for kind, number, text, _ in errors:
        assert (kind, number) == (OSError, errno.ENOSPC)
        assert "No space left on device. Make room, or save to another directory. The checkpoints before" in text
    assert there == ["000001-step-1.pt"]
    assert steps == [1]


def saves_without_rights(directory: Path) -> Any:
    if os.getuid() == 0:
        os.setuid(65534)  # root may write anywhere
    checkpoints = Checkpoints(directory)
    first = said(lambda: checkpoints.save(2, 2))
    checkpoints.save(3, 3, wait=False)
    return first, said(checkpoints.wait)


def test_a_folder_that_cannot_be_written_is_named():
    with tempfile.TemporaryDirectory() as name:  # another user may not enter pytest's folder
        directory = Path(name)
        Checkpoints(directory).save(1, 1)
        directory.chmod(0o555)
        for kind, number, text, _ in in_a_child(saves_without_rights, directory):
            assert (kind, number) == (PermissionError, errno.EACCES)
            assert f"{directory}/checkpoint.partial" in text
        assert names(directory) == ["000001-step-1.pt"]
        directory.chmod(0o700)


def test_files_are_for_this_user_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        Checkpoints(tmp_path).save(1, 1)
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_files_of_others_stay(tmp_path: Path):
    others = ["model.partial", "000001.partial", "000002-step-1.partial"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    Checkpoints(tmp_path).save(1, 1)
    assert sorted(path.name for path in tmp_path.glob("*.partial")) == sorted(others)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)


def test_a_link_in_the_place_of_the_half_written_file_is_not_followed(tmp_path: Path):
    target, checkpoints = tmp_path / "target", tmp_path / "checkpoints"
    target.write_bytes(b"mine")
    checkpoints.mkdir()
    (checkpoints / "checkpoint.partial").symlink_to(target)
    Checkpoints(checkpoints).save(1, 1)
    assert names(checkpoints) == ["000001-step-1.pt"]
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "directory"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str):
    elsewhere = Checkpoints(tmp_path / "elsewhere")
    elsewhere.save(7, 7)
    (whole,) = (tmp_path / "elsewhere").iterdir()
    checkpoints = Checkpoints(tmp_path / "here")
    checkpoints.save(1, 1)
    planted = tmp_path / "here" / whole.name.replace("000001", "000002")
    if kind == "directory":
        planted.mkdir()
    elif kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.symlink_to(whole if kind == "link" else "nowhere")
    assert checkpoints.restore() == (1, 1)
    for step in (2, 3):
        checkpoints.save(step, step)
    assert checkpoints.restore() == (3, 3)
    assert elsewhere.restore() == (7, 7)


def test_no_bit_that_changes_on_the_disk_changes_what_is_restored(tmp_path: Path):
    """Torch itself would load some of these files, with other numbers."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, "before")
    checkpoints.save(2, [torch.arange(5.0), "text", 3])
    file = max(tmp_path.iterdir())
    data, draw = file.read_bytes(), random.Random(0)
    passed = 0
    for place in draw.sample(range(len(data)), 150):
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step, state = checkpoints.restore() or (0, None)
        passed += step == 1
        assert repr(state) == ("'before'" if step == 1 else repr([torch.arange(5.0), "text", 3])), place
    assert passed > 75


def test_restored_tensors_are_no_part_of_the_file(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, torch.ones(100_000))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    _, restored = checkpoints.restore() or (0, torch.empty(0))
    restored.add_(1)
    assert file.read_bytes() == content
    os.truncate(file, 0)
    assert torch.equal(restored, torch.full((100_000,), 2.0))


def write_for_ever(directory: Path, first: int, wait: bool) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(directory)
    for step in range(first, first + 10**6):
        checkpoints.save(step, [torch.full((50_000,), float(step)), step], wait=wait)


@pytest.mark.parametrize("wait", [True, False])
def test_a_writer_that_is_killed_leaves_a_whole_state(tmp_path: Path, wait: bool):
    draw, last, leftovers, slowness = random.Random(0), 0, 0, 1
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < 1.5 or ((last <= 30 or leftovers == 0) and seconds < 30):
        writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(tmp_path, last + 1, wait))
        writer.start()
        time.sleep(slowness * draw.uniform(0.01, 0.12))
        writer.kill()
        writer.join()
        leftovers += any(name.endswith(".partial") for name in os.listdir(tmp_path))
        found = Checkpoints(tmp_path).restore()  # a warning would be an error
        if found is None or found[0] == last:
            slowness = min(slowness + 1, 10)  # it was killed before it had begun
        if found is None:
            continue
        step, (tensor, same) = found
        assert step == same >= last
        assert torch.equal(tensor, torch.full((50_000,), float(step)))
        last = step
    assert last > 30
    assert leftovers > 0
    Checkpoints(tmp_path).save(0, 0)
    assert len(os.listdir(tmp_path)) == 2
