"""What goes on just now, as a few lines that are drawn again and again below all that was printed.

Pure, from values to lines: none is wider than told, and nothing in them is obeyed by a terminal.
Where the values come from is `meter.py`, and how lines are drawn `region.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from culm.cli.render.agent_lines import used_text
from culm.cli.render.call_lines import head_of
from culm.cli.render.cells import cells_of, fit
from culm.wire.codec import printable

AGENTS_MAX = 8  # More of them are counted; the printed lines are what is read, this is a glance.
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURNS_PER_S = 10  # As often as it is drawn at most.
ACTIVITY_CELLS = 16  # Of what is done just now: enough to know a tool by; numbers give way to it.
INDENT = "  "
_BETWEEN = " · "


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """One of those at work, below the one it works for."""

    label: str
    activity: str  # The call it makes, or what it waits for.
    tokens: int = 0  # Of it and of all below it, as the cost.
    cost: float = 0.0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment, and all who work for it: those above come before those below."""

    model: str = ""  # As provider/model; nothing before one has begun to answer.
    elapsed_s: float = 0.0
    tokens: int = 0  # Of the whole tree, as the cost.
    cost: float = 0.0
    calls: Sequence[str] = ()  # Those that go on.
    state: str = ""  # What is done where no call goes on.
    agents: Sequence[AgentStatus] = ()


def lines_of(doing: RunStatus, cells_max: int) -> list[str]:
    """One line of the run and one of each agent."""
    shown = doing.agents[:AGENTS_MAX]
    missing = len(doing.agents) - len(shown)
    more = [fit(f"{INDENT}… and {missing:,} more", cells_max)] if missing else []
    return [_top(doing, cells_max), *(_agent(one, cells_max) for one in shown), *more]


def _top(doing: RunStatus, cells_max: int) -> str:
    turn = SPINNER[int(doing.elapsed_s * TURNS_PER_S) % len(SPINNER)]
    begin = f"{turn} {elapsed_text(doing.elapsed_s)}"
    model = _shown(doing.model)
    used = _used(doing.tokens, doing.cost)
    what = ", ".join(map(_shown, doing.calls)) or _shown(doing.state)
    # Where there is little room, the provider goes first, as there are few, and then the model.
    short = model.partition("/")[2] or model
    return _line(begin, ([model, *used], [short, *used], used, ()), what, cells_max)


def _agent(agent: AgentStatus, cells_max: int) -> str:
    begin = INDENT * (agent.depth + 1) + _shown(agent.label)
    return _line(begin, (_used(agent.tokens, agent.cost), ()), _shown(agent.activity), cells_max)


def _line(begin: str, heads: Sequence[Sequence[str]], what: str, cells_max: int) -> str:
    """With the first of the heads that leaves room for what is done."""
    line = ""
    for head in heads:
        parts = [*filter(None, (begin, *head, what))]
        line = _BETWEEN.join(parts)
        needed = cells_of(line) - max(cells_of(what) - ACTIVITY_CELLS, 0)
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
