import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.offline.intents import (
    INTENTS_MAX,
    CountFiles,
    CountLines,
    CountMatches,
    Delegate,
    Download,
    Fetch,
    Find,
    Intent,
    List,
    Read,
    ReadFirst,
    Replace,
    Run,
    Search,
    Write,
    parse_intents,
)

PHRASES: dict[str, Intent] = {
    # list
    "list files": List(),
    "List all files, please.": List(),
    "what is here": List(),
    "what's here?": List(),
    "which files are here?": List(),
    "what is in this directory": List(),
    "show the directory": List(),
    "show me the project structure": List(),
    "ls": List(),
    "ls ..": List(".."),
    "ls -la src": List("src"),
    "ls files": List("files"),
    "show me the files in src": List("src"),
    "what is in the src folder": List("src"),
    "Can you show me what's in src?": List("src"),
    "src/": List("src/"),
    "liste die Dateien": List(),
    "zeige mir die Dateien in src": List("src"),
    # read
    "read README.md": Read("README.md"),
    "show pyproject.toml": Read("pyproject.toml"),
    "open src/x.py": Read("src/x.py"),
    "what's in LICENSE?": Read("LICENSE"),
    "src/culm/cli/main.py": Read("src/culm/cli/main.py"),
    'read "my notes/to do.txt"': Read("my notes/to do.txt"),
    r"cat my\ notes.txt": Read("my notes.txt"),
    "Please read the file `docs/a b.md`.": Read("docs/a b.md"),
    "read the first 20 lines of README.md": Read("README.md", 20),
    "lies README.md": Read("README.md"),
    "I have a bug. Read the code in src/parser.py and tell me more.": Read("src/parser.py"),
    "read the first python file": ReadFirst("**/*.py"),
    "open the first *.md file in docs": ReadFirst("**/*.md", "docs"),
    "show me the readme": ReadFirst("README*"),
    # search
    "search for TODO": Search("TODO"),
    "grep def main in src": Search("def main", "src"),
    "grep -rn foo src": Search("foo", "src"),
    "grep TODO src/culm": Search("TODO", "src/culm"),
    'find "foo bar"': Search("foo bar"),
    "find TODO": Search("TODO"),
    'search for "and then list" in src': Search("and then list", "src"),
    r"search for /def \w+/ in the src folder": Search(r"def \w+", "src", literal=False),
    "search for foo in all python files": Search("foo", include="*.py"),
    "search for foo in *.py files": Search("foo", include="*.py"),
    "which files contain TODO": Search("TODO"),
    'find python files containing "import re"': Search("import re", include="*.py"),
    "where is open_client used?": Search("open_client"),
    "suche nach TODO in src": Search("TODO", "src"),
    # find
    "find *.py files": Find("**/*.py"),
    "which files are called test_*": Find("**/test_*"),
    "glob *.md": Find("*.md"),
    "find setup.py": Find("**/setup.py"),
    "where is setup.py": Find("**/setup.py"),
    "find all markdown files in docs": Find("**/*.md", "docs"),
    "list all python files": Find("**/*.py"),
    # count
    "how many python files": CountFiles("**/*.py"),
    "how many python files are there in src?": CountFiles("**/*.py", "src"),
    "count the files in src": CountFiles("**/*", "src"),
    "wie viele python Dateien gibt es": CountFiles("**/*.py"),
    "count lines in README.md": CountLines("README.md"),
    "how many lines does README.md have?": CountLines("README.md"),
    "how many times does TODO occur": CountMatches(Search("TODO")),
    'how many times does "a b" appear in src?': CountMatches(Search("a b", "src")),
    "count occurrences of TODO in docs": CountMatches(Search("TODO", "docs")),
    "how many TODOs are there": CountMatches(Search("TODO")),
    # run
    "run ls -la": Run("ls -la"),
    "execute `make test`": Run("make test"),
    "$ git status": Run("git status"),
    "run cd x; ls": Run("cd x; ls"),
    'run echo "hi there"': Run('echo "hi there"'),
    # edit
    "replace foo by bar in file.txt": Replace("file.txt", "foo", "bar"),
    'replace "a and b" with `c, d` in "my file.txt"': Replace("my file.txt", "a and b", "c, d"),
    "create notes.txt with hello": Write("notes.txt", "hello"),
    "create notes.txt with a, list and b": Write("notes.txt", "a, list and b"),
    "create notes.txt with:\n```\none\n\ntwo\n```": Write("notes.txt", "one\n\ntwo"),
    'write "hello" to notes.txt': Write("notes.txt", "hello"),
    "create an empty file called a.txt": Write("a.txt", ""),
    # fetch
    "fetch https://example.com/a.py": Fetch("https://example.com/a.py"),
    "Open the page http://localhost:8000/, please": Fetch("http://localhost:8000/"),
    "download https://example.com/a.zip to a.zip": Download("https://example.com/a.zip", "a.zip"),
    # what changed
    "what changed?": Run("git status --short"),
    "What has changed so far?": Run("git status --short"),
    "show me the changes": Run("git status --short"),
    # delegate
    "ask a sub-agent to list the files and read a.py": Delegate(("list the files and read a.py",)),
    "delegate: count the files\nand rest": Delegate(("count the files\nand rest",)),
    "delegate read a.txt to another agent": Delegate(("read a.txt",)),
    "have an agent have another agent read a.txt": Delegate(("have another agent read a.txt",)),
    "ask an agent to compare this file and another file": Delegate(
        ("compare this file and another file",)
    ),
    # several agents
    "Have one agent read README.md and another count the TODOs in *.py files": Delegate(
        ("read README.md", "count the TODOs in *.py files")
    ),
    "Have one agent read a.txt, another one run `make` and a third list the files.": Delegate(
        ("read a.txt", "run `make`", "list the files")
    ),
    "let one sub-agent read a.txt and run make, and let another sub-agent read b": Delegate(
        ("read a.txt and run make", "read b")
    ),
    "have one agent have another agent read a.txt and another read b.txt": Delegate(
        ("have another agent read a.txt", "read b.txt")
    ),
    'ask two agents: "read README.md", "search for height_m"': Delegate(
        ("read README.md", "search for height_m")
    ),
    "ask two agents to read README.md and search for height_m": Delegate(
        ("read README.md", "search for height_m")
    ),
    "use 3 agents:\n- read a\n- read b\n- list the files and read c": Delegate(
        ("read a", "read b", "list the files and read c")
    ),
}


