"""The terminal emulator of tests and recordings."""

import pytest
from examples.recording.screen import PLAIN, Screen, Style
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("fed", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("one\ntwo", ["one", "   two"]),
        ("seven\rel", ["elven"]),
        ("ab\b\bx", ["xb"]),
        ("a\tb", ["a       b"]),
        ("0123456789ab", ["0123456789", "ab"]),
        ("0123456789\r\nab", ["0123456789", "ab"]),  # A full line wraps only at the next character.
        ("012345678漢", ["012345678", "漢"]),
        ("漢字\rx", ["x 字"]),  # Half of a wide character is blank.
        ("漢字\x1b[3Dx", [" x字"]),
        ("e\u0301x", ["e\u0301x"]),
        ("one\r\x1b[K", []),
        ("one\r\ntwo\x1b[A\r\x1b[J", []),
        ("one\r\ntwo\x1b[A\x1b[2Dx\x1b[B\x1b[Cy", ["oxe", "twoy"]),
        ("1\r\n2\r\n3\r\n4", ["2", "3", "4"]),
        ("one\x1b[2J\x1b[Hx\x1b[2;3Hy", ["x", "  y"]),
        ("a\x1b[?25lb\x1b]0;title\x07c\x1b(Bd\x1b[38;2;1;2;3me", ["abcde"]),
        ("a\x07\x00b", ["ab"]),
    ],
)
def test_the_screen_shows_what_a_terminal_shows(fed: str, lines: list[str]) -> None:
    screen = Screen(10, 3)
    screen.feed(fed)
    assert screen.lines() == lines


def test_lines_scrolled_out_are_kept() -> None:
    screen = Screen(10, 2)
    screen.feed("1\r\n2\r\n3\r\n4")
    assert (screen.lines(), screen.all_lines()) == (["3", "4"], ["1", "2", "3", "4"])


@pytest.mark.parametrize(
    ("sequence", "style"),
    [
        ("\x1b[1m", Style(bold=True)),
        ("\x1b[2;31m", Style(1, dim=True)),
        ("\x1b[94m", Style(12)),
        ("\x1b[48;5;3;38;5;200m", Style(200)),
        ("\x1b[1;2m\x1b[22;39m", PLAIN),
        ("\x1b[1;35m\x1b[m", PLAIN),
    ],
)
def test_sgr_sequences_set_the_style(sequence: str, style: Style) -> None:
    screen = Screen(10, 1)
    screen.feed(f"{sequence}x")
    assert screen.cells()[0][0] == ("x", style)


@given(
    st.text(st.sampled_from("a漢\x1b[];0129ABCDHJKm\r\n\b\t\u0301é"), max_size=60), st.integers(0)
)
def test_the_screen_does_not_depend_on_how_the_bytes_are_split(text: str, at: int) -> None:
    whole, cut = Screen(10, 4), Screen(10, 4)
    data = text.encode()
    whole.feed(data)
    at %= len(data) + 1
    cut.feed(data[:at])
    cut.feed(data[at:])
    assert cut.all_lines() == whole.all_lines()
    assert all(len(row) == 10 for row in whole.cells())
