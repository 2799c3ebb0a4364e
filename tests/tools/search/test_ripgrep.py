"""A pattern translated for ripgrep has the same meaning as in Python."""

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.search.ripgrep import for_ripgrep


@pytest.mark.parametrize(
    ("pattern", "rust"),
    [
        ("abc", "abc"),
        ("é 日本", "é 日本"),
        (r"def \w+\(", r"def [\w--[\r]]+\("),
        ("a.b", r"a[^\r\n]b"),
        ("(?im)^a|b$", "(?i)^a|b$"),
        ("(?s)a", "a"),
        ("(a)(?:b)", "(?:a)(?:b)"),
        ("interface{}", r"interface\{\}"),
        ("a{2}b{,3}c{4,}?", "a{2}b{0,3}c{4,}?"),
        ("[]a-z]", r"[[\]a-z]--[\r]]"),
        (r"[^\s&&-]", r"[[^\s\&\&\-]--[\r]]"),
        ("[[:x]", r"[[\[:x]--[\r]]"),
        (r"\<\/\.\x41\u00e9\t", r"</\.Aé\x{9}"),
        (r"\bx\b", r"\bx\b"),
    ],
)
def test_a_pattern_is_translated_to_ripgrep_syntax(pattern: str, rust: str) -> None:
    assert for_ripgrep(pattern, literal=False) == rust


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?<!a)b", r"(a)\1", "(?P<n>a)", "(?>a)", "a*+", "a(?i)b", "(?x) a",
        r"\Aa", r"a\Z", r"\n", r"\0", r"\N{BULLET}", r"\p{L}", r"[\b]", "a\nb", "a\udc80",
        "(", ")", "[a", "\\", "*", "a**", "^*", "(|*)", "a{2,1}", "[b-a]", r"[a-\d]", r"\U00110000",
    ],
)  # fmt: skip
def test_a_python_only_or_invalid_pattern_is_not_given_to_ripgrep(pattern: str) -> None:
    assert for_ripgrep(pattern, literal=False) is None


def test_literal_text_is_never_read_as_a_pattern() -> None:
    assert for_ripgrep(r"a(b)*[c]\d{2}", literal=True) == r"a\(b\)\*\[c\]\\d\{2\}"
    assert [for_ripgrep(text, literal=True) for text in ("a\nb", "a\r", "\0", "\ud800")] == [
        None
    ] * 4


@given(st.text("ab01.^$|()[]{}?*+-\\,:!<=wsdbxAZ&~ \n", max_size=12))
def test_a_translated_pattern_is_also_valid_in_python(pattern: str) -> None:
    if for_ripgrep(pattern, literal=False) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(pattern)
