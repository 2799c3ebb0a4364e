"""What lint cannot hold: imports point down, sizes stay readable, boundaries are marked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "culm").rglob("*.py"))
MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70

# In the order the data flows; a module imports only from its own folder and from below it.
LAYERS = (
    ("cli",),
    ("testing",),  # Stands beside the product: only people and tests start it.
    ("assemble",),
    ("server",),
    ("workspace",),
    ("subagents",),
    ("worktrees",),
    ("fleet.worker",),  # The child process: an edge, as the server is.
    ("run",),
    ("permission",),
    ("tools",),
    ("model",),
    ("config",),
    ("events",),
    ("store",),
    ("mail",),
    ("fleet",),
    ("processes",),
    ("shell",),
    ("wire",),
    ("settings", "logs"),
    ("clock", "errors", "files", "ids", "__init__"),
)
# The faces reach a server over the network only.
CLIENT_MAY_IMPORT = {"client", "wire", "clock", "errors", "files", "ids", "settings", "__init__"}


def folder_of(module: str) -> str:
    _, *rest = module.split(".")
    if rest[:2] == ["fleet", "worker"]:
        return "fleet.worker"
    return rest[0] if rest else "__init__"


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("culm"):
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("culm"))


def layer_of(folder: str) -> int:
    return next(n for n, layer in enumerate(LAYERS) if folder in layer)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT / "src").as_posix())
def test_a_module_keeps_to_the_house_style(path: Path) -> None:
    own = folder_of(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    for line, module in imports_of(path):
        other = folder_of(module)
        if own in ("client", "__main__") or other == own:
            allowed = own != "client" or other in CLIENT_MAY_IMPORT
        elif other == "client":
            allowed = own in ("cli", "__init__")  # The package itself offers it.
        else:
            allowed = layer_of(other) > layer_of(own)
        assert allowed, f"{path.name}:{line} imports {module}, which is not below {own}"
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.body[0].lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"except (Base)?Exception\b", line):
            assert "# boundary:" in line, f"line {number}: an unmarked boundary"


def test_only_the_store_knows_sql() -> None:
    for path in SOURCES:
        if "store" not in path.relative_to(ROOT / "src" / "culm").parts:
            assert not re.search(r"(import|from) sqlite3", path.read_text()), path


def test_every_query_is_used() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    queries = (ROOT / "src/culm/store/sql/queries.sql").read_text()
    for name in re.findall(r"^-- name: (\w+)", queries, re.MULTILINE):
        assert f'"{name}"' in text, f"nobody runs {name}"
