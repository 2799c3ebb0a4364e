"""Standard streams that are closed or full: no socket reuses their numbers; errors are reported."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from culm.cli.commands.agent_call import JsonCallRenderer
from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.process import CannotWrite, close_output, output_width, write_note
from culm.fleet.executor import completed
from culm.ids import MessageId
from tests.cli.conftest import CliHarness, CommandResult
from tests.support import WAIT_S

FULL = "/dev/full"
PROGRAM = """
import os, sys
from culm.cli.terminal.process import replace_closed_streams
replace_closed_streams()
print("seen by nobody", file=sys.stderr, flush=True)
places = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
sys.exit(0 if places == {os.devnull} and os.get_inheritable(1) else 1)
"""


def test_closed_streams_are_replaced_so_no_socket_reuses_them() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM]
    assert subprocess.run(closed, check=False, timeout=2 * WAIT_S).returncode == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda: TextRenderer().text(MessageId("m"), "hello"),
        lambda: JsonRenderer().text(MessageId("m"), "hello"),
        lambda: JsonCallRenderer(TextRenderer()).end(completed("hello")),
    ],
    ids=["plain", "json", "agent"],
)
def test_full_disk_is_reported_with_the_outcome_of_the_run(
    capsys: pytest.CaptureFixture[str], write: Callable[[], None]
) -> None:
    # The unwritten rest is flushed again at the end, as at interpreter exit.
    with Path(FULL).open("w") as stream, redirect_stdout(stream):
        with pytest.raises(CannotWrite) as found:
            write()
        assert close_output(found.value, "the run was canceled") == 1
    expected = "culm: cannot write: No space left on device; the run was canceled\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("stderr", [FULL, "a pipe nobody reads"])
def test_unwritable_stderr_keeps_the_exit_status(stderr: str, tmp_path: Path) -> None:
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


def test_closed_stdout_pipe_exits_with_141(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, redirect_stdout(stream):
        with pytest.raises(CannotWrite) as found:
            TextRenderer().text(MessageId("m"), "hello")
        assert close_output(found.value) == 141
    assert capsys.readouterr() == ("", "culm: the output was closed\n")


def test_list_to_a_full_disk_is_a_one_line_error(cli: CliHarness) -> None:
    with Path(FULL).open("w") as stream, redirect_stdout(stream):
        result = cli.culm("agent", "list", "--json")
    assert result == CommandResult(1, "", "culm: cannot write: No space left on device\n")


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "57")
    assert output_width() == 0
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal):
        width = output_width()
    assert width == 57


def test_control_characters_in_a_failure_note_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_note("culm: a\x1b[2Jb\u202ec\nhint: d\re")
    assert capsys.readouterr().err == "culm: a\\x1b[2Jb\\u202ec\nhint: d\\re\n"


def test_unreadable_stdin_is_a_usage_error(tmp_path: Path) -> None:
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
