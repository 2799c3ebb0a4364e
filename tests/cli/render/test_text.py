"""Escaped text, tables and widths for a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.text import age_text, cells_of, columns, cut, fit, size_text, table
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
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_printable_text_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()


def test_cut_text_says_how_many_characters_are_missing() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdef", 2) == "ab… (4 more characters)"


def test_columns_are_aligned_without_trailing_spaces() -> None:
    rows = [("a", "bb", "c"), ("aaa", "b", "")]
    assert columns(rows, "  ") == ["  a    bb  c", "  aaa  b"]
    assert columns([]) == []


HEAD = ("id", "state", "text")
ROWS = [("0123456789", "runs", "fix the parser of dates"), ("  child", "waits for ask", "猫" * 12)]


def test_table_that_fits_or_has_no_width_is_not_cut() -> None:
    whole = [
        "id          state          text",
        "0123456789  runs           fix the parser of dates",
        f"  child     waits for ask  {'猫' * 12}",
    ]
    assert table(HEAD, ROWS) == table(HEAD, ROWS, 51) == whole


def test_last_column_of_a_table_is_cut_by_display_width() -> None:
    assert table(HEAD, ROWS, 44) == [
        "id          state          text",
        "0123456789  runs           fix the parser o…",
        "  child     waits for ask  猫猫猫猫猫猫猫猫…",
    ]


def test_narrow_table_wraps_rows_and_keeps_ids_whole() -> None:
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
def test_table_line_is_never_wider_than_the_terminal(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    # Ids are never cut; these are short enough even when escaped.
    short = [(printable(id_)[:30], *rest) for id_, *rest in rows]
    assert all(cells_of(line) <= width for line in table(HEAD, short, width))


def test_cut_text_ends_with_an_ellipsis_and_no_half_wide_character() -> None:
    assert [fit("a猫b", width) for width in (4, 3, 2, 1)] == ["a猫b", "a…", "a…", "…"]
    assert cells_of("e\u0301") == 1


def test_ages_and_sizes_are_short() -> None:
    ages = [age_text(age_s) for age_s in (-1, 0.9, 61, 3600, 90061)]
    assert ages == ["0:00", "0:00", "1:01", "1:00:00", "1d 1h"]
    assert [size_text(size) for size in (1 << 19, 3 << 30)] == ["0.5 MiB", "3.0 GiB"]
