"""The status area of a run on a real terminal, and its removal."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.recording.screen import Screen
from examples.recording.tape import Keys, Step, play

from tests.live.machine import pid_at

SPINNING = tuple("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
COLUMNS, ROWS = 50, 12
AGENTS = "Have one agent run `sleep 1`, and another run `sleep 2; echo 漢字漢字漢字漢字漢字漢字`"


def run_on_terminal(folder: Path, options: str, prompt: str, *keys: Keys) -> Iterator[Screen]:
    """Yield the screen after each output."""
    project = folder / "project"
    project.mkdir()
    command = f"{sys.executable} -m culm run --host unix://{folder}/s.sock {options} '{prompt}'"
    kinds = ("CONFIG", "DATA", "STATE")
    own = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in kinds}
    (folder / "config" / "culm").mkdir(parents=True)
    settings = folder / "config" / "culm" / "culm.json"
    settings.write_text('{"detach_grace_s": 0.2, "linger_s": 0}')
    environ = {**os.environ, **own, "CULM_NO_DISCOVERY": "1", "NO_COLOR": "1"}
    screen = Screen(COLUMNS, ROWS)
    for beat in play([Step(command, keys, shown="run")], project, environ, COLUMNS, ROWS):
        screen.feed(beat.data)
        yield screen


def drawn_on(screen: Screen) -> list[str]:
    """Return the lines from the cursor on."""
    return screen.lines()[screen.row :]


def test_status_area_lists_working_agents_and_is_removed_at_the_end(folder: Path) -> None:
    drawn: list[list[str]] = []
    last: list[str] = []
    for screen in run_on_terminal(folder, "--approve auto", AGENTS):
        if (lines := drawn_on(screen)) and lines[0].startswith(SPINNING):
            drawn.append([line[2:] if n == 0 else line for n, line in enumerate(lines)])
        last = screen.all_lines()
    assert any(
        [line.split(" · ")[0].strip() for line in lines[1:]]
        == ["run sleep 1", "run sleep 2; echo 漢…"]
        for lines in drawn
    )
    assert max(map(len, drawn)) == 3
    assert not [line for line in last if line.startswith(SPINNING) or "sleep 1 ·" in line]
    assert last[-2].startswith("tree: 3 agents, ")


CANCELING = "(canceling; interrupt again to exit at once)"


def assert_status_area_removed(lines: list[str]) -> None:
    assert not [line for line in lines if any(sign in line for sign in SPINNING)]
    assert [line for line in lines if CANCELING in line]


def test_ctrl_c_removes_the_status_area(folder: Path) -> None:
    last: list[str] = []
    keys = Keys("1 s · ", "\x03")
    for screen in run_on_terminal(folder, "--approve auto", "Run `sleep 30`", keys):
        last = screen.all_lines()
    assert_status_area_removed(last)


def test_second_ctrl_c_before_the_cancel_is_done_removes_the_status_area(folder: Path) -> None:
    """The server is stopped, so that the cancel cannot be done before the second Ctrl-C."""
    last: list[str] = []
    server = 0
    keys = Keys("1 s · ", "\x03"), Keys("interrupt again", "\x03", pause_s=0.0)
    try:
        for screen in run_on_terminal(folder, "--approve auto", "Run `sleep 30`", *keys):
            last = screen.all_lines()
            if not server and any("1 s · " in line for line in last):
                server = pid_at(folder / "s.sock")
                os.kill(server, signal.SIGSTOP)
    finally:
        if server:
            os.kill(server, signal.SIGTERM)
            os.kill(server, signal.SIGCONT)
    assert_status_area_removed(last)
