"""The screen while the status area is drawn and after it, and the lines of a status."""

import asyncio
import fcntl
import io
import pty
import struct
import sys
import termios
import unicodedata
from contextlib import nullcontext

import pytest
from examples.recording.screen import Screen, Style
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.renderers import TextRenderer
from culm.cli.render.text import cells_of, fit
from culm.cli.terminal.process import CannotWrite
from culm.cli.terminal.status_area import (
    AGENTS_MAX,
    AgentStatus,
    RunStatus,
    StatusArea,
    elapsed_text,
    find_status_area,
    redraw_until_done,
    status_lines,
)
from culm.ids import AgentId, MessageId, SessionId
from culm.wire.agents import Agent
from tests.support import WAIT_S

MESSAGE = MessageId("m")
BUSY = RunStatus(model="p/m", state="writes", agents=[AgentStatus("one", "starts")])
DRAWN = ["⠋ 0 s · p/m · writes", "  one · starts"]


class Tty(io.StringIO):
    """Both streams of a program on one terminal."""

    encoding = "utf-8"

    def __init__(self, columns: int = 60, rows: int = 8) -> None:
        super().__init__()
        self.screen = Screen(columns, rows)

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.screen.feed(text.replace("\n", "\r\n"))  # The terminal driver does the same.
        return len(text)

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.rows

    def lines(self) -> list[str]:
        return self.screen.lines()

    def renderer(self, patch: pytest.MonkeyPatch) -> TextRenderer:
        """A renderer that prints here and draws the status area below."""
        patch.setattr(sys, "stdout", self)
        patch.setattr(sys, "stderr", self)
        return TextRenderer(status_area=status_area_of(self))


def status_area_of(tty: Tty, *, has_color: bool = False) -> StatusArea:
    return StatusArea(tty, tty.size, has_color=has_color)


def test_drawing_replaces_the_previous_lines() -> None:
    tty = Tty()
    area = status_area_of(tty)
    tty.write("before\n")
    area.draw(["one long line", "two", "three"])
    assert tty.lines() == ["before", "one long line", "two", "three"]
    area.draw(["1", "2"])
    assert tty.lines() == ["before", "1", "2"]
    area.erase()
    area.erase()
    assert tty.lines() == ["before"]
    tty.write("after\n")
    assert tty.screen.all_lines() == ["before", "after"]


def test_drawing_at_the_bottom_keeps_all_printed_lines() -> None:
    tty = Tty(rows=4)
    area = status_area_of(tty)
    for number in range(20):
        tty.write(f"{number}\n")
        area.draw(["a", "b", "c", "d", "e"])
        assert tty.lines()[-3:] == ["a", "b", "c"]
        area.erase()
    assert tty.screen.all_lines() == [str(number) for number in range(20)]


@given(
    st.lists(
        st.integers(0, 9).map(str) | st.lists(st.sampled_from(["a", "漢" * 9, ""]), max_size=9)
    ),
    st.integers(1, 6),
)
def test_only_printed_lines_remain_after_any_drawing(
    steps: list[str | list[str]], rows: int
) -> None:
    tty, plain = Tty(20, rows), Screen(20, rows)
    area = status_area_of(tty)
    for step in steps:
        if isinstance(step, str):
            area.erase()
            tty.write(f"{step}\n")
            plain.feed(f"{step}\r\n")
        else:
            area.draw(step)
    area.erase()
    assert [line for line in tty.screen.all_lines() if line] == plain.all_lines()
    assert tty.screen.column == 0


def test_resized_terminal_keeps_no_drawn_lines() -> None:
    tty = Tty(60, 8)
    area = status_area_of(tty)
    tty.write("before\n")
    for columns, rows in ((60, 8), (12, 8), (12, 3), (70, 20), (1, 1)):
        tty.screen.resize(columns, rows)
        area.show(BUSY)
        assert len(tty.lines()) <= rows
        assert tty.screen.column == 0
    tty.screen.resize(60, 8)
    area.erase()
    assert "".join(tty.screen.all_lines()) == "before"


def test_lines_are_dim_if_color_is_enabled() -> None:
    for has_color in (True, False):
        tty = Tty()
        status_area_of(tty, has_color=has_color).draw(["x"])
        tty.write("y")
        assert tty.screen.cells()[0][0] == ("y", Style())
        status_area_of(tty, has_color=has_color).draw(["x"])
        assert tty.screen.cells()[0][0] == ("x", Style(dim=has_color))


