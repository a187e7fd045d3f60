"""Sample inputs for a function that is checked: where they are found, and what they must be."""

import difflib
import inspect
from typing import Any, NamedTuple

from fdp._command._loading import Name, load_module, told
from fdp._command._results import Unusable
from fdp._typing import Tree
from fdp.testing._assertions import assert_data_parallel

DEFAULT = "sample_inputs"
FORM = "(params, inputs) or (params, inputs, options)"
OPTIONS = [p.name for p in inspect.signature(assert_data_parallel).parameters.values() if p.kind is p.KEYWORD_ONLY]


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
    return _checked(found, str(name))


def _checked(found: Any, name: str) -> Samples:
    if type(found) not in (tuple, list) or len(found) not in (2, 3):
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise Unusable(f"{name} gives {type(found).__name__}{size}; expected {FORM}{_hint(found)}")
    params, inputs, *rest = found
    options = rest[0] if rest else {}
    if not isinstance(options, dict):
        raise Unusable(
            f"{name} gives {type(options).__name__} as the third; expected a dict of options of "
            f"assert_data_parallel, in {FORM}{_hint(found)}"
        )
    unknown = [option for option in options if option not in OPTIONS]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), OPTIONS, 1)
        instead = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(OPTIONS)}"
        raise Unusable(f"{name}: assert_data_parallel has no option {unknown[0]!r}; {instead}")
    return Samples(params, inputs, dict(options))


def _hint(found: Any) -> str:
    if isinstance(found, tuple | list) and len(found) > 2:
        return ". Several inputs go into one tuple: (params, (x, y))"
    return ""
