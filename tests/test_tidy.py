"""Rules that lint cannot check: import direction, sizes, marked boundaries, plain English."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "culm").rglob("*.py"))
MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70

# Top to bottom; a module imports only from its own folder and from lower layers.
LAYERS = (
    ("cli",),
    ("testing",),  # Not part of the product: only people and tests use it.
    ("assemble",),
    ("server",),
    ("workspace",),
    ("subagents",),
    ("worktrees",),
    ("services",),
    ("fleet.worker",),  # The child process: an outer layer like the server.
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
    ("settings", "logs", "file_limit", "heap"),
    ("clock", "errors", "files", "ids", "redaction", "__init__"),
)
# User interfaces reach a server only over the network.
CLIENT_MAY_IMPORT = {"client", "wire", "clock", "errors", "files", "ids", "settings", "__init__"}

# The command line may use these, and `config/`, like the client does ...
FACES_MAY_IMPORT = CLIENT_MAY_IMPORT | {"cli", "config", "logs", "redaction"}
# ... except for commands that work without a server, or are one.
FACE_EXCEPTIONS = {
    "cli.commands.serve": ({"assemble", "file_limit", "heap"}, "is the server"),
    "cli.commands.worker": ({"fleet.worker"}, "is a worker"),
    "cli.commands.agent": ({"fleet"}, "finds workers without a server"),
    "cli.commands.agent_serve": (
        {"fleet", "fleet.worker", "model", "server"},
        "is a worker that finds its model as a server does",
    ),
    "cli.commands.agent_call": ({"fleet", "tools"}, "calls a worker without a server"),
    "cli.commands.models": ({"model"}, "chooses as a server would, without one"),
    "cli.commands.config": ({"model"}, "checks the models that a file names"),
    "cli.config_report": ({"model", "workspace"}, "reads configuration without a server"),
    "cli.commands.doctor": ({"store", "worktrees"}, "examines stored data without a server"),
    "cli.commands.agents": ({"store", "workspace"}, "lists agents also without a server"),
    "cli.projects": (
        {"mail", "store", "workspace"},
        "finds the agents of a project and delivers mail to them without a server",
    ),
    "cli.commands.mail": ({"mail", "store"}, "delivers mail without a server"),
    "cli.commands.steer": ({"mail"}, "hints at mail for an agent that has ended"),
}


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
def test_module_follows_the_house_style(path: Path) -> None:
    own = folder_of(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    for line, module in imports_of(path):
        other = folder_of(module)
        if own in ("client", "__main__") or other == own:
            allowed = own != "client" or other in CLIENT_MAY_IMPORT
        elif other == "client":
            allowed = own in ("cli", "__init__")  # The package itself exports it.
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


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if "cli" in path.parts],
    ids=lambda p: p.relative_to(ROOT / "src" / "culm").as_posix(),
)
def test_command_line_reaches_the_server_through_the_client(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT / "src" / "culm").with_suffix("").parts)
    exceptions, _ = FACE_EXCEPTIONS.get(name, (set[str](), ""))
    used = {folder_of(module) for _, module in imports_of(path)} - FACES_MAY_IMPORT
    assert used == exceptions  # An exception that is not needed any more is removed, too.


def test_only_the_store_imports_sqlite3() -> None:
    for path in SOURCES:
        if "store" not in path.relative_to(ROOT / "src" / "culm").parts:
            assert not re.search(r"(import|from) sqlite3", path.read_text()), path


def test_every_query_is_used() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    queries = (ROOT / "src/culm/store/sql/queries.sql").read_text()
    for name in re.findall(r"^-- name: (\w+)", queries, re.MULTILINE):
        assert f'"{name}"' in text, f"{name} is not used"


# --- plain English

DOCSTRING_START = re.compile(r"(What|Who|Whoever|Whose|How|Of|Whether)\b")
IS_NO = re.compile(r"(?<!there )\b(is|are|was|were) no (?!longer\b)", re.IGNORECASE)
RELATIVE = re.compile(r"\b(what|whatever|who|whom|whose|whoever)\b", re.IGNORECASE)
SPEECH = re.compile(
    r"\b(tells?|told|telling|says?|said|saying|hears?|heard|hearing|words?|worded|wording)\b",
    re.IGNORECASE,
)
RELATIVE_MAX, SPEECH_MAX = 4.0, 2.0  # Per 1,000 words of docstrings and comments.


def docstrings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield text


def comments_of(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")


def strings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_public_class_names_are_unique() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT / "src").as_posix())
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_docstrings_start_with_a_noun_phrase_or_a_verb() -> None:
    found = [
        f"{path.name}: {text.splitlines()[0]}"
        for path in SOURCES
        for text in docstrings_of(path)
        if DOCSTRING_START.match(text)
    ]
    assert found == []


def test_no_text_says_that_something_is_no_such_thing() -> None:
    found = [
        f"{path.name}: {match.group()!r} in {text[:80]!r}"
        for path in SOURCES
        for text in strings_of(path)
        if (match := IS_NO.search(text))
    ]
    assert found == []


def test_docstrings_and_comments_use_plain_words() -> None:
    relative = speech = words = 0
    for path in SOURCES:
        text = "\n".join((*docstrings_of(path), *comments_of(path)))
        words += len(re.findall(r"[A-Za-z']+", text))
        relative += len(RELATIVE.findall(text))
        if "shell" not in path.parts:  # A shell command consists of words.
            speech += len(SPEECH.findall(text))
    assert 1000 * relative / words <= RELATIVE_MAX
    assert 1000 * speech / words <= SPEECH_MAX
