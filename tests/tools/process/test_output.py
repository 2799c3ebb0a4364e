"""Output within bounds: what a model reads of it, and the file that keeps it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.process import output
from culm.tools.process.output import MODEL_BYTES_MAX, CommandOutput, OutputSizes, fit, make_room

SMALL = OutputSizes(shown_bytes=40, file_bytes=100)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\n\ttext\n", "plain\n\ttext\n"),
        (b"gr\xc3\xbcn \xff\xfe end", "grün \ufffd end"),
        (b"\x00\x01\x02PNG\x00\x00", "\ufffdPNG\ufffd"),
        (
            b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x \x1b]8;;http://a\x1b\\link\x1b(B \x1b",
            "red x link ",
        ),
        (b" 10%\r 50%\r100%\r\nnext\r\n", "100%\nnext\n"),
        (b"N\bNA\bAM\bME\bE _\bx", "NAME x"),
        (b"bell\x07", "bell\ufffd"),
    ],
)
def test_bytes_of_any_kind_become_text_that_does_nothing_to_a_reader(
    data: bytes, text: str
) -> None:
    assert fit(data) == text


def test_colours_are_kept_for_those_who_see_them_and_nothing_else_is() -> None:
    seen = fit(b"\x1b[1;31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x00", keeps_colours=True)
    assert seen == "\x1b[1;31mred\x1b[0m\ufffd"


@given(st.lists(st.binary(max_size=60), max_size=12))
def test_output_is_whole_or_says_how_much_of_it_is_missing(pieces: list[bytes]) -> None:
    kept = CommandOutput(None, SMALL)
    for piece in pieces:
        kept.feed(piece)
    data = b"".join(pieces)
    text = kept.text()
    assert kept.count == len(data)
    assert (text == fit(data)) if len(data) <= 40 else ("bytes are left out here …]" in text)
    assert kept.text_since(len(data)) == ""
    assert len(text) < 150


def test_long_output_is_cut_at_lines_and_a_file_has_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    kept = CommandOutput(lambda: file)
    data = b"".join(b"line %d\n" % n for n in range(20_000))
    for start in range(0, len(data), 1000):
        assert file.exists() == (start > MODEL_BYTES_MAX)
        kept.feed(data[start : start + 1000])
    kept.close()
    head, tail = kept.text().partition("[…")[0], kept.text().rpartition("…]")[2]
    shown = len(head.rstrip("\n")) + 1 + len(tail.strip("\n")) + 1
    note = f"[… {len(data) - shown:,} bytes are left out here; all of the output is in {file} …]"
    assert note in kept.text()
    assert head.startswith("line 0\nline 1\n")
    assert tail.endswith("\nline 19998\nline 19999")
    assert len(kept.text()) <= MODEL_BYTES_MAX + len(note) + 2
    assert file.read_bytes() == data
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_of_output_has_a_bound_and_the_text_says_so(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    kept = CommandOutput(lambda: file, SMALL)
    for _ in range(50):
        kept.feed(b"0123456789")
    assert kept.text() == (
        "01234567890123456789\n"
        f"[… 460 bytes are left out here; the first 100 bytes of the output are in {file} …]\n"
        "01234567890123456789"
    )
    assert file.read_bytes() == b"0123456789" * 10


def test_a_file_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("somebody's")
    kept = CommandOutput(lambda: tmp_path / "taken", SMALL)
    kept.feed(b"x" * 100)
    assert "they could not be kept: File exists" in kept.text()
    assert (tmp_path / "taken").read_text() == "somebody's"


def test_a_cut_never_splits_a_character() -> None:
    kept = CommandOutput(None, SMALL)
    kept.feed("äöü€😀".encode() * 20)
    assert "\ufffd" not in kept.text()


def test_what_came_since_the_last_look_is_told_and_of_too_much_only_the_end() -> None:
    kept = CommandOutput(None, SMALL)
    kept.feed(b"one\n")
    assert kept.text_since(0) == "one\n"
    kept.feed(b"two\n")
    assert kept.text_since(4) == "two\n"
    kept.feed(b"three and more than fits in all\n".rjust(34, b"-"))
    assert kept.text_since(40) == "l\n"
    kept.feed(b"x" * 60)
    assert kept.text_since(92) == "x" * 10
    assert kept.text_since(42) == f"[… 40 bytes are left out here …]\n{'x' * 20}"


def test_old_files_of_output_make_room_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "FILES_MAX", 3)
    folder = tmp_path / "outputs"
    for number in range(6):
        make_room(folder)
        file = folder / f"{number}.txt"
        file.write_bytes(b"x" * 10)
        os.utime(file, ns=(number, number))
    assert sorted(file.name for file in folder.iterdir()) == ["3.txt", "4.txt", "5.txt"]
    monkeypatch.setattr(output, "FOLDER_BYTES_MAX", output.FILE_BYTES_MAX + 15)
    make_room(folder)
    assert [file.name for file in folder.iterdir()] == ["5.txt"]
