"""What stands on the screen while something is drawn below what is printed, and after it."""

import asyncio
import fcntl
import io
import pty
import struct
import sys
import termios
from contextlib import nullcontext

import pytest
from examples.recording.screen import Screen, Style
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.status_area import StatusArea, find_region, redraw_until_done
from culm.cli.terminal.status_lines import AgentStatus, RunStatus
from culm.cli.terminal.streams import CannotWrite
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
        self.screen.feed(text.replace("\n", "\r\n"))  # As the terminal's driver does.
        return len(text)

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.rows

    def lines(self) -> list[str]:
        return self.screen.lines()

    def face(self, patch: pytest.MonkeyPatch) -> TextRenderer:
        """One that prints here, and draws below it."""
        patch.setattr(sys, "stdout", self)
        patch.setattr(sys, "stderr", self)
        return TextRenderer(region=region_of(self))


def region_of(tty: Tty, *, has_colour: bool = False) -> StatusArea:
    return StatusArea(tty, tty.size, has_colour=has_colour)


def test_what_is_drawn_takes_the_place_of_what_was() -> None:
    tty = Tty()
    region = region_of(tty)
    tty.write("before\n")
    region.draw(["one long line", "two", "three"])
    assert tty.lines() == ["before", "one long line", "two", "three"]
    region.draw(["1", "2"])
    assert tty.lines() == ["before", "1", "2"]
    region.erase()
    region.erase()
    assert tty.lines() == ["before"]
    tty.write("after\n")
    assert tty.screen.all_lines() == ["before", "after"]


def test_at_the_bottom_of_the_screen_nothing_that_was_printed_is_lost() -> None:
    tty = Tty(rows=4)
    region = region_of(tty)
    for number in range(20):
        tty.write(f"{number}\n")
        region.draw(["a", "b", "c", "d", "e"])
        assert tty.lines()[-3:] == ["a", "b", "c"]
        region.erase()
    assert tty.screen.all_lines() == [str(number) for number in range(20)]


@given(
    st.lists(
        st.integers(0, 9).map(str) | st.lists(st.sampled_from(["a", "漢" * 9, ""]), max_size=9)
    ),
    st.integers(1, 6),
)
def test_whatever_is_drawn_in_between_what_was_printed_is_what_is_left(
    steps: list[str | list[str]], rows: int
) -> None:
    tty, plain = Tty(20, rows), Screen(20, rows)
    region = region_of(tty)
    for step in steps:
        if isinstance(step, str):
            region.erase()
            tty.write(f"{step}\n")
            plain.feed(f"{step}\r\n")
        else:
            region.draw(step)
    region.erase()
    assert [line for line in tty.screen.all_lines() if line] == plain.all_lines()
    assert tty.screen.column == 0


def test_a_terminal_that_was_made_smaller_keeps_nothing_of_it() -> None:
    tty = Tty(60, 8)
    region = region_of(tty)
    tty.write("before\n")
    for columns, rows in ((60, 8), (12, 8), (12, 3), (70, 20), (1, 1)):
        tty.screen.resize(columns, rows)
        region.show(BUSY)
        assert len(tty.lines()) <= rows
        assert tty.screen.column == 0
    tty.screen.resize(60, 8)
    region.erase()
    assert "".join(tty.screen.all_lines()) == "before"


def test_lines_are_dim_if_colour_is_welcome() -> None:
    for has_colour in (True, False):
        tty = Tty()
        region_of(tty, has_colour=has_colour).draw(["x"])
        tty.write("y")
        assert tty.screen.cells()[0][0] == ("y", Style())
        region_of(tty, has_colour=has_colour).draw(["x"])
        assert tty.screen.cells()[0][0] == ("x", Style(dim=has_colour))


def test_a_terminal_that_knows_few_signs_gets_no_longer_lines() -> None:
    tty = Tty()
    tty.encoding = "ascii"
    region_of(tty).draw(["⠋ 漢 …"])
    assert tty.lines() == ["? ? ?"]