def test_unencodable_characters_become_question_marks() -> None:
    tty = Tty()
    tty.encoding = "ascii"
    status_area_of(tty).draw(["⠋ 漢 …"])
    assert tty.lines() == ["? ? ?"]


@pytest.mark.parametrize(
    ("environ", "exists"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_status_area_exists_only_on_a_capable_terminal(
    environ: dict[str, str], *, exists: bool
) -> None:
    assert (find_status_area(Tty(), environ) is not None) == exists
    assert find_status_area(io.StringIO(), environ) is None


@pytest.mark.parametrize(("no_colour", "is_dim"), [("", True), ("1", False)])
def test_status_area_follows_the_size_of_a_real_terminal(no_colour: str, *, is_dim: bool) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream, open(ours, "rb", buffering=0) as shown:  # noqa: PTH123
        area = find_status_area(stream, {"TERM": "xterm", "NO_COLOR": no_colour})
        assert area is not None
        for columns, first in ((17, "⠋ 0 s · writes"), (60, DRAWN[0])):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 9, columns, 0, 0))
            area.show(BUSY)
            screen = Screen(columns, 9)
            screen.feed(shown.read(4096))
            assert screen.lines()[0] == first
            assert screen.cells()[0][0][1].dim == is_dim


# --- with the renderer that prints above it


def test_status_area_is_erased_before_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = Tty()
    renderer = tty.renderer(monkeypatch)
    steps = [
        lambda: renderer.note("→ view a"),
        lambda: renderer.text(MESSAGE, "Hello.\n"),
        lambda: renderer.agent(Agent(AgentId("a"), "", SessionId("s"), name="one")).note("hi"),
    ]
    printed = ["→ view a", "Hello.", "[one] hi"]
    for number, step in enumerate(steps, 1):
        renderer.draw(BUSY)
        assert tty.lines() == [*printed[: number - 1], *DRAWN]
        step()
        assert tty.lines() == printed[:number]
    renderer.draw(BUSY)
    renderer.erase()
    assert tty.screen.all_lines() == printed


def test_nothing_is_drawn_after_an_unfinished_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = Tty()
    renderer = tty.renderer(monkeypatch)
    renderer.draw(BUSY)
    renderer.text(MESSAGE, "Hel")
    renderer.draw(BUSY)
    assert tty.lines() == ["Hel"]
    renderer.text(MESSAGE, "lo.\n")
    renderer.draw(BUSY)
    assert tty.lines() == ["Hello.", *DRAWN]


def test_unfinished_line_on_a_redirected_stdout_does_not_stop_drawing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = Tty()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    renderer = TextRenderer(status_area=status_area_of(tty))
    renderer.text(MESSAGE, "Hel")
    renderer.draw(BUSY)
    assert tty.lines() == DRAWN


def test_nothing_is_drawn_while_a_prompt_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = Tty()
    renderer = tty.renderer(monkeypatch)
    renderer.draw(BUSY)
    renderer.prompt("allow it? ")
    renderer.draw(BUSY)
    assert tty.lines() == ["allow it?"]
    renderer.note("meanwhile")
    renderer.draw(BUSY)  # The prompt above is still unanswered.
    assert tty.lines() == ["allow it?", "meanwhile"]
    renderer.close_prompt()
    renderer.draw(BUSY)
    assert tty.lines() == ["allow it?", "meanwhile", *DRAWN]


# --- redrawing


class StatusFailed(Exception):
    """The status callback failed."""


@pytest.mark.parametrize("way", ["stop", "cancel", "fail"])
async def test_status_area_is_erased_on_stop_cancel_and_failure(way: str) -> None:
    tty, stop = Tty(), asyncio.Event()
    renderer = TextRenderer(status_area=status_area_of(tty))
    calls = 0

    def get_status() -> RunStatus:
        nonlocal calls
        calls += 1
        if calls == 3:
            assert tty.lines() == DRAWN
            if way == "fail":
                raise StatusFailed
            stop.set() if way == "stop" else task.cancel()
        return BUSY

    async with asyncio.timeout(WAIT_S):
        with pytest.RaisesGroup(StatusFailed) if way == "fail" else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(redraw_until_done(renderer, get_status, stop), name="draw")
    assert (calls, tty.lines(), tty.screen.column) == (3, [], 0)


class ClosedTty(Tty):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "gone")


