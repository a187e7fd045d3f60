import math
import os
import warnings
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch

from fdp.distributed import Checkpoints, init, launch

Pair = namedtuple("Pair", "left right")


def _names(directory):
    return sorted(os.listdir(directory))


def _tree():
    big = torch.arange(12.0).reshape(3, 4)
    return {
        "params": OrderedDict(w=big[:, 1:3], half=torch.ones(2, dtype=torch.bfloat16), empty=torch.empty(0, 3)),
        "optimizer": [(torch.tensor(5), 0.1, True, 1j), None, {}, "sgd", b"raw", 2**70, math.inf],
        3: [torch.float16, torch.device("cpu"), torch.Size([2])],
    }


def test_what_was_saved_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path / "not" / "there")
    assert checkpoints.restore() is None
    for like in (None, _tree()):
        checkpoints.save(7, _tree())
        step, tree = checkpoints.restore(like) or (-1, {})
        assert step == 7
        assert repr(tree) == repr(_tree())
        assert tree["params"]["w"].untyped_storage().nbytes() == 6 * 4  # not all of what it was a view of


def test_like_gives_containers_devices_and_gradients(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, Pair(torch.ones(2, requires_grad=True), {"a": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"other than dict, list and tuple.*: restore\(like=tree\)"):
        checkpoints.restore()
    with pytest.raises(ValueError, match=r"has tree.left where like has tree\[0\]"):
        checkpoints.restore([torch.zeros(2), {"a": torch.zeros(1)}])
    found = checkpoints.restore(Pair(torch.zeros(2, requires_grad=True), {"a": torch.zeros(1, device="meta")}))
    assert found is not None
    assert isinstance(found[1], Pair)
    assert found[1].left.requires_grad
    assert repr(found[1].right) == "{'a': tensor([1.])}"


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        ({"a": 1}, {"b": 1}, r"the checkpoint has tree\['a'\] where like has tree\['b'\]"),
        (Pair(1, [1]), Pair(1, [1, 2]), r"the checkpoint has no more where like has tree.right\[1\]"),
        (
            [torch.ones(2), torch.ones(2), 1],
            [torch.ones(3), torch.ones(2).double(), "x"],
            r"tree\[0\] is a tensor of shape \(2,\) and torch.float32, but a tensor of shape \(3,\) .*; tree\[1\] is .*"
            r"torch.float64 in like; tree\[2\] is a number, but a str",
        ),
    ],
)
def test_another_tree_than_like_is_an_error_with_its_path(tmp_path, saved, like, message):
    Checkpoints(tmp_path).save(1, saved)
    with pytest.raises(ValueError, match=f"Checkpoints.restore: .*{message}"):
        Checkpoints(tmp_path).restore(like)


def test_generators_go_on(tmp_path):
    torch.manual_seed(3)
    Checkpoints(tmp_path).save(1, {})
    drawn = torch.rand(3)
    Checkpoints(tmp_path).restore()
    assert torch.equal(torch.rand(3), drawn)


def test_the_last_ones_stay_whatever_their_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    (tmp_path / "checkpoint.partial").write_bytes(b"of a run that was killed")
    (tmp_path / "notes.txt").write_text("not ours")
    for value, step in enumerate([10, 20, 20, 5, 6]):
        checkpoints.save(step, value)
        assert checkpoints.restore() == (step, value)
    assert _names(tmp_path) == ["000003-step-20.pt", "000004-step-5.pt", "000005-step-6.pt", "notes.txt"]
    assert Checkpoints(tmp_path).restore() == (6, 4)
    loaded = torch.load(tmp_path / sorted(os.listdir(tmp_path))[2], weights_only=True)  # a file like any other
    assert loaded["leaves"] == [4]


def test_a_damaged_file_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, torch.full((100,), float(step)))
    first, second, third = sorted(tmp_path.iterdir())
    third.write_bytes(third.read_bytes()[:-300])
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 1
    second.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.restore()
    assert found is not None
    assert found[0] == 1
    assert [str(w.message) for w in caught] == [
        f"Checkpoints: {path} is damaged or cut short: trying the one before" for path in (third, second)
    ]
    assert caught[0].filename == __file__
    first.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is damaged or cut short"),
        pytest.raises(RuntimeError, match=r"Checkpoints: none of the 3 files in .* is whole"),
    ):
        checkpoints.restore()


