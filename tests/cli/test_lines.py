"""Text that a terminal shows and does not obey."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.lines import columns, cut
from culm.wire.codec import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 猫", "plain, größer, 猫"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J", r"\x9b2J"),
        ("safe\u202etxt.sh", r"safe\u202etxt.sh"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_whatever_a_file_holds_takes_one_line(text: str) -> None:
    assert printable(text).isprintable()


def test_a_long_text_says_how_much_of_it_is_missing() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdef", 2) == "ab… (4 more characters)"


def test_columns_line_up_and_leave_no_space_at_the_end() -> None:
    rows = [("a", "bb", "c"), ("aaa", "b", "")]
    assert columns(rows, "  ") == ["  a    bb  c", "  aaa  b"]
    assert columns([]) == []
