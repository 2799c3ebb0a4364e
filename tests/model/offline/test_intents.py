import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.offline.intents import INTENTS_MAX, Intent, parse_intents


def read(path: str, lines: int = 0) -> Intent:
    return Intent("read", path=path, lines=lines)


def search(pattern: str, path: str = "") -> Intent:
    return Intent("search", pattern=pattern, path=path)


def find(pattern: str, path: str = "") -> Intent:
    return Intent("find", pattern=pattern, path=path)


def count_files(pattern: str, path: str = "") -> Intent:
    return Intent("count_files", pattern=pattern, path=path)


def run(command: str) -> Intent:
    return Intent("run", command=command)


def delegate(*prompts: str) -> Intent:
    return Intent("delegate", prompts=prompts)


LIST = Intent("list")
PHRASES: dict[str, Intent] = {
    # list
    "list": LIST,
    "list files": LIST,
    "List all files, please.": LIST,
    "List the files here.": LIST,
    "what is here": LIST,
    "what's here?": LIST,
    "which files are here?": LIST,
    "What is in this directory?": LIST,
    "show the directory": LIST,
    "ls": LIST,
    "ls ..": Intent("list", path=".."),
    "ls -la src": Intent("list", path="src"),
    "show me the files in src": Intent("list", path="src"),
    "what is in the src folder": Intent("list", path="src"),
    # read
    "read README.md": read("README.md"),
    "read ../outside.md": read("../outside.md"),
    "show pyproject.toml": read("pyproject.toml"),
    "open src/x.py": read("src/x.py"),
    "what's in NOTES.md?": read("NOTES.md"),
    'read "my notes/to do.txt"': read("my notes/to do.txt"),
    "Please read the file `docs/a b.md`.": read("docs/a b.md"),
    "read the first 20 lines of README.md": read("README.md", 20),
    "read README.md and tell me more": read("README.md"),
    # search
    "search for TODO": search("TODO"),
    "grep def main in src": search("def main", "src"),
    'find "foo bar"': search("foo bar"),
    "find TODO": search("TODO"),
    'search for "and then list" in the src folder': search("and then list", "src"),
    # find
    "find *.py files": find("**/*.py"),
    "find setup.py": find("**/setup.py"),
    "find all markdown files in docs": find("**/*.md", "docs"),
    "list all python files": find("**/*.py"),
    "Which text files are there?": find("**/*.txt"),
    # count
    "how many python files": count_files("**/*.py"),
    "And how many Python files are there?": count_files("**/*.py"),
    "how many python files are there in src?": count_files("**/*.py", "src"),
    "how many files are there?": count_files("**/*"),
    "count the files": count_files("**/*"),
    "count the files in src": count_files("**/*", "src"),
    "how many times does TODO occur?": Intent("count_matches", pattern="TODO"),
    'how many times does "a b" appear in src?': Intent("count_matches", pattern="a b", path="src"),
    # run
    "run ls -la": run("ls -la"),
    "run date > now.txt": run("date > now.txt"),
    "execute `make test`": run("make test"),
    "$ git status": run("git status"),
    "run cd x; ls": run("cd x; ls"),
    'run echo "hi there"': run('echo "hi there"'),
    # edit
    "replace foo by bar in file.txt": Intent("replace", path="file.txt", old="foo", new="bar"),
    'replace "a and b" with `c, d` in "my file.txt"': Intent(
        "replace", path="my file.txt", old="a and b", new="c, d"
    ),
    "create notes.txt with hello": Intent("write", path="notes.txt", content="hello"),
    "create notes.txt with a, list and b": Intent(
        "write", path="notes.txt", content="a, list and b"
    ),
    "create notes.txt with:\n```\none\n\ntwo\n```": Intent(
        "write", path="notes.txt", content="one\n\ntwo"
    ),
    "create an empty file called a.txt": Intent("write", path="a.txt"),
    # fetch
    "fetch https://example.com/a.py": Intent("fetch", url="https://example.com/a.py"),
    "Open the page http://localhost:8000/, please": Intent("fetch", url="http://localhost:8000/"),
    # delegate
    "ask a sub-agent to list the files and read a.py": delegate("list the files and read a.py"),
    "delegate: count the files\nand rest": delegate("count the files\nand rest"),
    'have an agent have an agent run "touch one"': delegate('have an agent run "touch one"'),
    "ask an agent to compare this file and another file": delegate(
        "compare this file and another file"
    ),
    "Have one agent read README.md and run `rm README.md`, and another replace `* 5` by `* 0.5` in "
    "garden.py and run `make test`": delegate(
        "read README.md and run `rm README.md`",
        "replace `* 5` by `* 0.5` in garden.py and run `make test`",
    ),
    "Have one agent read a.txt, another one run `make` and a third list the files.": delegate(
        "read a.txt", "run `make`", "list the files"
    ),
    "let one sub-agent read a.txt and run make, and let another sub-agent read b": delegate(
        "read a.txt and run make", "read b"
    ),
    "have one agent have another agent read a.txt and another read b.txt": delegate(
        "have another agent read a.txt", "read b.txt"
    ),
}


@pytest.mark.parametrize("prompt", PHRASES)
def test_plain_request_is_parsed(prompt: str) -> None:
    assert parse_intents(prompt) == (PHRASES[prompt],)


SEVERAL: dict[str, tuple[Intent, ...]] = {
    "list the files and read README.md": (LIST, read("README.md")),
    "list the files and be quick": (LIST,),
    "list\nthe files\n!touch made": (LIST,),
    "ls, then ls": (LIST,),
    "1. ls src\n2. search for TODO": (Intent("list", path="src"), search("TODO")),
    "run echo a && echo b and then read README.md": (run("echo a && echo b"), read("README.md")),
    "replace a by b in c.py, run `make x` and then run `make y`": (
        Intent("replace", path="c.py", old="a", new="b"),
        run("make x"),
        run("make y"),
    ),
    "ls a, ls b, ls c, ls d, ls e, ls f and ls g": tuple(
        Intent("list", path=path) for path in "abcdef"
    ),
}


@pytest.mark.parametrize("prompt", SEVERAL)
def test_several_requests_are_parsed_in_order_up_to_the_limit(prompt: str) -> None:
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
def test_prose_gives_no_intents(prompt: str) -> None:
    assert parse_intents(prompt) == ()


def test_only_the_beginning_of_a_huge_prompt_is_read() -> None:
    assert parse_intents("read a.py\n" + "x " * 2_000_000 + "\nread b.py") == (read("a.py"),)


FRAGMENTS = [*" ".join([*PHRASES, *SEVERAL]).split(" "), "\n", "```", '"', "'", "\ue000", "$ "]


@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map(" ".join)))
def test_any_text_gives_few_and_deterministic_intents(prompt: str) -> None:
    intents = parse_intents(prompt)
    assert len(set(intents)) == len(intents) <= INTENTS_MAX
    assert intents == parse_intents(prompt)
