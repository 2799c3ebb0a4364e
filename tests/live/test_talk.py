"""`culm` without a command: an interactive session at a real terminal."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from examples.recording.screen import Screen
from examples.recording.tape import Keys, Step, play

from tests.live.machine import pid_at
from tests.support import contract

COLUMNS, ROWS = 60, 40
CULM = f"{sys.executable} -m culm"


@pytest.fixture
def project(folder: Path) -> Path:
    project = folder / "project"
    project.mkdir()
    (project / "plums.txt").write_text("Plums are blue.\n")
    settings = folder / "config" / "culm" / "culm.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"detach_grace_s": 0.2, "linger_s": 0}')
    return project


def environ_of(folder: Path) -> Mapping[str, str]:
    own = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    host = {"CULM_HOST": f"unix://{folder}/s.sock", "CULM_NO_DISCOVERY": "1", "NO_COLOR": "1"}
    return {**os.environ, **own, **host}


def talk(
    folder: Path,
    project: Path,
    *keys: Keys,
    columns: int = COLUMNS,
    env: Mapping[str, str] | None = None,
    on_seen: Callable[[str], None] = lambda seen: None,
) -> list[str]:
    """Return all lines of the screen at the end, with the exit status and the terminal modes."""
    # The shell in between must survive an interrupt that is meant for culm.
    ends = f"trap : INT; {CULM}; echo ended $?; stty -a | grep -o -e '-*icanon' -e ' -*echo '"
    screen = Screen(columns, ROWS)
    around = {**environ_of(folder), **(env or {})}
    for beat in play([Step(ends, keys, shown="culm")], project, around, columns, ROWS):
        screen.feed(beat.data)
        on_seen("\n".join(screen.lines()))
    return [line.rstrip() for line in screen.all_lines()]


def typed(after: str, text: str) -> Keys:
    return Keys(after, text, pause_s=0.0)


@contract("CLI-7")
def test_interactive_session_handles_files_commands_and_permission(
    folder: Path, project: Path
) -> None:
    lines = talk(
        folder,
        project,
        typed("›", "read @plums.txt\r"),
        typed("Plums are blue.\n```\n›", "!echo mine; exit 3\r"),
        typed("mine\n(exit status 3)\n›", "run `touch made`\r"),
        typed("[n]o:", "y\r"),
        typed("(no output)\n```\n›", "/sessions\r"),
        typed("Read plums.txt\n›", "/nonsense\r"),
        typed("unknown command; /help lists the commands\n›", "\x04"),
    )
    assert (project / "made").exists()
    assert lines[-4:-1] == ["ended 0", "icanon", " echo"]
    history = folder / "state" / "culm" / "history"
    assert "read @plums.txt" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@contract("CLI-7")
@pytest.mark.parametrize("key", ["\x1b", "\x03"])
def test_escape_or_ctrl_c_cancels_the_run_and_shows_the_next_prompt(
    folder: Path, project: Path, key: str
) -> None:
    lines = talk(
        folder,
        project,
        typed("›", "run `sleep 77`\r"),
        typed("· bash sleep 77", key),
        typed("culm: canceled\n›", "\x03"),
        typed("(press Ctrl-D to leave)\n›", "/quit\r"),
    )
    assert "(canceling; interrupt again to exit at once)" in lines
    assert lines[-4:-1] == ["ended 0", "icanon", " echo"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_gone_between_two_prompts_is_restarted_by_the_next(
    folder: Path, project: Path, number: signal.Signals
) -> None:
    ended: list[int] = []

    def end(seen: str) -> None:
        if "Plums are blue." in seen and seen.endswith("›") and not ended:
            ended.append(pid_at(folder / "s.sock"))
            os.kill(ended[0], number)

    lines = talk(
        folder,
        project,
        typed("›", "read plums.txt\r"),
        typed("```\n›", "list the files\r"),
        typed("plums.txt\n```\n›", "/quit\r"),
        on_seen=end,
    )
    assert ended
    assert lines[-4:-1] == ["ended 0", "icanon", " echo"]


def test_ascii_terminal_gets_ascii_output(folder: Path, project: Path) -> None:
    lines = talk(
        folder,
        project,
        typed("\n>", "caf\u00e9\r"),
        typed("TODO\n>", "/quit\r"),
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert lines[-4] == "ended 0"


def test_session_resumed_after_ctrl_z_accepts_keys(folder: Path, project: Path) -> None:
    keys = (
        typed("sh>", f"{CULM}; echo ended $?\r"),
        typed("›", "run `sleep 77`\r"),
        typed("· bash sleep 77", "\x1a"),
        typed("Stopped", "stty -a | grep -o -e '-*icanon'; fg\r"),
        typed("· bash sleep 77", "\x1b"),
        typed("culm: canceled\n›", "/quit\r"),
        typed("sh>", "exit\r"),
    )
    around = {**environ_of(folder), "PS1": "sh>"}
    shell = Step("bash --norc --noprofile -i", keys)
    beats = list(play([shell], project, around, COLUMNS, ROWS))
    assert b"(canceling; interrupt again to exit at once)" in b"".join(beat.data for beat in beats)


def test_pasted_lines_are_one_prompt(folder: Path, project: Path) -> None:
    keys = (
        typed("›", "\x1b[200~list\nthe files\n!touch made\x1b[201~"),
        typed("!touch made", "\r"),
        typed("plums.txt\n```\n›", "/quit\r"),
    )
    beats = list(play([Step(CULM, keys)], project, environ_of(folder), COLUMNS, ROWS))
    # A terminal brackets pasted text only if this is enabled.
    assert b"\x1b[?2004h" in b"".join(beat.data for beat in beats)
    assert not (project / "made").exists()


def test_output_at_forty_columns_is_complete(folder: Path, project: Path) -> None:
    lines = talk(
        folder,
        project,
        typed("›", "list the files\r"),
        typed("plums.txt\n```\n›", "/quit\r"),
        columns=40,
    )
    assert "  plums.txt" in lines
    assert lines[-4] == "ended 0"


def test_without_a_terminal_the_usage_is_printed(folder: Path, project: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "culm"],
        cwd=project,
        env=environ_of(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "Example:" in done.stdout
