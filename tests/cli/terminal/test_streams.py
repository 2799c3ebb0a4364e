"""Standard streams that are closed, or full: no socket takes their place, and a person is told."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from culm.cli.render.agent_events import JsonCallRenderer
from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.streams import CannotWrite, let_go, output_width, write_note
from culm.fleet.executor import completed
from culm.ids import MessageId
from tests.cli.conftest import Desk, Said
from tests.support import WAIT_S

FULL = "/dev/full"
PROGRAM = """
import os, sys
from culm.cli.terminal.streams import fill_streams
fill_streams()
print("seen by nobody", file=sys.stderr, flush=True)
places = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
sys.exit(0 if places == {os.devnull} and os.get_inheritable(1) else 1)
"""


def test_the_place_of_a_closed_stream_is_taken_before_a_socket_gets_its_number() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM]
    assert subprocess.run(closed, check=False, timeout=2 * WAIT_S).returncode == 0


@pytest.mark.parametrize(
    "say",
    [
        lambda: TextRenderer().text(MessageId("m"), "hello"),
        lambda: JsonRenderer().text(MessageId("m"), "hello"),
        lambda: JsonCallRenderer(TextRenderer()).end(completed("hello")),
    ],
    ids=["plain", "json", "agent"],
)
def test_a_full_disk_is_told_with_what_becomes_of_the_run(
    capsys: pytest.CaptureFixture[str], say: Callable[[], None]
) -> None:
    # What is left is written once more at the end, as by an interpreter that leaves.
    with Path(FULL).open("w") as stream, redirect_stdout(stream):
        with pytest.raises(CannotWrite) as found:
            say()
        assert let_go(found.value, "the run was cancelled") == 1
    expected = "culm: cannot write: No space left on device; the run was cancelled\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("stderr", [FULL, "a pipe nobody reads"])
def test_a_stderr_that_takes_nothing_costs_neither_the_answer_nor_the_status(
    stderr: str, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    place = os.open(FULL, os.O_WRONLY) if stderr == FULL else os.dup(writing)
    done = subprocess.run(
        [sys.executable, "-m", "culm", "run", "--budget", "nonsense", "hello"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=place,
        timeout=2 * WAIT_S,
        check=False,
    )
    os.close(place)
    os.close(writing)
    assert done.returncode == 2


def test_a_reader_who_has_left_is_told_by_the_status_of_a_closed_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, redirect_stdout(stream):
        with pytest.raises(CannotWrite) as found:
            TextRenderer().text(MessageId("m"), "hello")
        assert let_go(found.value) == 141
    assert capsys.readouterr() == ("", "culm: nobody reads the answer any more\n")


def test_a_list_into_a_full_disk_is_an_error_in_one_line(desk: Desk) -> None:
    with Path(FULL).open("w") as stream, redirect_stdout(stream):
        said = desk.culm("agent", "list", "--json")
    assert said == Said(1, "", "culm: cannot write: No space left on device\n")


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "57")
    assert output_width() == 0
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal):
        width = output_width()
    assert width == 57


def test_what_is_said_of_a_failure_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write_note("culm: a\x1b[2Jb\u202ec\nhint: d\re")
    assert capsys.readouterr().err == "culm: a\\x1b[2Jb\\u202ec\nhint: d\\re\n"


def test_a_stdin_that_cannot_be_read_is_wrong_usage(tmp_path: Path) -> None:
    with (tmp_path / "written").open("w") as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "culm", "run", "hello"],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "culm: cannot read stdin: Bad file descriptor\n"