def test_a_file_of_fdp_0_1_0_is_read(tmp_path):
    """Its name has a digest of its content."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"w": torch.ones(2)})
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "000001-step-3-0123456789abcdef.pt")
    assert repr(checkpoints.restore()) == "(3, {'w': tensor([1., 1.])})"
    checkpoints.save(4, 4)
    assert checkpoints.restore() == (4, 4)


def test_another_format_is_refused(tmp_path):
    torch.save({"format": 7}, tmp_path / "000001-step-3.pt")
    with pytest.raises(ValueError, match=r"expected format 1, found 7"):
        Checkpoints(tmp_path).restore()


class _Opaque(float):
    pass


def test_what_cannot_be_loaded_safely_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"tree\['a'\]\[0\] is a ndarray; tree\['a'\]\[1\] is a _Opaque\. A checkpoint"):
        checkpoints.save(1, {"a": [numpy.ones(2), _Opaque(), 1]})
    model = torch.nn.Linear(2, 2)
    for part in (model, torch.optim.SGD(model.parameters())):
        with pytest.raises(TypeError, match=r"tree\['a'\] is .*(Linear|SGD).*goes the state_dict\(\) of a module"):
            checkpoints.save(1, {"a": part})
    assert os.listdir(tmp_path) == []


def test_bad_arguments(tmp_path):
    for bad in (True, "2", 1.0):
        with pytest.raises(TypeError, match="Checkpoints: keep must be an int"):
            Checkpoints(tmp_path, keep=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Checkpoints: keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    for bad in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="step must be an int from 0 on"):
            Checkpoints(tmp_path).save(bad, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="wait must be True or False, got 1"):
        Checkpoints(tmp_path).save(1, 1, wait=1)  # pyright: ignore[reportArgumentType]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        Checkpoints(tmp_path / "file").save(1, 1)
    with pytest.raises(NotADirectoryError, match="file"):
        Checkpoints(tmp_path / "file").restore()


def _error(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_processes_save_and_restore_together(tmp_path):
    def work():
        with init(timeout=30) as mesh:
            checkpoints = Checkpoints(tmp_path / "shared", mesh=mesh)
            torch.manual_seed(mesh.rank)
            nothing = checkpoints.restore()
            checkpoints.save(5, {"w": torch.full((3,), 1.0 + mesh.rank)})
            drawn = torch.rand(2)
            step, tree = checkpoints.restore() or (-1, {})
            goes_on = torch.equal(torch.rand(2), drawn)
            different = _error(lambda: checkpoints.save(mesh.rank, 1))
            refused = _error(lambda: checkpoints.save(6, [object()]))
            (tmp_path / "file").touch()
            nowhere = _error(lambda: Checkpoints(tmp_path / "file", mesh=mesh).restore())
            wrong = _error(lambda: checkpoints.restore({"v": 1}))
            return nothing, step, tree["w"].tolist(), goes_on, drawn.tolist(), different, refused, nowhere, wrong

    first, second = launch(work, 2, timeout=60, start_method="fork")
    assert first[:4] == second[:4] == (None, 5, [1.0] * 3, True)
    assert first[4] != second[4]
    assert first[5] == second[5] == "ValueError: Checkpoints.save: the processes have different steps: [0, 1]"
    assert first[6].startswith("TypeError: Checkpoints.save: tree[0] is a object.")
    assert "Checkpoints.save in process 1 fails: process 0 has raised TypeError: Checkpoints.save: tree[0]" in second[6]
    assert first[7].startswith("NotADirectoryError")
    assert second[7].startswith(
        "RuntimeError: Checkpoints.restore in process 1 fails: process 0 has raised NotADirectoryError"
    )
    assert first[8] == second[8]
    assert "the checkpoint has tree['w'] where like has tree['v']" in first[8]

    def other_number():
        with init(timeout=30) as mesh:
            found = Checkpoints(tmp_path / "shared", mesh=mesh).restore()
            return found is not None and found[1]["w"].tolist(), torch.rand(2).tolist()

    threes = [launch(other_number, 3, timeout=60, start_method="fork") for _ in range(2)]
    assert threes[0] == threes[1]
    assert [w for w, _ in threes[0]] == [[1.0] * 3] * 3
    assert len({tuple(drawn) for _, drawn in threes[0]} | {tuple(first[4]), tuple(second[4])}) == 5
    alone = other_number()
    assert alone[0] == [1.0] * 3
    assert alone[1] == threes[0][0][1]