@pytest.mark.parametrize(
    ("environ", "is_there"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_there_is_one_where_the_terminal_can_do_it(
    environ: dict[str, str], *, is_there: bool
) -> None:
    assert (find_region(Tty(), environ) is not None) == is_there
    assert find_region(io.StringIO(), environ) is None


@pytest.mark.parametrize(("no_colour", "is_dim"), [("", True), ("1", False)])
def test_a_real_terminal_is_asked_for_its_size(no_colour: str, *, is_dim: bool) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream, open(ours, "rb", buffering=0) as shown:  # noqa: PTH123
        region = find_region(stream, {"TERM": "xterm", "NO_COLOR": no_colour})
        assert region is not None
        for columns, first in ((17, "⠋ 0 s · writes"), (60, DRAWN[0])):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 9, columns, 0, 0))
            region.show(BUSY)
            screen = Screen(columns, 9)
            screen.feed(shown.read(4096))
            assert screen.lines()[0] == first
            assert screen.cells()[0][0][1].dim == is_dim


# --- with the face that prints above it


def test_it_is_erased_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = Tty()
    face = tty.face(monkeypatch)
    steps = [
        lambda: face.note("→ view a"),
        lambda: face.text(MESSAGE, "Hello.\n"),
        lambda: face.agent(Agent(AgentId("a"), "", SessionId("s"), name="one")).note("hi"),
    ]
    printed = ["→ view a", "Hello.", "[one] hi"]
    for number, step in enumerate(steps, 1):
        face.draw(BUSY)
        assert tty.lines() == [*printed[: number - 1], *DRAWN]
        step()
        assert tty.lines() == printed[:number]
    face.draw(BUSY)
    face.erase()
    assert tty.screen.all_lines() == printed


def test_nothing_is_drawn_behind_a_begun_line_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = Tty()
    face = tty.face(monkeypatch)
    face.draw(BUSY)
    face.text(MESSAGE, "Hel")
    face.draw(BUSY)
    assert tty.lines() == ["Hel"]
    face.text(MESSAGE, "lo.\n")
    face.draw(BUSY)
    assert tty.lines() == ["Hello.", *DRAWN]


def test_an_answer_that_goes_elsewhere_is_no_reason_not_to_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = Tty()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    face = TextRenderer(region=region_of(tty))
    face.text(MESSAGE, "Hel")
    face.draw(BUSY)
    assert tty.lines() == DRAWN


def test_nothing_is_drawn_where_a_person_types(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = Tty()
    face = tty.face(monkeypatch)
    face.draw(BUSY)
    face.prompt("allow it? ")
    face.draw(BUSY)
    assert tty.lines() == ["allow it?"]
    face.note("meanwhile")
    face.draw(BUSY)  # The prompt is above, and its answer is still awaited.
    assert tty.lines() == ["allow it?", "meanwhile"]
    face.close_prompt()
    face.draw(BUSY)
    assert tty.lines() == ["allow it?", "meanwhile", *DRAWN]


# --- again and again


class Looked(Exception):
    """Whoever looks has failed."""


@pytest.mark.parametrize("way", ["stop", "cancel", "fail"])
async def test_however_it_ends_nothing_is_left(way: str) -> None:
    tty, stop = Tty(), asyncio.Event()
    face = TextRenderer(region=region_of(tty))
    looks = 0

    def look() -> RunStatus:
        nonlocal looks
        looks += 1
        if looks == 3:
            assert tty.lines() == DRAWN
            if way == "fail":
                raise Looked
            stop.set() if way == "stop" else task.cancel()
        return BUSY

    async with asyncio.timeout(WAIT_S):
        with pytest.RaisesGroup(Looked) if way == "fail" else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(redraw_until_done(face, look, stop), name="draw")
    assert (looks, tty.lines(), tty.screen.column) == (3, [], 0)


class Gone(Tty):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "gone")


def test_a_terminal_that_is_gone_is_told_as_other_streams_are() -> None:
    region = region_of(Gone())
    with pytest.raises(CannotWrite):
        region.draw(["x"])