def test_closed_terminal_raises_cannot_write() -> None:
    area = status_area_of(ClosedTty())
    with pytest.raises(CannotWrite):
        area.draw(["x"])


# --- the lines of a status

TREE = RunStatus(
    model="anthropic/claude-sonnet-4-5",
    elapsed_s=12.3,
    tokens=1366,
    cost=0.0123,
    calls=["bash make test", "view garden.py"],
    agents=[
        AgentStatus("read README.md", "view README.md", 236, 0.001),
        AgentStatus("edit garden.py", "asks the model", 549, 0.002, depth=1),
    ],
)


@pytest.mark.parametrize(
    ("cells_max", "lines"),
    [
        (
            100,
            [
                "⠸ 12 s · anthropic/claude-sonnet-4-5 · 1,366 tokens, $0.0123 "
                "· bash make test, view garden.py",
                "  read README.md · 236 tokens, $0.0010 · view README.md",
                "    edit garden.py · 549 tokens, $0.0020 · asks the model",
            ],
        ),
        (
            80,
            [
                "⠸ 12 s · anthropic/claude-sonnet-4-5 · 1,366 tokens, $0.0123 · bash make test,…",
                "  read README.md · 236 tokens, $0.0010 · view README.md",
                "    edit garden.py · 549 tokens, $0.0020 · asks the model",
            ],
        ),
        (
            40,
            [
                "⠸ 12 s · bash make test, view garden.py",
                "  read README.md · view README.md",
                "    edit garden.py · asks the model",
            ],
        ),
        (20, ["⠸ 12 s · bash make…", "  read README.md ·…", "    edit garden.py…"]),
        (1, ["…", "…", "…"]),
        (0, ["", "", ""]),
    ],
)
def test_narrow_status_line_keeps_the_current_calls(cells_max: int, lines: list[str]) -> None:
    assert status_lines(TREE, cells_max) == lines


def test_empty_status_shows_spinner_and_elapsed_time() -> None:
    assert status_lines(RunStatus(state="asks the model"), 40) == ["⠋ 0 s · asks the model"]
    assert status_lines(RunStatus(), 40) == ["⠋ 0 s"]


def test_agents_beyond_the_limit_are_counted() -> None:
    agents = [AgentStatus(f"a{number}", "starts") for number in range(AGENTS_MAX + 1234)]
    lines = status_lines(RunStatus(agents=agents), 40)
    assert len(lines) == 1 + AGENTS_MAX + 1
    assert lines[-1] == "  … and 1,234 more"
    assert len(status_lines(RunStatus(agents=agents[:AGENTS_MAX]), 40)) == 1 + AGENTS_MAX


def test_wide_characters_count_two_and_are_not_split() -> None:
    status = RunStatus(calls=["漢字漢字漢字漢字"], agents=[AgentStatus("木" * 20, "走る")])
    assert status_lines(status, 17) == ["⠋ 0 s · 漢字漢字…", "  木木木木木木木…"]


def test_control_characters_in_status_lines_are_removed() -> None:
    evil = "\x1b[2J\x07a\r\nb\x9b31m\u202ec\td"
    status = RunStatus(model=f"p/{evil}", calls=[evil], agents=[AgentStatus(evil, evil)])
    for line in status_lines(status, 200):
        assert line.isprintable(), line
        assert "b" in line


HOSTILE = st.text(
    st.characters() | st.sampled_from("漢\u0301\ufe0f\u200d🇩🇪👩\x1b\r\n\t…"), max_size=50
)


@given(HOSTILE, HOSTILE, st.integers(0, 90), st.integers(0, 5))
def test_status_line_is_never_wider_than_the_limit(
    name: str, what: str, cells_max: int, depth: int
) -> None:
    agent = AgentStatus(name, what, 1, depth=depth)
    for line in status_lines(RunStatus(name, 1, 2, 3, [what], agents=[agent]), cells_max):
        assert cells_of(line) <= cells_max
        assert not any(unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") for one in line)


@given(HOSTILE, st.integers(0, 60))
def test_text_that_fits_is_not_cut(text: str, cells_max: int) -> None:
    kept = fit(text, cells_max)
    assert kept == text if cells_of(text) <= cells_max else text.startswith(kept[:-1])


@pytest.mark.parametrize(
    ("elapsed_s", "text"), [(0.9, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_elapsed_time_is_formatted_with_units(elapsed_s: float, text: str) -> None:
    assert elapsed_text(elapsed_s) == text
