"""The server's log: the last entries, and following through rotation and truncation."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from culm.cli.commands.logs import (
    BLOCK_BYTES,
    LINE_BYTES_MAX,
    LogFilter,
    LogTail,
    entries_of,
    last_entries,
)
from tests.cli.conftest import CliHarness, CommandResult

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


def test_entries_stay_whole_and_are_filtered_by_level_and_text(
    tmp_path: Path,
) -> None:
    file = log_of(tmp_path, INFO, ERROR, *TRACE, JSON)
    assert last(file) == [INFO, ERROR, *TRACE, JSON]
    assert last(file, 2) == [ERROR, *TRACE, JSON]
    assert last(file, 0) == []
    assert last(file, level=30) == [ERROR, *TRACE, JSON]
    assert last(file, level=40) == [ERROR, *TRACE]
    assert last(file, text="PLUMS") == [ERROR, *TRACE]


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "culm.log"
    with file.open("wb") as out:
        out.truncate(1 << 40)  # Too large to read as a whole.
        out.seek(0, os.SEEK_END)
        out.write(f"\n{INFO}\n{ERROR}\n".encode())
    assert last(file, 2) == [INFO, ERROR]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_lines_are_whole_across_block_boundaries(tmp_path: Path, extra: int) -> None:
    long = f"{INFO} {'x' * (BLOCK_BYTES - len(INFO) - 2 + extra)}"
    file = log_of(tmp_path, long, long, ERROR)
    assert last(file) == [long, long, ERROR]


def test_rotated_files_are_read_as_far_as_needed(tmp_path: Path) -> None:
    log_of(tmp_path, f"{INFO} 1").rename(tmp_path / "culm.log.2")
    log_of(tmp_path, f"{INFO} 2").rename(tmp_path / "culm.log.1")
    file = log_of(tmp_path, f"{INFO} 3")
    assert last(file, 2) == [f"{INFO} 2", f"{INFO} 3"]
    assert len(last(file)) == 3
    file.write_text("")
    assert last(file, 1) == [f"{INFO} 2"]


def test_lines_before_the_first_entry_form_their_own_entry() -> None:
    assert list(entries_of(["a", "b", INFO, "c"])) == [["a", "b"], [INFO, "c"]]
    assert list(entries_of([])) == []


def test_following_begins_after_the_last_whole_line(tmp_path: Path) -> None:
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


def test_following_survives_rotation_and_truncation(tmp_path: Path) -> None:
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


def test_endless_line_is_read_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "culm.log"
    file.write_text("x" * (LINE_BYTES_MAX + 5))
    with closing(LogTail(file, 0)) as tail:
        pieces = [*tail.read(), *tail.read(), *tail.read()]
    assert "".join(pieces) == "x" * (LINE_BYTES_MAX + 5)


def test_missing_log_is_reported_with_its_path(cli: CliHarness, tmp_path: Path) -> None:
    cli.set_env(XDG_STATE_HOME=str(tmp_path / "state"))
    result = cli.culm("logs", "-f")
    assert result == CommandResult(
        1,
        "",
        f"culm: no log file: {tmp_path}/state/culm/culm.log\n"
        "hint: check $XDG_STATE_HOME; a server creates the file when it starts\n",
    )
    (tmp_path / "state" / "culm").mkdir(parents=True)
    log_of(tmp_path / "state" / "culm", INFO, ERROR)
    assert cli.culm("logs", "--level", "ERROR") == CommandResult(0, f"{ERROR}\n")
    assert cli.culm("logs", "plums") == CommandResult(0, "", "no matching entries in the log\n")
