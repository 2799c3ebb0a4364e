"""Documentation checks: contract ids have tests, links resolve, pages are up to date."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONTRACT_ID = re.compile(
    r"^- \*\*((?:INV|EXC|FLEET|WIRE|MODEL|CFG|CLIENT|CLI|SAFE)-\w+)\*\*", re.MULTILINE
)


def stated_ids() -> dict[str, str]:
    """Return each contract id with the file that states it."""
    found: dict[str, str] = {}
    for page in sorted((DOCS / "contract").glob("*.md")):
        for contract_id in CONTRACT_ID.findall(page.read_text()):
            assert contract_id not in found, f"{contract_id} is stated twice"
            found[contract_id] = page.name
    return found


def ids_with_tests() -> Iterator[str]:
    """Yield each contract id of a test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "contract":
                yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def test_contract_ids_of_docs_and_tests_match() -> None:
    stated, tested = set(stated_ids()), set(ids_with_tests())
    assert stated - tested == set(), "stated and not tested"
    assert tested - stated == set(), "tested and not stated"


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run ./check --fix"


@pytest.mark.parametrize(
    "page", [*DOCS.rglob("*.md"), ROOT / "README.md"], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_links_between_documents_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} points to #{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_architecture_page_names_every_folder() -> None:
    page = (DOCS / "architecture.md").read_text()
    for folder in sorted((ROOT / "src" / "culm").iterdir()):
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in page, f"{folder.name}/ is not on the page"
