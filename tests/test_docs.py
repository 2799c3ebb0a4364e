"""The documents are true: promises have tests, tests have promises, made pages are up to date."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROMISE = re.compile(r"^- \*\*((?:INV|EXC|FLEET|WIRE|MODEL|CFG|CLIENT|CLI)-\w+)\*\*", re.MULTILINE)


def promised() -> dict[str, str]:
    """Each id with the file that states it."""
    found: dict[str, str] = {}
    for page in sorted((DOCS / "contract").glob("*.md")):
        for promise in PROMISE.findall(page.read_text()):
            assert promise not in found, f"{promise} is stated twice"
            found[promise] = page.name
    return found


def shown() -> Iterator[str]:
    """Each id that a test carries."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "contract":
                yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def test_every_promise_has_a_test_and_every_test_a_promise() -> None:
    promises, tests = set(promised()), set(shown())
    assert promises - tests == set(), "promised and not tested"
    assert tests - promises == set(), "tested and not promised"


@pytest.mark.parametrize("name", PAGES)
def test_a_made_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run ./check --fix"


@pytest.mark.parametrize(
    "page", [*DOCS.rglob("*.md"), ROOT / "README.md"], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(there), f"{page.name} points to #{anchor}"


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tree_of_the_architecture_page_names_every_folder() -> None:
    page = (DOCS / "architecture.md").read_text()
    for folder in sorted((ROOT / "src" / "culm").iterdir()):
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in page, f"{folder.name}/ is not on the page"
