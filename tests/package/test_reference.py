"""The site as files: every public name is in the reference, every page in a toctree, every link leads somewhere."""

import ast
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("**/*.md"), *DOCS.glob("**/*.ipynb")])
MODULES = ["fdp", "fdp.nn", "fdp.distributed", "fdp.testing"]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})[^`\n]*\n.*?^(?P=indent)(?P=fence)`*[ ]*$", re.MULTILINE | re.DOTALL
)
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|data|exception):: (\S+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINKS = [
    re.compile(r"\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)"),  # [text](target), ![text](target)
    re.compile(r"^ *\[[^\]]+\]: +(\S+)", re.MULTILINE),  # [name]: target
    re.compile(r"\b(?:src|href)=\"([^\"]+)\""),
]
CARD = re.compile(r"^:link: (\S+)\n:link-type: doc$", re.MULTILINE)


def public_names() -> Iterator[str]:
    """What the packages re-export as `from x import y as y`, but for the packages themselves."""
    for module in MODULES:
        path = ROOT.joinpath(*module.split("."), "__init__.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for alias in node.names if isinstance(node, ast.ImportFrom) else []:
                if alias.asname == alias.name and f"{module}.{alias.name}" not in MODULES:
                    yield f"{module}.{alias.name}"


def text_of(page: Path) -> str:
    """Of a notebook its text, without the code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def documented_names(page: Path) -> list[str]:
    return DIRECTIVE.findall(text_of(page))


def test_every_public_name_is_documented_once():
    documented = [name for page in PAGES for name in documented_names(page)]
    assert sorted(documented) == sorted(public_names())


def test_documented_members_exist():
    for page in PAGES:
        text = text_of(page)
        for name, members in re.findall(r"^\.\. autoclass:: (\S+)\n   :members: (.+)$", text, re.MULTILINE):
            module, _, cls = name.rpartition(".")
            found = getattr(importlib.import_module(module), cls)
            assert [member for member in members.split(", ") if not hasattr(found, member)] == [], name


def test_table_of_the_reference_names_what_its_pages_document():
    public = {name.removeprefix("fdp.") for name in public_names()}
    table = (DOCS / "reference/index.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[.*?\]\((\w+\.md)\) \|(.*)\|$", table, re.MULTILINE))
    assert rows.keys() == {page.name for page in DOCS.glob("reference/*.md")} - {"index.md"}
    for page, row in rows.items():
        named = {name for name in re.findall(r"`([\w.]+)`", row) if name in public}
        assert named == {name.removeprefix("fdp.") for name in documented_names(DOCS / "reference" / page)}, page


def entries(page: Path) -> Iterator[Path]:
    """The pages in the toctrees of a page."""
    for block in TOCTREE.findall(text_of(page)):
        for line in filter(None, map(str.strip, block.splitlines())):
            if not line.startswith(":"):
                target = re.sub(r"^.*<(.*)>$", r"\1", line).removesuffix(".md")
                path = (page.parent / f"{target}.md").resolve()
                notebook = path.with_suffix(".ipynb")
                yield notebook if notebook.exists() else path


def test_every_page_is_in_a_toctree():
    reached, to_read = set[Path](), [(DOCS / "index.md").resolve()]
    while to_read:
        page = to_read.pop()
        if page not in reached and page.exists():
            reached.add(page)
            to_read += entries(page)
    assert sorted(set(map(Path.resolve, PAGES)) - reached) == []


def test_toctrees_name_pages_that_exist():
    assert [str(entry) for page in PAGES for entry in entries(page) if not entry.exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as MyST and hosts of sources make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text_of(page)), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{count}" if slug in found else slug)
    return set(found)


def targets(page: Path) -> Iterator[str]:
    """Where the links of a page lead that stay in this repository."""
    text = FENCE.sub("", text_of(page))
    yield from (f"{target}.md" for target in CARD.findall(text))
    prose = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)
    for link in LINKS:
        yield from (target for target in link.findall(prose) if not re.match(r"[a-z]+:", target))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    broken: list[str] = []
    for target in targets(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_page_on_layers_names_every_module():
    table = (ROOT / "docs/explanation/layers.md").read_text(encoding="utf-8").split("## ")[1]
    named = set(re.findall(r"`(\w+)`", table))
    rooms = {path.parent.name for path in ROOT.glob("fdp/*/__init__.py")}
    private = [path.stem for path in ROOT.glob("fdp/_*/*.py") if path.parent.name != "_command"]
    assert (rooms | set(private)) - {"__init__"} - named == set()


def test_a_room_says_what_it_holds():
    for path in ROOT.glob("fdp/*/__init__.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path


def test_no_class_is_defined_twice():
    """One meaning a word: who searches for a name finds what it is."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("fdp/**/*.py")]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
