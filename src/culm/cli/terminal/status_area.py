"""The status area: the current activity of a run on the last lines of a terminal.

The lines are redrawn in place, and erased before anything else is printed. The cursor stays at
their beginning, so that everything drawn is below it: when a terminal is made narrower it wraps
those lines, and they are still erased completely.

The values come from the client's mirror, which drops agents that have ended, and a session has the
tokens of its latest step only; `UsageSummary` adds up both as they change.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TextIO

from msgspec import Struct

from culm.cli.render.call_lines import KnownTools, call_line
from culm.cli.render.text import cells_of, fit, head_of, label_of, used_text
from culm.cli.terminal.process import write
from culm.client.mirror import Mirror
from culm.client.tree import AgentBranch, SessionTree
from culm.ids import AgentId, RunId, SessionId
from culm.wire.codec import printable
from culm.wire.messages import (
    Message,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
    is_finished,
)

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


class AgentStatus(Struct, frozen=True):
    """A running agent."""

    label: str
    activity: str  # Its running call, or the reason why it waits.
    tokens: int = 0  # Tokens and cost include all agents below it.
    cost: float = 0.0
    depth: int = 0


class RunStatus(Struct, frozen=True):
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


# --- the status of a run


_WAITS = {
    "slot": "waits until others have ended",
    "ask": "waits for permission",
    "question": "waits for an answer",
    "agents": "waits for its agents",
}


class UsageSummary:
    """Counts from its creation on. Call `count` after every event, before it is shown."""

    def __init__(
        self, tree: SessionTree, run_id: RunId, started_s: float, tools: KnownTools
    ) -> None:
        self._tools = tools
        self._tree = tree
        self._run_id = run_id
        self._started_s = started_s
        self._step = self._step_now()
        self._step_tokens = 0  # Tokens of the run's own steps.
        self._cost_before = self._cost_now()
        self._first: dict[AgentId, int] = {}  # Tokens of its direct sub-agents at first ...
        self._last: dict[AgentId, int] = {}  # ... and now, both including all agents below them.
        self._labels: dict[AgentId, str] = {}

    def count(self) -> None:
        """Add the usage since the last call."""
        step = self._step_now()
        if step != self._step:
            self._step = step
            self._step_tokens += sum(step)
        for branch in self._tree.branches.values():
            agent = branch.agent
            if agent.agent_id not in self._labels:
                self._labels[agent.agent_id] = label_of(agent, self._labels.values())
            if agent.parent_session_id == self._tree.top:
                self._first.setdefault(agent.agent_id, agent.tokens)
                self._last[agent.agent_id] = agent.tokens

    def status(self, now_s: float) -> RunStatus:
        """The activity and usage of the whole tree now."""
        self.count()
        answer = _latest_answer(self._tree)
        calls = [call_text(call, self._tools) for call in running_calls(self._tree)]
        return RunStatus(
            model="/".join(filter(None, (answer.provider, answer.model))) if answer else "",
            elapsed_s=max(now_s - self._started_s, 0.0),
            tokens=self._step_tokens + sum(self._last.values()) - sum(self._first.values()),
            # The cost of a session includes that of its agents.
            cost=max(self._cost_now() - self._cost_before, 0.0),
            calls=calls if self._has_begun() else [],
            state=_model_activity(self._tree) if self._has_begun() else "waits for its turn",
            agents=list(self._agents()),
        )

    def _agents(self) -> Iterator[AgentStatus]:
        """The running agents, parents before children."""
        top, branches = self._tree.top, self._tree.branches
        below: dict[SessionId, list[AgentBranch]] = {}
        for branch in branches.values():
            # An agent whose parent is unknown here is shown directly below the run.
            above = SessionId(branch.agent.parent_session_id)
            below.setdefault(above if above in branches else top, []).append(branch)
        left = [(branch, 0) for branch in reversed(below.get(top, ()))]
        while left:
            branch, depth = left.pop()
            agent = branch.agent
            if agent.state != "ended":
                label = self._labels[agent.agent_id]
                yield AgentStatus(
                    label, activity_of(branch, self._tools), agent.tokens, agent.cost, depth
                )
            left += [(one, depth + 1) for one in reversed(below.get(agent.session_id, ()))]

    def _has_begun(self) -> bool:
        run = self._tree.runs.get(self._run_id)
        return run is None or run.state not in ("accepted", "queued")

    def _step_now(self) -> tuple[int, int]:
        session = self._tree.sessions.get(self._tree.top)
        return (session.prompt_tokens, session.completion_tokens) if session else (0, 0)

    def _cost_now(self) -> float:
        session = self._tree.sessions.get(self._tree.top)
        return session.cost if session else 0.0


def activity_of(branch: AgentBranch, tools: KnownTools) -> str:
    """A short text for the current activity of an agent."""
    if branch.agent.state == "pending":
        return "starts"
    if branch.agent.waiting_for in ("ask", "question", "slot"):
        return _WAITS[branch.agent.waiting_for]
    if calls := running_calls(branch.mirror):
        return ", ".join(call_text(call, tools) for call in calls)
    return _WAITS.get(branch.agent.waiting_for) or _model_activity(branch.mirror)


def running_calls(mirror: Mirror) -> list[ToolCall]:
    """The complete calls of the latest answer that have no result."""
    answered: set[str] = set()
    for message in reversed(mirror.messages.values()):
        answered.update(p.data.tool_call_id for p in message.parts if isinstance(p, ToolResultPart))
        if _is_answer(message):
            calls = [part.data for part in message.parts if isinstance(part, ToolCallPart)]
            return [call for call in calls if call.finished and call.id not in answered]
    return []


def call_text(call: ToolCall, tools: KnownTools) -> str:
    tool = tools.get(call.name)
    if tool is not None and tool.kind == "agent":
        return call.name  # Its agents have lines of their own below.
    return call_line(call, tools).removeprefix("→ ")


def _model_activity(mirror: Mirror) -> str:
    """A short text for the activity of a model without running calls."""
    answer = _latest_answer(mirror)
    if answer is None or is_finished(answer.parts):
        return "asks the model"
    is_thinking = not answer.parts or isinstance(answer.parts[-1], ReasoningPart)
    return "thinks" if is_thinking else "writes"


def _latest_answer(mirror: Mirror) -> Message | None:
    """The latest answer, complete or not."""
    return next(filter(_is_answer, reversed(mirror.messages.values())), None)


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.is_summary_message
