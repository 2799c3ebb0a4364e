"""The status area: the current activity of a run on the last lines of a terminal.

The lines are redrawn in place, and erased before anything else is printed. The cursor stays at
their beginning, so that everything drawn is below it: when a terminal is made narrower it wraps
those lines, and they are still erased completely. The values come from `usage_summary.py`.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from culm.cli.render.agent_lines import used_text
from culm.cli.render.text import cells_of, fit, head_of
from culm.cli.terminal.process import write
from culm.wire.codec import printable

DRAW_S = 0.1  # Ten times a second looks alive and costs a slow connection at most 10 KB/s.
AGENTS_MAX = 8  # Further agents are only counted: the area is for a glance.
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURNS_PER_S = 10  # The spinner moves with every redraw.
ACTIVITY_CELLS = 16  # Minimum for the activity, enough to recognize a tool; numbers give way to it.
INDENT = "  "
_BETWEEN = " · "
_END_OF_LINE, _BELOW = "\x1b[K", "\x1b[J"  # Erase to the end of the line, and everything below.
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Size = tuple[int, int]  # Columns and rows.


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """A running agent."""

    label: str
    activity: str  # Its running call, or the reason why it waits.
    tokens: int = 0  # Tokens and cost include all agents below it.
    cost: float = 0.0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run and its sub-agents, parents before children."""

    model: str = ""  # As provider/model; empty before a model has started to answer.
    elapsed_s: float = 0.0
    tokens: int = 0  # Tokens and cost are those of the whole tree.
    cost: float = 0.0
    calls: Sequence[str] = ()  # The running calls.
    state: str = ""  # The activity when no call is running.
    agents: Sequence[AgentStatus] = ()


class StatusArea:
    """Lines below the printed output. Erase them before printing anything else."""

    def __init__(
        self, stream: TextIO, size: Callable[[], Size], *, has_color: bool = False
    ) -> None:
        self._stream = stream
        self._size = size
        self._has_color = has_color
        self._is_drawn = False

    def show(self, status: RunStatus) -> None:
        """Draw a status for the current width of the terminal."""
        self.draw(status_lines(status, self._size()[0] - 1))

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the drawn lines, starting at the cursor, which must be in column 0.

        Every line must be narrower than the terminal: terminals differ in the position of the
        cursor after a full line.
        """
        shown = lines[: max(self._size()[1] - 1, 1)]  # The cursor cannot move above the screen.
        if not shown:
            self.erase()
            return
        text = f"{_END_OF_LINE}\r\n".join(map(self._styled, shown))
        back = f"\x1b[{len(shown) - 1}A" if len(shown) > 1 else ""
        self._is_drawn = True
        write(self._stream, f"\r{text}{_BELOW}{back}\r")

    def erase(self) -> None:
        """Erase the lines and leave the cursor at their beginning."""
        if self._is_drawn:
            self._is_drawn = False
            write(self._stream, f"\r{_BELOW}")

    def _styled(self, line: str) -> str:
        # The replacement of a character that cannot be encoded is never wider than the character.
        encoding = self._stream.encoding or "ascii"
        known = line.encode(encoding, "replace").decode(encoding)
        return f"{_DIM}{known}{_PLAIN}" if self._has_color else known


def find_status_area(stream: TextIO, environ: Mapping[str, str]) -> StatusArea | None:
    """The status area of a terminal; None if the stream cannot be redrawn in place."""
    if not stream.isatty() or environ.get("TERM", "") in ("", "dumb"):
        return None

    def size() -> Size:
        with suppress(OSError):  # It was closed, so nobody looks.
            columns, rows = os.get_terminal_size(stream.fileno())
            if columns and rows:  # Both are 0 if the size of the terminal was never set.
                return columns, rows
        return 80, 24

    return StatusArea(stream, size, has_color=not environ.get("NO_COLOR"))


class StatusRenderer(Protocol):
    """A renderer that prints on the same terminal and knows when the area can be drawn."""

    def draw(self, status: RunStatus) -> None: ...
    def erase(self) -> None: ...


async def redraw_until_done(
    renderer: StatusRenderer, current_status: Callable[[], RunStatus], stop: asyncio.Event
) -> None:
    """Draw the current status until `stop` is set or the task is canceled, then erase it."""
    try:
        while not stop.is_set():
            renderer.draw(current_status())
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAW_S):
                    await stop.wait()
    finally:
        renderer.erase()


def status_lines(status: RunStatus, cells_max: int) -> list[str]:
    """One line for the run and one for each agent, without control characters."""
    shown = status.agents[:AGENTS_MAX]
    missing = len(status.agents) - len(shown)
    more = [fit(f"{INDENT}… and {missing:,} more", cells_max)] if missing else []
    return [_run_line(status, cells_max), *(_agent_line(one, cells_max) for one in shown), *more]


def _run_line(status: RunStatus, cells_max: int) -> str:
    turn = SPINNER[int(status.elapsed_s * TURNS_PER_S) % len(SPINNER)]
    start = f"{turn} {elapsed_text(status.elapsed_s)}"
    model = _shown(status.model)
    used = _used(status.tokens, status.cost)
    activity = ", ".join(map(_shown, status.calls)) or _shown(status.state)
    # Where there is little room the provider is left out first, then the model.
    short = model.partition("/")[2] or model
    return _line(start, ([model, *used], [short, *used], used, ()), activity, cells_max)


def _agent_line(agent: AgentStatus, cells_max: int) -> str:
    start = INDENT * (agent.depth + 1) + _shown(agent.label)
    return _line(start, (_used(agent.tokens, agent.cost), ()), _shown(agent.activity), cells_max)


def _line(start: str, details: Sequence[Sequence[str]], activity: str, cells_max: int) -> str:
    """Join with the first of the `details` that leaves room for the activity."""
    line = ""
    for one in details:
        parts = [*filter(None, (start, *one, activity))]
        line = _BETWEEN.join(parts)
        needed = cells_of(line) - max(cells_of(activity) - ACTIVITY_CELLS, 0)
        if needed <= cells_max:
            break
    return fit(line, cells_max)


def elapsed_text(elapsed_s: float) -> str:
    minutes, seconds = divmod(int(elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _used(tokens: int, cost: float) -> list[str]:
    return [used_text(tokens, cost)] if tokens or cost else []


def _shown(text: str) -> str:
    return printable(head_of(text))
