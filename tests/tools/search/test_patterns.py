"""Glob patterns and ignore rules, compared with the standard library where possible."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.search.patterns import (
    ALTERNATIVES_MAX,
    PATTERN_CHARS_MAX,
    BadPattern,
    IgnoreRules,
    expand_braces,
    parse_glob,
)


def matches(pattern: str, path: str, *, hidden: bool = False) -> bool:
    return parse_glob(pattern, hidden=hidden).matches(path.split("/"))


@pytest.mark.parametrize(
    ("pattern", "paths", "others"),
    [
        ("*.py", ["a.py"], ["a.pyc", "b/a.py", ".a.py"]),
        ("**/*.py", ["a.py", "b/a.py", "b/c/a.py"], ["a.js", ".b/a.py", "b/.a.py"]),
        ("src/**", ["src/a", "src/b/c"], ["src", "srcs/a", "src/.b/c", "src/.b"]),
        ("**", ["a", "b/c"], [".a", "b/.c"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb", "b", "a/b/c"]),
        ("a/**/b/**/c", ["a/b/c", "a/b/b/c", "a/x/b/y/c"], ["a/c", "a/b"]),
        ("**/**/a", ["a", "b/c/a"], ["b"]),
        ("*.{ts,tsx}", ["a.ts", "a.tsx"], ["a.t", "a.{ts,tsx}"]),
        ("{a,b{c,d}}/x", ["a/x", "bc/x", "bd/x"], ["b/x"]),
        ("{a}", ["{a}"], ["a"]),
        ("{a,b", ["{a,b"], ["a"]),
        ("?[!a-c]", ["xd", "xz"], ["xa", "x", ".d"]),
        ("[]x]", ["]", "x"], ["[]x]"]),
        ("[ab", ["[ab"], ["a"]),
        ("[z-a]", [], ["z", "a"]),
        (".env*", [".env", ".env.local"], ["env"]),
        ("**/.github/*", ["a/.github/x"], [".a/.github/x"]),
        (r"\*\{a,b\}", ["*{a,b}"], ["xa", "*a"]),
        ("./a//b", ["a/b"], ["a"]),
    ],
)
def test_a_glob_matches_only_the_expected_paths(
    pattern: str, paths: list[str], others: list[str]
) -> None:
    assert [path for path in paths + others if matches(pattern, path)] == paths


NAMES = st.text("ab.-]!\n", min_size=1, max_size=6)


@given(pattern=st.text("ab.*?[]!-\n", min_size=1, max_size=8), name=NAMES)
def test_one_component_matches_like_fnmatch(pattern: str, name: str) -> None:
    if pattern in ("**", ".") or "[^" in pattern:
        return  # These have a different meaning here.
    assert matches(pattern, name, hidden=True) == fnmatchcase(name, pattern)


TREE = [
    f"{a}{b}{c}" for a in ("", "a/", "b/") for b in ("", "a/", "ab/", "b/") for c in ("a", "ab.x")
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for path in TREE:
        if not path.endswith("/a") and path != "a":  # Otherwise it is also a directory.
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
    return root


@given(
    parts=st.lists(
        st.sampled_from(["**", "*", "a", "b", "?", "a*", "[ab]", "*b*"]), min_size=1, max_size=5
    ),
    last=st.sampled_from(["*", "*.x", "a?.x", "ab.[x-z]", "b"]),
)
def test_paths_match_like_pathlib_glob(tree: Path, parts: list[str], last: str) -> None:
    pattern = "/".join([*parts, last])
    files = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    found = {path.relative_to(tree) for path in tree.glob(pattern) if path.is_file()}
    glob = parse_glob(pattern, hidden=False)
    assert {path for path in files if glob.matches(path.parts)} == found


def test_pathological_patterns_are_matched_quickly() -> None:
    assert not matches("*a" * 400 + "b", "a" * 4000)
    assert not matches("**/a/" * 190 + "b", "/".join("a" * 2000))
    assert not matches("*?" * 300 + "[b]", "a" * 4000)


@pytest.mark.parametrize("pattern", ["{a,b}" * 10, "x" * (PATTERN_CHARS_MAX + 1), "/", "{a,}", "."])
def test_an_unusable_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        parse_glob(pattern, hidden=False)


@given(st.text("ab{},\\", max_size=30))
def test_braces_expand_to_a_bounded_number_of_patterns(text: str) -> None:
    try:
        assert 1 <= len(expand_braces(text)) <= ALTERNATIVES_MAX
    except BadPattern:
        assert text.count(",") >= 4


@pytest.mark.parametrize(
    ("text", "hidden", "seen"),
    [
        ("*.log", ["a.log", "b/c.log"], ["a.logs"]),
        ("# a\n\n  \na", ["a", "b/a"], ["# a"]),
        (r"\#a", ["#a"], ["a"]),
        (r"\!a", ["!a"], ["a"]),
        ("build/", ["build/", "b/build/"], ["build"]),
        ("/build", ["build", "build/"], ["b/build"]),
        ("a/b", ["a/b"], ["x/a/b", "b"]),
        ("a/b/", ["a/b/"], ["a/b"]),
        ("**/a", ["a", "x/y/a"], ["ab"]),
        ("a/**", ["a/b", "a/b/c"], ["a/", "b"]),
        ("a/**/b", ["a/b", "a/x/b"], ["ab"]),
        ("*\n!keep", ["a", ".b"], ["keep", "x/keep"]),
        ("!a\na", ["a"], []),
        ("a   \nb\\ ", ["a", "b "], ["b"]),
        ("{a,b}", ["{a,b}"], ["a"]),
        ("a\r\nb\r\n", ["a", "b"], []),
        ("/\n//\n!", [], ["a"]),
    ],
)
def test_a_gitignore_hides_only_the_expected_paths(
    text: str, hidden: list[str], seen: list[str]
) -> None:
    rules = IgnoreRules().below(0, text)
    paths = hidden + seen
    assert [path for path in paths if _hides(rules, path)] == hidden


def _hides(rules: IgnoreRules, path: str) -> bool:
    return rules.hides(path.rstrip("/").split("/"), is_directory=path.endswith("/"))


@given(st.text(max_size=200))
def test_any_text_can_be_parsed_as_a_gitignore(text: str) -> None:
    _hides(IgnoreRules().below(0, text), "a/b")
