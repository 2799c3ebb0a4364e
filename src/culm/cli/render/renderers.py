"""How a run is shown, and how it looks to a person: what is printed of it, and where.

Data goes to stdout, all else to stderr.
"""

import sys
from collections import deque
from typing import Protocol

from culm.cli.render.agent_lines import AgentLines, label_of, used_text
from culm.cli.render.call_lines import without_controls
from culm.cli.render.call_notes import CallNotes
from culm.cli.run_ends import ending_text
from culm.cli.terminal.status_area import StatusArea
from culm.cli.terminal.status_lines import RunStatus
from culm.cli.terminal.streams import write
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import printable
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run

HELD_LINES_MAX = 1000  # Of agents that talk while a person thinks; the latest are kept.


class ActivityRenderer(Protocol):
    """How what an agent does is shown."""

    def said(self, message_id: MessageId, text: str) -> None:
        """What a person, or another agent, has said to it."""
        ...

    def text(self, message_id: MessageId, text: str) -> None: ...
    def again(self, message_id: MessageId) -> None:
        """All text of the message is void; it begins anew."""
        ...

    def call(self, call: ToolCall) -> None: ...
    def output(self, call_id: str, text: str) -> None:
        """A call that goes on has put out more."""
        ...

    def result(self, result: ToolResult) -> None: ...
    def allowed(self, call: ToolCall) -> None:
        """A call that needs permission goes ahead, and nobody was asked."""
        ...

    def ask(self, ask: AskChanged) -> None: ...
    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        """What was asked is closed, whoever did it."""
        ...

    def note(self, words: str) -> None: ...


class AgentRenderer(ActivityRenderer, Protocol):
    """How an agent that works for a run is shown."""

    def started(self, agent: Agent) -> None:
        """It was given something to do; perhaps not for the first time."""
        ...

    def ended(self, agent: Agent) -> None: ...


class RunRenderer(ActivityRenderer, Protocol):
    """How a run is shown."""

    def agent(self, agent: Agent) -> AgentRenderer:
        """The face of one that works for the run, or for an agent that has one."""
        ...

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        """It is over; so many agents have worked for it."""
        ...


class TextRenderer(CallNotes):
    """For people: the answer on stdout, one line for everything else on stderr.

    With a region, what goes on just now is drawn below all that. Without `has_answer` stdout is for
    something else.
    """

    def __init__(
        self,
        *,
        has_rules: bool = False,
        region: StatusArea | None = None,
        has_answer: bool = True,
        has_prompt: bool = False,
    ) -> None:
        super().__init__(has_rules=has_rules)
        self._has_prompt = has_prompt
        self._region = region
        self._has_answer = has_answer
        self._asking = False  # A person may be typing, whatever was noted since.
        self._in_line = False  # Of stdout.
        self._in_prompt = False  # Somebody is asked to type something ...
        self._held: deque[str] = deque(maxlen=HELD_LINES_MAX)  # ... while agents say this.
        self._message_id = ""
        self._is_screen = sys.stdout.isatty()
        self._paths: dict[str, tuple[str, ...]] = {}  # Of agents, as they are named here.

    def said(self, message_id: MessageId, text: str) -> None:
        self.note("\n".join(f"> {line}" for line in text.split("\n")))

    def text(self, message_id: MessageId, text: str) -> None:
        if not self._has_answer:
            return
        if message_id != self._message_id or self._in_prompt:
            self.end_line()
            self._message_id = message_id
        # A model may repeat what stands in a file; a terminal would obey it.
        shown = without_controls(text) if self._is_screen else text
        self.erase()
        try:
            write(sys.stdout, shown)
        except UnicodeEncodeError:
            write(sys.stdout, shown.encode("ascii", "backslashreplace").decode())
        self._in_line = not text.endswith("\n")

    def again(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def note(self, words: str) -> None:
        self.end_line()
        note_line(words)

    def prompt(self, words: str) -> None:
        """Ask for a line; what is noted next comes below, with or without an answer."""
        self.end_line()
        write(sys.stderr, printable(words))
        self._in_prompt = self._asking = True

    def typed(self) -> None:
        """It was typed, with its end."""
        self._in_prompt = False

    def close_prompt(self) -> None:
        """Nobody is asked any more; what agents have said meanwhile follows."""
        self.end_line()
        self._asking = False
        held = list(self._held)
        self._held.clear()
        if len(held) == HELD_LINES_MAX:
            note_line("(what agents have said before is left out)")
        for line in held:
            note_line(line)

    def agent(self, agent: Agent) -> AgentLines:
        above = self._paths.get(agent.parent_id, ())
        taken = {path[-1] for path in self._paths.values()}
        path = self._paths[agent.agent_id] = (*above, label_of(agent, taken))
        return AgentLines(path, self._aside, has_rules=self.has_rules)

    def _aside(self, line: str) -> None:
        """A line of an agent; it must not come between a question and its answer."""
        if self._in_prompt:
            self._held.append(line)
        else:
            self.note(line)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        self.end_line()
        if agents:
            self.note(f"tree: {agents + 1:,} agents, {used_text(run.tree_tokens, run.tree_cost)}")
        if run.outcome != "end_turn":
            words, hint = ending_text(run)
            self.note(f"culm: {words}")
            # At a prompt one goes on by typing.
            if not (self._has_prompt and run.outcome in ("canceled", "denied")):
                self.note(f"hint: {hint}")

    def draw(self, doing: RunStatus) -> None:
        """Show what goes on, where there is room: not in a begun line, nor where a person types."""
        in_line = self._in_line and self._is_screen
        if self._region is not None and not (in_line or self._asking):
            self._region.show(doing)

    def erase(self) -> None:
        """Leave nothing of what was drawn."""
        if self._region is not None:
            self._region.erase()

    def end_line(self) -> None:
        """What comes next begins a line."""
        self.erase()
        if self._in_prompt:
            write(sys.stderr, "\n")
            self._in_prompt = False
        if self._in_line:
            write(sys.stdout, "\n")
            self._in_line = False


def note_line(words: str) -> None:
    """Tell a person. What files, models and providers say must not move the terminal."""
    lines = "\n".join(map(printable, words.split("\n")))
    try:
        write(sys.stderr, f"{lines}\n")
    except UnicodeEncodeError:
        write(sys.stderr, lines.encode("ascii", "backslashreplace").decode() + "\n")
