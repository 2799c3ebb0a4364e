"""Text that a terminal shows and does not obey."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.cells import cells_of, fit
from culm.cli.render.text import age_text, columns, cut, size_text, table
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


HEAD = ("id", "state", "text")
ROWS = [("0123456789", "runs", "fix the parser of dates"), ("  child", "waits for ask", "猫" * 12)]


def test_a_table_that_has_room_is_whole_and_one_for_a_file_is_never_cut() -> None:
    whole = [
        "id          state          text",
        "0123456789  runs           fix the parser of dates",
        f"  child     waits for ask  {'猫' * 12}",
    ]
    assert table(HEAD, ROWS) == table(HEAD, ROWS, 51) == whole


def test_where_it_does_not_fit_the_last_column_is_cut_and_a_wide_sign_counts_two() -> None:
    assert table(HEAD, ROWS, 44) == [
        "id          state          text",
        "0123456789  runs           fix the parser o…",
        "  child     waits for ask  猫猫猫猫猫猫猫猫…",
    ]


def test_where_too_little_would_be_left_rows_take_more_lines_and_the_id_stays_whole() -> None:
    assert table(HEAD, ROWS, 40) == [
        "id          state",
        "    text",
        "0123456789  runs",
        "    fix the parser of dates",
        "  child     waits for ask",
        f"    {'猫' * 12}",
    ]
    assert table(HEAD, ROWS, 20) == [
        "id",
        "    state  text",
        "0123456789",
        "    runs",
        "    fix the parser…",
        "  child",
        "    waits for ask",
        "    猫猫猫猫猫猫猫…",
    ]


@given(
    st.lists(st.tuples(st.text(max_size=9), st.text(max_size=30), st.text(max_size=60))),
    st.integers(40, 120),
)
def test_no_line_of_a_table_is_wider_than_its_terminal(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    # An id may take any room; these are short enough, however they are escaped.
    short = [(printable(id_)[:30], *rest) for id_, *rest in rows]
    assert all(cells_of(line) <= width for line in table(HEAD, short, width))


def test_what_is_cut_ends_with_an_ellipsis_and_leaves_no_half_of_a_sign() -> None:
    assert [fit("a猫b", width) for width in (4, 3, 2, 1)] == ["a猫b", "a…", "a…", "…"]
    assert cells_of("e\u0301") == 1


def test_ages_and_sizes_are_short() -> None:
    ages = [age_text(age_s) for age_s in (-1, 0.9, 61, 3600, 90061)]
    assert ages == ["0:00", "0:00", "1:01", "1:00:00", "1d 1h"]
    assert [size_text(size) for size in (1 << 19, 3 << 30)] == ["0.5 MiB", "3.0 GiB"]
