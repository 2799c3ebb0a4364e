"""Text replacement: exactly once, with the file's line endings, or a helpful error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.files.replace import COMPARED_CHARS_MAX, ReplaceFailed, explain_miss, replaced

CODE = "def one():\n    return 1\n\n\ndef two():\n\tx = 1\n\treturn  2\n"


def miss(text: str, old: str, new: str = "new") -> str:
    with pytest.raises(ReplaceFailed) as caught:
        replaced(text, old, new, everywhere=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "old", "new", "after"),
    [
        ("a b c", "b", "x", "a x c"),
        ("a\nb\n", "a\nb", "a\nx\nb", "a\nx\nb\n"),
        ("a\r\nb\r\nc\r\n", "a\nb", "a\nx\nb", "a\r\nx\r\nb\r\nc\r\n"),
        ("a\r\nb\r\nc\r\n", "a\r\nb", "x\ny", "x\r\ny\r\nc\r\n"),
        ("a\r\nb\r\n", "\nb", "", "a\r\n"),
        ("a\r\nb", "a\n", "", "b"),
        ("a\r\nb", "b", "b\n", "a\r\nb\r\n"),
        ("a\nb\r\nc\nd", "b", "x\ny", "a\nx\r\ny\r\nc\nd"),
        ("a\nb\r\nc\nd", "c\nd", "x\ny", "a\nb\r\nx\ny"),
        ("a\nb", "a\r\nb", "x\r\ny", "x\ny"),
        ("a\nb", "b", "b\r\n", "a\nb\r\n"),
        ("a\udce9b", "b", "x", "a\udce9x"),
    ],
)
def test_inserted_text_uses_the_line_endings_of_what_it_replaces(
    text: str, old: str, new: str, after: str
) -> None:
    assert replaced(text, old, new, everywhere=False) == after


PIECES = st.lists(st.sampled_from(["a", "b", "\n", "\r\n", " "]), max_size=12).map("".join)


@given(PIECES, PIECES.filter(bool), st.sampled_from(["x", "x\ny", ""]))
def test_replacing_ignores_line_endings_and_matches_plain_replace(
    text: str, old: str, new: str
) -> None:
    flat, wanted = text.replace("\r\n", "\n"), old.replace("\r\n", "\n")
    if wanted not in flat:
        with pytest.raises(ReplaceFailed):
            replaced(text, old, new, everywhere=True)
    else:
        after = replaced(text, old, new, everywhere=True)
        assert after.replace("\r\n", "\n") == flat.replace(wanted, new)


def test_an_ambiguous_match_is_refused_with_its_line_numbers() -> None:
    assert miss("x\ny\nx\r\nx", "x") == (
        "old_string was found 3 times, at lines 1, 3, 4. Add lines around it until it is unique, "
        "or set replace_all to replace every one."
    )
    assert "20 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …." in miss("x\n" * 20, "x")
    assert replaced("x\ny\nx", "x", "z", everywhere=True) == "z\ny\nz"


@pytest.mark.parametrize(("old", "new"), [("a", "a"), ("a\r\nb", "a\nb")])
def test_a_replacement_that_changes_nothing_is_refused(old: str, new: str) -> None:
    assert miss("a\r\nb", old, new).startswith("old_string and new_string are the same")


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            "def one():\n\treturn 1",
            "at lines 1 to 2 there is the same with other blanks: old_string is indented with "
            "tabs, the file is not. The file has:\n     1|def one():\n     2|    return 1",
        ),
        (
            "def two():\n    x = 1\n    return  2",
            "at lines 5 to 7 there is the same with other blanks: the file is indented with tabs, "
            "old_string is not. The file has:\n     5|def two():\n     6|\tx = 1\n     7|\treturn",
        ),
        (
            "def one():\n  return 1  ",
            "the indentation (4 in the file, 2 in old_string), blanks at the end of a line.",
        ),
        ("x  = 1", "at line 6 there is the same with other blanks: blanks within a line."),
        ("return 1\n\ndef two", "at lines 2 to 5 there is the same with other blanks: the empty"),
        (
            "     1|def one():\n     2|    return 1",
            "it is in the file without the line numbers that view adds. Leave out the number",
        ),
        (
            "def two():\n    y = 17\n    return 2",
            "old_string was not found. The nearest is at lines 5 to 7; copy from it exactly, or "
            "view the file again:\n     5|def two():\n     6|\tx = 1\n",
        ),
        ("caf\ufffd", "It contains \ufffd, which view shows for bytes that are not UTF-8"),
        ("nothing alike", "old_string was not found, nor anything like it. View the file again."),
        ("  \n \n", "old_string has only blanks, and the file has different ones."),
        ("++ --", "old_string was not found, nor anything like it. View the file again."),
    ],
)
def test_a_miss_message_says_what_was_probably_meant(old: str, message: str) -> None:
    assert message in miss(CODE, old)


def test_an_unusual_blank_is_named_in_the_message() -> None:
    assert "blanks within a line (the file has U+00A0)" in miss("a\u00a0b = 1\n", "a b = 1")


def test_a_miss_in_an_empty_or_huge_file_has_a_short_message() -> None:
    assert miss("", "x") == "old_string was not found: the file is empty."
    assert miss("a\n" * COMPARED_CHARS_MAX, "b").endswith("grep, then view those lines.")


def test_a_miss_message_is_bounded() -> None:
    text = "\n".join(f"{n} {'word ' * 200}" for n in range(100))
    message = explain_miss(text, text.replace("word ", "word  "))
    assert message.endswith("(75 more lines)")
    assert len(message) < 10_000
