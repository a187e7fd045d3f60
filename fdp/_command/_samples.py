"""Sample inputs for a function that is checked: where they are found, and what they must be."""

from typing import Any, NamedTuple

from fdp._command._loading import Name, load_module, told
from fdp._command._results import Unusable
from fdp._trees.types import Tree

DEFAULT = "sample_inputs"
FORM = "(params, inputs) or (params, inputs, options)"


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
