"""The server's log: its end is found, and what comes next is seen whatever becomes of the file."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from culm.cli.log_entries import (
    BLOCK_BYTES,
    LINE_BYTES_MAX,
    LogFilter,
    LogTail,
    entries_of,
    last_entries,
)
from tests.cli.conftest import Desk, Said

INFO = "2026-01-02 03:04:05,678 INFO    culm.serve: up"
ERROR = "2026-01-02 03:04:06,678 ERROR   culm.serve: broken"
TRACE = ["Traceback (most recent call last):", "ValueError: \x1b[2Jplums"]
JSON = '{"time": "2026-01-02 03:04:05,678", "level": "warning", "logger": "a", "message": "low"}'


def log_of(folder: Path, *lines: str) -> Path:
    file = folder / "culm.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def last(file: Path, count: int = 50, *, level: int = 0, text: str = "") -> list[str]:
    entries, _ = last_entries(file, LogFilter(level, text), count)
    return [line for entry in entries for line in entry]


def test_an_entry_stays_whole_and_is_found_by_its_level_and_by_what_is_in_it(
    tmp_path: Path,
) -> None:
    file = log_of(tmp_path, INFO, ERROR, *TRACE, JSON)
    assert last(file) == [INFO, ERROR, *TRACE, JSON]
    assert last(file, 2) == [ERROR, *TRACE, JSON]
    assert last(file, 0) == []
    assert last(file, level=30) == [ERROR, *TRACE, JSON]
    assert last(file, level=40) == [ERROR, *TRACE]
    assert last(file, text="PLUMS") == [ERROR, *TRACE]


def test_the_end_of_a_large_file_is_read_and_nothing_before_it(tmp_path: Path) -> None:
    file = tmp_path / "culm.log"
    with file.open("wb") as out:
        out.truncate(1 << 40)  # Nobody could read all of this.
        out.seek(0, os.SEEK_END)
        out.write(f"\n{INFO}\n{ERROR}\n".encode())
    assert last(file, 2) == [INFO, ERROR]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_lines_are_whole_wherever_a_block_ends(tmp_path: Path, extra: int) -> None:
    long = f"{INFO} {'x' * (BLOCK_BYTES - len(INFO) - 2 + extra)}"
    file = log_of(tmp_path, long, long, ERROR)
    assert last(file) == [long, long, ERROR]


def test_files_that_were_moved_aside_are_read_as_far_as_needed(tmp_path: Path) -> None:
    log_of(tmp_path, f"{INFO} 1").rename(tmp_path / "culm.log.2")
    log_of(tmp_path, f"{INFO} 2").rename(tmp_path / "culm.log.1")
    file = log_of(tmp_path, f"{INFO} 3")
    assert last(file, 2) == [f"{INFO} 2", f"{INFO} 3"]
    assert len(last(file)) == 3
    file.write_text("")
    assert last(file, 1) == [f"{INFO} 2"]


def test_what_begins_with_no_entry_is_one_of_its_own() -> None:
    assert list(entries_of(["a", "b", INFO, "c"])) == [["a", "b"], [INFO, "c"]]
    assert list(entries_of([])) == []


def test_following_begins_after_the_last_whole_line_and_waits_for_the_rest(tmp_path: Path) -> None:
    file = log_of(tmp_path, INFO)
    with file.open("a") as log:
        log.write(ERROR[:30])
        log.flush()
        assert last(file) == [INFO, ERROR[:30]]
        entries, end = last_entries(file, LogFilter(), 50, follow=True)
        assert entries == [[INFO]]
        with closing(LogTail(file, end)) as tail:
            assert tail.read() == []
            log.write(f"{ERROR[30:]}\n")
            log.flush()
            assert (tail.read(), tail.read()) == ([ERROR], [])


def test_following_survives_that_the_file_is_moved_aside_or_emptied(tmp_path: Path) -> None:
    file = log_of(tmp_path, INFO)
    with closing(LogTail(file, 0)) as tail:
        assert tail.read() == [INFO]
        file.rename(tmp_path / "culm.log.1")
        assert tail.read() == []
        with (tmp_path / "culm.log.1").open("a") as old:
            old.write("the last of the old\n")
        log_of(tmp_path, "the first of the new")
        assert tail.read() == ["the last of the old"]
        assert tail.read() == ["the first of the new"]
        os.truncate(file, 0)
        assert tail.read() == []
        with file.open("a") as log:
            log.write("after\n")
        assert tail.read() == ["after"]


def test_a_line_without_an_end_is_told_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "culm.log"
    file.write_text("x" * (LINE_BYTES_MAX + 5))
    with closing(LogTail(file, 0)) as tail:
        told = [*tail.read(), *tail.read(), *tail.read()]
    assert "".join(told) == "x" * (LINE_BYTES_MAX + 5)


def test_no_log_is_told_with_where_it_would_be(desk: Desk, tmp_path: Path) -> None:
    desk.set_env(XDG_STATE_HOME=str(tmp_path / "state"))
    said = desk.culm("logs", "-f")
    assert said == Said(
        1,
        "",
        f"culm: there is no log: {tmp_path}/state/culm/culm.log\n"
        "hint: a server begins one when it starts; $XDG_STATE_HOME says where\n",
    )
    (tmp_path / "state" / "culm").mkdir(parents=True)
    log_of(tmp_path / "state" / "culm", INFO, ERROR)
    assert desk.culm("logs", "--level", "ERROR") == Said(0, f"{ERROR}\n")
    assert desk.culm("logs", "plums") == Said(0, "", "nothing in the log is like that\n")
