"""Bounded command output: the text a model reads and the file with the full output."""

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
def test_any_bytes_become_text_without_control_sequences(data: bytes, text: str) -> None:
    assert fit(data) == text


def test_colors_are_kept_on_request_and_other_sequences_removed() -> None:
    seen = fit(b"\x1b[1;31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x00", keeps_colours=True)
    assert seen == "\x1b[1;31mred\x1b[0m\ufffd"


@given(st.lists(st.binary(max_size=60), max_size=12))
def test_output_is_complete_or_says_that_bytes_are_left_out(pieces: list[bytes]) -> None:
    buffer = CommandOutput(None, SMALL)
    for piece in pieces:
        buffer.feed(piece)
    data = b"".join(pieces)
    text = buffer.text()
    assert buffer.count == len(data)
    assert (text == fit(data)) if len(data) <= 40 else ("bytes are left out here …]" in text)
    assert buffer.text_since(len(data)) == ""
    assert len(text) < 150


def test_long_output_is_cut_at_lines_and_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    buffer = CommandOutput(lambda: file)
    data = b"".join(b"line %d\n" % n for n in range(20_000))
    for start in range(0, len(data), 1000):
        assert file.exists() == (start > MODEL_BYTES_MAX)
        buffer.feed(data[start : start + 1000])
    buffer.close()
    head, tail = buffer.text().partition("[…")[0], buffer.text().rpartition("…]")[2]
    shown = len(head.rstrip("\n")) + 1 + len(tail.strip("\n")) + 1
    note = f"[… {len(data) - shown:,} bytes are left out here; all of the output is in {file} …]"
    assert note in buffer.text()
    assert head.startswith("line 0\nline 1\n")
    assert tail.endswith("\nline 19998\nline 19999")
    assert len(buffer.text()) <= MODEL_BYTES_MAX + len(note) + 2
    assert file.read_bytes() == data
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_output_file_is_bounded_and_the_text_says_so(tmp_path: Path) -> None:
    file = tmp_path / "all.txt"
    buffer = CommandOutput(lambda: file, SMALL)
    for _ in range(50):
        buffer.feed(b"0123456789")
    assert buffer.text() == (
        "01234567890123456789\n"
        f"[… 460 bytes are left out here; the first 100 bytes of the output are in {file} …]\n"
        "01234567890123456789"
    )
    assert file.read_bytes() == b"0123456789" * 10


def test_output_is_still_shown_if_its_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("somebody's")
    buffer = CommandOutput(lambda: tmp_path / "taken", SMALL)
    buffer.feed(b"x" * 100)
    assert "they could not be kept: File exists" in buffer.text()
    assert (tmp_path / "taken").read_text() == "somebody's"


def test_a_cut_never_splits_a_character() -> None:
    buffer = CommandOutput(None, SMALL)
    buffer.feed("äöü€😀".encode() * 20)
    assert "\ufffd" not in buffer.text()


def test_output_since_the_last_read_is_returned_with_its_end_if_too_long() -> None:
    buffer = CommandOutput(None, SMALL)
    buffer.feed(b"one\n")
    assert buffer.text_since(0) == "one\n"
    buffer.feed(b"two\n")
    assert buffer.text_since(4) == "two\n"
    buffer.feed(b"three and more than fits in all\n".rjust(34, b"-"))
    assert buffer.text_since(40) == "l\n"
    buffer.feed(b"x" * 60)
    assert buffer.text_since(92) == "x" * 10
    assert buffer.text_since(42) == f"[… 40 bytes are left out here …]\n{'x' * 20}"


def test_old_output_files_are_deleted_for_new_ones(
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
