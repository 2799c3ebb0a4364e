import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.offline.intents import (
    INTENTS_MAX,
    CountFilesIntent,
    CountLinesIntent,
    CountMatchesIntent,
    DelegateIntent,
    DownloadIntent,
    FetchIntent,
    FindIntent,
    Intent,
    ListIntent,
    ReadFirstIntent,
    ReadIntent,
    ReplaceIntent,
    RunIntent,
    SearchIntent,
    WriteIntent,
    parse_intents,
)

PHRASES: dict[str, Intent] = {
    # list
    "list files": ListIntent(),
    "List all files, please.": ListIntent(),
    "what is here": ListIntent(),
    "what's here?": ListIntent(),
    "which files are here?": ListIntent(),
    "what is in this directory": ListIntent(),
    "show the directory": ListIntent(),
    "show me the project structure": ListIntent(),
    "ls": ListIntent(),
    "ls ..": ListIntent(".."),
    "ls -la src": ListIntent("src"),
    "ls files": ListIntent("files"),
    "show me the files in src": ListIntent("src"),
    "what is in the src folder": ListIntent("src"),
    "Can you show me what's in src?": ListIntent("src"),
    "src/": ListIntent("src/"),
    "liste die Dateien": ListIntent(),
    "zeige mir die Dateien in src": ListIntent("src"),
    # read
    "read README.md": ReadIntent("README.md"),
    "show pyproject.toml": ReadIntent("pyproject.toml"),
    "open src/x.py": ReadIntent("src/x.py"),
    "what's in LICENSE?": ReadIntent("LICENSE"),
    "src/culm/cli/main.py": ReadIntent("src/culm/cli/main.py"),
    'read "my notes/to do.txt"': ReadIntent("my notes/to do.txt"),
    r"cat my\ notes.txt": ReadIntent("my notes.txt"),
    "Please read the file `docs/a b.md`.": ReadIntent("docs/a b.md"),
    "read the first 20 lines of README.md": ReadIntent("README.md", 20),
    "lies README.md": ReadIntent("README.md"),
    "I have a bug. Read the code in src/parser.py and tell me more.": ReadIntent("src/parser.py"),
    "read the first python file": ReadFirstIntent("**/*.py"),
    "open the first *.md file in docs": ReadFirstIntent("**/*.md", "docs"),
    "show me the readme": ReadFirstIntent("README*"),
    # search
    "search for TODO": SearchIntent("TODO"),
    "grep def main in src": SearchIntent("def main", "src"),
    "grep -rn foo src": SearchIntent("foo", "src"),
    "grep TODO src/culm": SearchIntent("TODO", "src/culm"),
    'find "foo bar"': SearchIntent("foo bar"),
    "find TODO": SearchIntent("TODO"),
    'search for "and then list" in src': SearchIntent("and then list", "src"),
    r"search for /def \w+/ in the src folder": SearchIntent(r"def \w+", "src", literal=False),
    "search for foo in all python files": SearchIntent("foo", include="*.py"),
    "search for foo in *.py files": SearchIntent("foo", include="*.py"),
    "which files contain TODO": SearchIntent("TODO"),
    'find python files containing "import re"': SearchIntent("import re", include="*.py"),
    "where is open_client used?": SearchIntent("open_client"),
    "suche nach TODO in src": SearchIntent("TODO", "src"),
    # find
    "find *.py files": FindIntent("**/*.py"),
    "which files are called test_*": FindIntent("**/test_*"),
    "glob *.md": FindIntent("*.md"),
    "find setup.py": FindIntent("**/setup.py"),
    "where is setup.py": FindIntent("**/setup.py"),
    "find all markdown files in docs": FindIntent("**/*.md", "docs"),
    "list all python files": FindIntent("**/*.py"),
    # count
    "how many python files": CountFilesIntent("**/*.py"),
    "how many python files are there in src?": CountFilesIntent("**/*.py", "src"),
    "count the files in src": CountFilesIntent("**/*", "src"),
    "wie viele python Dateien gibt es": CountFilesIntent("**/*.py"),
    "count lines in README.md": CountLinesIntent("README.md"),
    "how many lines does README.md have?": CountLinesIntent("README.md"),
    "how many times does TODO occur": CountMatchesIntent(SearchIntent("TODO")),
    'how many times does "a b" appear in src?': CountMatchesIntent(SearchIntent("a b", "src")),
    "count occurrences of TODO in docs": CountMatchesIntent(SearchIntent("TODO", "docs")),
    "how many TODOs are there": CountMatchesIntent(SearchIntent("TODO")),
    # run
    "run ls -la": RunIntent("ls -la"),
    "execute `make test`": RunIntent("make test"),
    "$ git status": RunIntent("git status"),
    "run cd x; ls": RunIntent("cd x; ls"),
    'run echo "hi there"': RunIntent('echo "hi there"'),
    # edit
    "replace foo by bar in file.txt": ReplaceIntent("file.txt", "foo", "bar"),
    'replace "a and b" with `c, d` in "my file.txt"': ReplaceIntent(
        "my file.txt", "a and b", "c, d"
    ),
    "create notes.txt with hello": WriteIntent("notes.txt", "hello"),
    "create notes.txt with a, list and b": WriteIntent("notes.txt", "a, list and b"),
    "create notes.txt with:\n```\none\n\ntwo\n```": WriteIntent("notes.txt", "one\n\ntwo"),
    'write "hello" to notes.txt': WriteIntent("notes.txt", "hello"),
    "create an empty file called a.txt": WriteIntent("a.txt", ""),
    # fetch
    "fetch https://example.com/a.py": FetchIntent("https://example.com/a.py"),
    "Open the page http://localhost:8000/, please": FetchIntent("http://localhost:8000/"),
    "download https://example.com/a.zip to a.zip": DownloadIntent(
        "https://example.com/a.zip", "a.zip"
    ),
    # what changed
    "what changed?": RunIntent("git status --short"),
    "What has changed so far?": RunIntent("git status --short"),
    "show me the changes": RunIntent("git status --short"),
    # delegate
    "ask a sub-agent to list the files and read a.py": DelegateIntent(
        ("list the files and read a.py",)
    ),
    "delegate: count the files\nand rest": DelegateIntent(("count the files\nand rest",)),
    "delegate read a.txt to another agent": DelegateIntent(("read a.txt",)),
    "have an agent have another agent read a.txt": DelegateIntent(
        ("have another agent read a.txt",)
    ),
    "ask an agent to compare this file and another file": DelegateIntent(
        ("compare this file and another file",)
    ),
    # several agents
    "Have one agent read README.md and another count the TODOs in *.py files": DelegateIntent(
        ("read README.md", "count the TODOs in *.py files")
    ),
    "Have one agent read a.txt, another one run `make` and a third list the files.": DelegateIntent(
        ("read a.txt", "run `make`", "list the files")
    ),
    "let one sub-agent read a.txt and run make, and let another sub-agent read b": DelegateIntent(
        ("read a.txt and run make", "read b")
    ),
    "have one agent have another agent read a.txt and another read b.txt": DelegateIntent(
        ("have another agent read a.txt", "read b.txt")
    ),
    'ask two agents: "read README.md", "search for height_m"': DelegateIntent(
        ("read README.md", "search for height_m")
    ),
    "ask two agents to read README.md and search for height_m": DelegateIntent(
        ("read README.md", "search for height_m")
    ),
    "use 3 agents:\n- read a\n- read b\n- list the files and read c": DelegateIntent(
        ("read a", "read b", "list the files and read c")
    ),
}