@pytest.mark.parametrize("prompt", PHRASES)
def test_a_plain_request_is_understood(prompt: str) -> None:
    assert parse_intents(prompt) == (PHRASES[prompt],)


def test_where_something_is_defined_is_a_regular_expression_for_definitions() -> None:
    (search,) = parse_intents("where is open_client defined")
    assert isinstance(search, Search)
    assert not search.literal
    assert "open_client" in search.pattern


SEVERAL: dict[str, tuple[Intent, ...]] = {
    "list the files and read README.md": (List(), Read("README.md")),
    "list the files and be quick": (List(),),
    "ls, then ls": (List(),),
    "read a.py, b.py and c.py": (Read("a.py"), Read("b.py"), Read("c.py")),
    "1. ls src\n2. search for TODO": (List("src"), Search("TODO")),
    "run echo a && echo b and then read README.md": (Run("echo a && echo b"), Read("README.md")),
    "replace a by b in c.py, run `make x` and then what changed?": (
        Replace("c.py", "a", "b"),
        Run("make x"),
        Run("git status --short"),
    ),
    "ls a, ls b, ls c, ls d, ls e, ls f and ls g": tuple(map(List, "abcdef")),
}


@pytest.mark.parametrize("prompt", SEVERAL)
def test_several_requests_are_kept_in_order_up_to_the_bound(prompt: str) -> None:
    assert parse_intents(prompt) == SEVERAL[prompt]


@pytest.mark.parametrize(
    "prompt",
    [
        *("", "hello", "help", "what can you do?", "who are you", "where are you", "how are you?"),
        *("what is love", "what is python", "what is this project about?", "write a poem"),
        *(
            "run",
            "run the tests",
            "find",
            "count to ten",
            "create a function",
            "change the world",
            "fetch it",
        ),
        *('find ""', 'read ""', 'replace "" by "x" in a.txt', "https://example.com/a.py"),
        *("whats", "what's", "What’s?"),
    ],
)
def test_prose_means_nothing(prompt: str) -> None:
    assert parse_intents(prompt) == ()


def test_only_the_beginning_of_a_huge_prompt_is_read() -> None:
    assert parse_intents("read a.py\n" + "x " * 2_000_000 + "\nread b.py") == (Read("a.py"),)


FRAGMENTS = [*" ".join([*PHRASES, *SEVERAL]).split(" "), "\n", "```", '"', "'", "„", "\ue000", "$ "]


@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map(" ".join)))
def test_any_text_gives_few_intents_and_always_the_same(prompt: str) -> None:
    intents = parse_intents(prompt)
    assert len(set(intents)) == len(intents) <= INTENTS_MAX
    assert intents == parse_intents(prompt)
