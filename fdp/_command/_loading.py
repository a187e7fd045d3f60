"""What a command line names: `package.module:function`, `path/to/file.py:function`; and sample inputs for it."""

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fdp._command._results import Unusable
from fdp._trees.types import Tree

DEFAULT = "sample_inputs"
FORM = "(params, inputs) or (params, inputs, options)"
_PACKAGE = str(Path(__file__).parents[1])


class Name:
    """A module or a file, and a dotted name in it."""

    def __init__(self, text: str, what: str, module: str | None = None) -> None:
        where, colon, name = text.rpartition(":")
        if not colon and module is not None:
            where = module
        if not (where or module) or not name:
            looks = text if text.endswith(".py") else "package.module"
            raise Unusable(f"{text!r} names no {what}: write {looks}:NAME")
        self.module, self.name = where or str(module), name

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def load(self) -> Any:
        """Import the module, and return what has the name."""
        found: Any = load_module(self.module)
        for part in self.name.split("."):
            if not hasattr(found, part):
                raise Unusable(f"{self.module} has no {self.name!r}{_instead(found, part)}")
            found = getattr(found, part)
        return found


def load_module(where: str) -> ModuleType:
    """Import a module by its name or its file; the current folder, or that of the file, is looked in first."""
    is_file = where.endswith(".py") or os.sep in where
    folder = str(Path(where).resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with told(f"importing {where}"):
        return _load_file(where) if is_file else _load_named(where)


def _load_file(where: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise Unusable(f"there is no file {where}, seen from {os.getcwd()}")
    # As a script's own import of it would name it, unless that is the name of something else.
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    name = path.stem if loaded is None else f"{path.stem} ({path})"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Unusable(f"{where} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as an import that fails leaves it
        raise
    return module


def _load_named(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module is there: what it imports is not
        advice = f"write {where}.py:NAME for a file" if Path(f"{where}.py").exists() else "a file is named by its path"
        raise Unusable(f"there is no module {error.name!r}, seen from {os.getcwd()}; {advice}") from None


class Samples(NamedTuple):
    """What `assert_data_parallel` is given."""

    params: Tree
    inputs: Tree
    options: dict[str, Any]


def load_samples(named: str | None, module: str) -> Samples:
    """The samples that `--samples` names, else `sample_inputs` of the function's module; a function is called."""
    name = Name(named or DEFAULT, "samples", module)
    if named is None and not hasattr(load_module(module), DEFAULT):
        raise Unusable(
            f"{module} has no {DEFAULT!r}: write there a function {DEFAULT}() that returns {FORM}, or name another by "
            "--samples MODULE:NAME"
        )
    found = name.load()
    if callable(found):
        with told(f"{name}()"):
            found = found()
    parts: tuple[Any, ...] = tuple(found) if isinstance(found, tuple | list) else ()
    if len(parts) not in (2, 3) or not isinstance((*parts, {})[2], dict):
        kinds = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(found).__name__
        raise Unusable(f"{name} gives {kinds}; expected {FORM}. Several inputs go into one tuple: (params, (x, y))")
    params, inputs, options = (*parts, {})[:3]
    return Samples(params, inputs, dict(options))


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what the user's code raises into a message with where it was raised, without the frames of the library."""
    try:
        yield
    except Unusable:
        raise
    except (Exception, SystemExit) as error:
        raise Unusable(f"{what} raised {described(error)}") from error


def described(error: BaseException) -> str:
    """The error, and the frames from the first one that is the user's on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if not _is_ours(frame.filename)]
    text = "".join(traceback.format_exception_only(error)).strip()
    lines = "".join(traceback.format_list(frames[own[0] :])).rstrip() if own else ""
    return f"{text}\n{lines}" if lines else text


def _is_ours(filename: str) -> bool:
    return filename.startswith((_PACKAGE + os.sep, "<frozen")) or filename == importlib.__file__


def _instead(found: Any, name: str) -> str:
    """What is there that may have been meant."""
    close = difflib.get_close_matches(name, dir(found), 3)
    return f". Did you mean {', '.join(close)}?" if close else ""