@pytest.mark.parametrize("prompt", PHRASES)
def test_a_plain_request_is_understood(prompt: str) -> None:
    assert parse_intents(prompt) == (PHRASES[prompt],)


def test_where_something_is_defined_is_a_regular_expression_for_definitions() -> None:
    (search,) = parse_intents("where is open_client defined")
    assert isinstance(search, SearchIntent)
    assert not search.literal
    assert "open_client" in search.pattern


SEVERAL: dict[str, tuple[Intent, ...]] = {
    "list the files and read README.md": (ListIntent(), ReadIntent("README.md")),
    "list the files and be quick": (ListIntent(),),
    "ls, then ls": (ListIntent(),),
    "read a.py, b.py and c.py": (ReadIntent("a.py"), ReadIntent("b.py"), ReadIntent("c.py")),
    "1. ls src\n2. search for TODO": (ListIntent("src"), SearchIntent("TODO")),
    "run echo a && echo b and then read README.md": (
        RunIntent("echo a && echo b"),
        ReadIntent("README.md"),
    ),
    "replace a by b in c.py, run `make x` and then what changed?": (
        ReplaceIntent("c.py", "a", "b"),
        RunIntent("make x"),
        RunIntent("git status --short"),
    ),
    "ls a, ls b, ls c, ls d, ls e, ls f and ls g": tuple(map(ListIntent, "abcdef")),
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
    assert parse_intents("read a.py\n" + "x " * 2_000_000 + "\nread b.py") == (ReadIntent("a.py"),)


FRAGMENTS = [*" ".join([*PHRASES, *SEVERAL]).split(" "), "\n", "```", '"', "'", "„", "\ue000", "$ "]


@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map(" ".join)))
def test_any_text_gives_few_intents_and_always_the_same(prompt: str) -> None:
    intents = parse_intents(prompt)
    assert len(set(intents)) == len(intents) <= INTENTS_MAX
    assert intents == parse_intents(prompt)
