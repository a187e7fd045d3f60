"""What is shipped: versions agree, types are there, and what is imported is declared."""

import ast
import functools
import importlib
import importlib.resources
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import fdp
from tests.common import public_api

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("fdp", "benchmarks/peers") for path in (ROOT / folder).rglob("*.py"))
FILE_NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What an extra brings, and which files may import it, all of them inside functions.
EXTRAS = {"jax": "benchmarks/peers/", "matplotlib": "benchmarks/peers/"}
# What comes along: torch's own dependencies and the notebook that shows a picture.
COMES_ALONG: dict[str, str] = {"numpy": "benchmarks/peers/", "IPython": "fdp/"}
NOT_EVERYWHERE = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios", "tty", "winreg"}


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """The packages that a file imports, and whether it does so as soon as it is imported itself."""

    def found(node: ast.AST, *, at_once: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0], at_once
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        lazy = lazy or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from found(child, at_once=at_once and not lazy)

    return list(found(ast.parse(path.read_text(encoding="utf-8")), at_once=True))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in requirements}


def test_the_citation_has_the_version_and_the_license():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^(?:version|license): (.+)$", citation, re.MULTILINE) == [fdp.__version__, PROJECT["license"]]


def test_a_file_of_tests_is_read_at_one_sitting():
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in ROOT.glob("*tests/**/*.py")}
    assert [path for path, length in lengths.items() if length > 600] == []


def test_types_are_shipped():
    assert importlib.resources.files(fdp).joinpath("py.typed").is_file()


def test_what_is_imported_is_declared():
    for file, name in zip(FILES, FILE_NAMES, strict=True):
        declared = names(PROJECT["dependencies"]) | {"fdp", name.partition("/")[0]}
        for package, at_once in imports(file):
            if package in sys.stdlib_module_names or package in declared:
                continue
            where = EXTRAS.get(package) or COMES_ALONG.get(package)
            assert where is not None, f"{name}: {package} is no dependency"
            assert name.startswith(where), f"{name}: {package} is for {where} only"
            assert not at_once or where != "fdp/", f"{name}: {package} may not be there: import it where it is used"


def test_extras_are_declared():
    optional = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)}
    assert optional >= {name.lower() for name in EXTRAS}


def test_modules_that_some_systems_lack_are_imported_where_they_are_used():
    found = {
        name: [package for package, at_once in imports(file) if at_once and package in NOT_EVERYWHERE]
        for file, name in zip(FILES, FILE_NAMES, strict=True)
    }
    assert {name: packages for name, packages in found.items() if packages} == {}


LACKING = (
    "os.fork",
    "os.register_at_fork",
    "os.sched_getaffinity",
    "signal.SIGUSR1",
    "signal.pthread_sigmask",
    "faulthandler.register",
)
PROGRAM = """
import importlib, sys
for name in {missing}:
    sys.modules[name] = None  # importing it fails
import tempfile, torch
if {lacking}:
    import torch.distributed.elastic.multiprocessing
for name in {lacking}:
    module, attribute = name.split(".")
    delattr(importlib.import_module(module), attribute)
before = set(sys.modules)
import fdp
# What torch imports late is slow, and may need what is not installed.
print([name for name in set(sys.modules) - before if name.split(".")[0] not in ("fdp", "optree")])
from tests.common import public_api

total = lambda w, x: fdp.psum((w * x).sum())
torch.testing.assert_close(
    fdp.dp_apply(total, torch.ones(()), torch.arange(5.0), fdp.virtual_devices(2), out_dims=None), torch.tensor(10.0)
)
checkpoints = fdp.distributed.Checkpoints(tempfile.mkdtemp())
checkpoints.save(1, {{"w": torch.ones(2)}})
assert checkpoints.restore()[0] == 1


def over_processes():
    with fdp.distributed.init(devices="cpu") as mesh:
        return fdp.dp_apply(total, torch.ones(()), torch.ones(mesh.rank + 1), mesh, out_dims=None).item()


if {processes}:
    assert fdp.distributed.launch(over_processes, 2, timeout=60) == [3.0, 3.0]
print("done")
"""


def run(**settings: object) -> None:
    program = PROGRAM.format(**settings)
    options = ("-W", "ignore:Failed to initialize NumPy")
    done = subprocess.run([sys.executable, *options, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\ndone\n", done.stdout + done.stderr


def test_without_numpy():
    """Torch does not depend on it; its `all_gather_object` does."""
    run(missing=["numpy"], lacking=[], processes=sys.platform == "linux")


def test_without_what_other_systems_lack():
    """There is no `sched_getaffinity` on macOS, and none of these on Windows."""
    there = [name for name in LACKING if hasattr(importlib.import_module(name.split(".")[0]), name.split(".")[1])]
    run(missing=sorted(NOT_EVERYWHERE), lacking=there, processes=False)


def test_a_user_can_call_everything(tmp_path: Path):
    public_api.main(tmp_path)


def test_everything_public_is_in_the_program_that_is_type_checked():
    text = (ROOT / "tests" / "common" / "public_api.py").read_text(encoding="utf-8")
    public = {
        f"{module.__name__}.{name}"
        for module in (fdp, fdp.nn, fdp.distributed, fdp.testing)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("fdp")
    }
    assert len(public) > 50
    assert [name for name in sorted(public) if not re.search(rf"\b{re.escape(name)}\b", text)] == []


# What can be seen only with a private name, and why.
PRIVATE = {
    "tests/accelerator/double/backward.py": "backwards in threads of their own, on the virtual accelerator",
    "tests/accelerator/double/group.py": "what the host keeps for the virtual accelerator",
    "tests/accelerator/double/operations.py": "every operation of the virtual accelerator",
    "tests/accelerator/double/streams.py": "streams of the virtual accelerator",
    "tests/accelerator/test_checkpoints.py": "in what memory of the host copies of states are kept",
    "tests/accelerator/test_command.py": "copies that go wrong between devices",
    "tests/command/test_command.py": "checks of hardware that is not here, or does not do what it should",
    "tests/common/virtual.py": "all copies that the virtual accelerator makes, and its memory",
    "tests/distributed/test_notices.py": "when a process says that it waits long, without waiting so long",
    "tests/distributed/test_transport.py": "by what tensors go, and which accelerators are whose, without hardware",
    "tests/execution/test_on_mps.py": "the generator of a backend that is not here",
    "tests/nn/test_parallel_apply.py": "GPUs of different size",
    "tests/trees/test_torch_private.py": "private names of torch, of which that file is the list",
}


def test_tests_use_private_names_only_where_nothing_else_shows_it():
    def is_private(name: str) -> bool:
        return bool(re.fullmatch(r"fdp\b.*\._(?!_).*", name))

    def imported(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    files = [path for folder in ("tests", "property_tests") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): path for path in files if any(map(is_private, imported(path)))}
    assert sorted(found) == sorted(PRIVATE)
    in_strings = [path for path in files if re.search(r"""["'](from )?fdp[a-z_.]*\._[a-z]""", path.read_text("utf-8"))]
    assert in_strings == [ROOT / "tests/command/test_command.py"]  # that it is not imported
