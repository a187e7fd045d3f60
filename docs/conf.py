"""How Sphinx builds the site: `make docs`. The pages are MyST markdown, the reference comes from docstrings."""

import ast
import contextlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import fdp

sys.path.append(str(Path(__file__).parent))  # for extensions of its own

project = "fdp"
version = release = fdp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "_notebook",
]

# ---------------------------------------------------------------- pages

myst_enable_extensions = ["colon_fence"]  # the cards of the first page
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---------------------------------------------------------------- reference

default_role = "py:obj"  # `x` is code, and a link if it is a name of the reference
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # else overloads, which are for type checkers, stand beside the signature that says all
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
add_function_parentheses = False
napoleon_numpy_docstring = False
napoleon_use_param = False  # "devices, weights: As in `dp_apply`." stays one line
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

# ---------------------------------------------------------------- site

html_theme = "pydata_sphinx_theme"
html_title = f"fdp {release}"
html_static_path = ["_static"]
html_css_files = ["fdp.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_sidebars = {"index": [], "tutorial": []}  # they have no pages below them
html_theme_options = {
    "logo": {"text": f"fdp {release}"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["sphinx-version"],
    "footer_end": [],
}


def signature_as_written(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> tuple[str, str | None] | None:
    """The signature with its annotations as the source has them: `devices: Devices = None`, not what that stands for.

    A class whose docstring has no Args is made by functions, and shown without one.
    """
    if what == "class":
        if "Args:" not in (obj.__doc__ or ""):
            return None if issubclass(obj, BaseException) else ("", None)  # Sphinx finds none for exceptions itself
        obj = obj.__init__
    elif not callable(obj):
        return None
    with contextlib.suppress(OSError, TypeError):  # no source
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))).body[0]
        assert isinstance(function, ast.FunctionDef)
        own = function.args
        if what in ("class", "method"):
            del (own.posonlyargs or own.args)[0]  # self
        if own.kwarg and "Unpack" in ast.unparse(own.kwarg):
            own.kwarg.annotation = None  # the name of a private class
        is_context = any("contextmanager" in ast.unparse(decorator) for decorator in function.decorator_list)
        returns = None if what == "class" or is_context else function.returns  # contexts say what they yield
        return f"({ast.unparse(own)})", ast.unparse(returns) if returns else None
    return None


def keep_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon, which takes what stands before the first colon of Returns and Yields for a type.

    And before `default_role`, which would take the dot of `.data` away, and the angle brackets of `a <b>`.
    """
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", lambda code: literal(code[1]), "\n".join(lines))
    lines[:] = re.sub(r"^( *(?:Returns|Yields):\n +)", r"\1: ", text, flags=re.MULTILINE).split("\n")


def literal(code: str) -> str:
    """Code in reStructuredText, as the default role has it where that leaves it as it is."""
    return f"``{code}``" if code[0] in ".~!" or "<" in code else f"`{code}`"


def look_in_fdp(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """The `dp_apply` in a docstring of `fdp.testing` is that of `fdp`."""
    if node.get("refdomain") != "py" or node["reftarget"].startswith("fdp."):
        return None
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], f"fdp.{node['reftarget']}", node, content
    )


def prefer_own_methods(app: Sphinx, doctree: nodes.document) -> None:
    """The `scatter` in the docstring of a class that has a method of this name is the method."""
    objects = app.env.domains.python_domain.objects
    for node in doctree.findall(addnodes.pending_xref):
        method = f"{node.get('py:module')}.{node.get('py:class')}.{node['reftarget']}"
        if method in objects:
            node["reftarget"] = method


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """On pages of the reference, code that is a public name links to its entry: on GitHub it stays plain code."""
    if app.env.docname.startswith("reference/"):
        for code in list(doctree.findall(nodes.literal)):
            name = code.astext()
            if re.fullmatch(r"[\w.]+", name) and not isinstance(
                code.parent, nodes.reference | nodes.title | addnodes.pending_xref
            ):
                where = {"refdomain": "py", "reftype": "obj", "reftarget": name, "refdoc": app.env.docname}
                link = addnodes.pending_xref("", **where, refexplicit=True, refwarn=False)
                code.replace_self(link)
                link += code  # what stays if there is no such entry


def setup(app: Sphinx) -> None:
    """What Sphinx calls when it has read this file."""
    app.connect("autodoc-process-signature", signature_as_written)
    app.connect("autodoc-process-docstring", keep_text, priority=400)
    app.connect("doctree-read", prefer_own_methods)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", look_in_fdp)
