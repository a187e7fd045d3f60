"""What is published: both archives are built, installed where nothing of this checkout is, and used."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fdp
from tests.common.pages import ROOT, blocks

NAME = f"fdp-{fdp.__version__}"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist, as an installer would."""
    folder = tmp_path_factory.mktemp("release")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder, cwd=ROOT)
    with tarfile.open(folder / f"{NAME}.tar.gz") as sdist:
        sdist.extractall(folder, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=folder / NAME)
    return folder


def test_the_wheel_has_the_package_and_nothing_else(archives: Path):
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    files = [path for path in (ROOT / "fdp").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert found == {path.relative_to(ROOT).as_posix() for path in files}


def test_the_code_of_the_readme_runs_where_the_wheel_is_installed(archives: Path, tmp_path: Path):
    """Only what fdp depends on is taken from here: a folder that a .pth file names has none of its own followed."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=sys.platform != "win32")
    config = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=config))
    packages.joinpath("needed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = Path(sysconfig.get_path("scripts", vars=config)) / Path(sys.executable).name
    options = ("--no-index", "--no-deps", "--quiet", "--disable-pip-version-check")
    wheel = archives / f"{NAME}-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed", *options, wheel, cwd=tmp_path)
    program = tmp_path / "readme.py"
    code = [code for _, code in blocks(ROOT / "README.md") if ">>>" not in code]
    shown = [f"print(fdp.__file__, fdp.__version__)\nassert fdp.__file__.startswith({str(packages)!r})\n"]
    program.write_text("\n".join([*code, "import fdp", *shown]), encoding="utf-8")
    assert (
        run(python, program, cwd=tmp_path).splitlines()[-1] == f"{packages / 'fdp' / '__init__.py'} {fdp.__version__}"
    )
