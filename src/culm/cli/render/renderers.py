"""The renderer interfaces of a run, and the renderer that prints a run for people.

Data goes to stdout, everything else to stderr. Lines of a sub-agent are prefixed with its name;
its text is printed in whole lines, because several agents write at the same time.
"""

import sys
from collections import deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace

from culm.cli.render.call_lines import CallNotes, KnownTools, path_text
from culm.cli.render.text import (
    HEAD_CHARS,
    ID_CHARS,
    head_of,
    label_of,
    used_text,
    without_controls,
)
from culm.cli.terminal.process import ending_text, print_output, write, write_note
from culm.cli.terminal.status_area import RunStatus, StatusArea
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import printable
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run

HELD_LINES_MAX = 1000  # Agent lines held back while the user types; the latest are kept.


class ActivityRenderer(Protocol):
    """Output of the activity of one agent."""

    def user_message(self, message_id: MessageId, text: str) -> None:
        """Show a message that a person or another agent has sent to the agent."""
        ...

    def text(self, message_id: MessageId, text: str) -> None: ...
    def restarted(self, message_id: MessageId) -> None:
        """Show that the text of the message is void and starts again from the beginning."""
        ...

    def call(self, call: ToolCall) -> None: ...
    def output(self, call_id: str, text: str) -> None:
        """Show more output of a running call."""
        ...

    def result(self, result: ToolResult) -> None: ...
    def allowed(self, call: ToolCall) -> None:
        """Show that a call that needs permission was allowed without an ask."""
        ...

    def ask(self, ask: AskChanged) -> None: ...
    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        """Show that an ask was closed, by this client or another."""
        ...

    def note(self, text: str) -> None: ...


class AgentRenderer(ActivityRenderer, Protocol):
    """Output of one sub-agent of a run."""

    def started(self, agent: Agent) -> None:
        """Show that the agent starts an assignment; it may have had others before."""
        ...

    def ended(self, agent: Agent) -> None: ...


class RunRenderer(ActivityRenderer, Protocol):
    """Output of a run and its sub-agents."""

    def agent(self, agent: Agent) -> AgentRenderer:
        """Return the renderer of a sub-agent, at any depth."""
        ...

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        """Show the end of the run; `agents` is the number of its sub-agents."""
        ...


def started_line(agent: Agent, above: str) -> str:
    about = [agent.role, agent.agent_id[:ID_CHARS]]
    if agent.is_read_only:
        about.append("read-only")
    if agent.branch:
        about.append(f"on branch {agent.branch}")
    works_for = f", for {above}" if above else ""
    return f"started: {', '.join(filter(None, about))}{works_for}"


def ended_line(agent: Agent) -> str:
    used = used_text(agent.tokens, agent.cost)
    reason = f"{head_of(agent.reason).removesuffix('.')}; " if agent.reason else ""
    return f"{agent.outcome or 'gone'}: {reason}{used}"


class AgentLines(CallNotes):
    """The lines of one agent. `path` has the labels of its ancestors and then its own."""

    def __init__(
        self,
        path: tuple[str, ...],
        write: Callable[[str], None],
        tools: KnownTools,
        *,
        has_rules: bool = False,
    ) -> None:
        super().__init__(tools, has_rules=has_rules)
        self._path = path
        self._write = write
        self._message_id = ""
        self._partial = ""  # The line whose end has not arrived.

    def started(self, agent: Agent) -> None:
        self.note(started_line(agent, self._path[-2] if len(self._path) > 1 else ""))

    def ended(self, agent: Agent) -> None:
        self.note(ended_line(agent))

    def user_message(self, message_id: MessageId, text: str) -> None:
        self.note(f"> {head_of(text)}")

    def text(self, message_id: MessageId, text: str) -> None:
        if message_id != self._message_id:
            self._end_line()
            self._message_id = message_id
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._print(line)
        # A model may never end a line; its text is shown all the same.
        while len(self._partial) > HEAD_CHARS:
            self._print(self._partial[:HEAD_CHARS])
            self._partial = self._partial[HEAD_CHARS:]

    def restarted(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def ask(self, ask: AskChanged) -> None:
        chain = f" ({path_text(self._path)})" if len(self._path) > 1 else ""
        super().ask(replace(ask, tool_name=f"{ask.tool_name}{chain}"))

    def note(self, text: str) -> None:
        self._end_line()
        self._write(f"[{self._path[-1]}] {text}")

    def _end_line(self) -> None:
        partial, self._partial = self._partial, ""
        if partial:
            self._print(partial)

    def _print(self, line: str) -> None:
        self._write(f"[{self._path[-1]}] | {line.expandtabs(4)}".rstrip())


class TextRenderer(CallNotes):
    """Text for people: the answer on stdout, one line for everything else on stderr.

    With a status area, the current activity is drawn below that. Without `has_answer` stdout is
    used for something else.
    """

    def __init__(
        self,
        tools: KnownTools = MappingProxyType({}),
        *,
        has_rules: bool = False,
        status_area: StatusArea | None = None,
        has_answer: bool = True,
        has_prompt: bool = False,
    ) -> None:
        super().__init__(tools, has_rules=has_rules)
        self._has_prompt = has_prompt
        self._status_area = status_area
        self._has_answer = has_answer
        self._asking = False  # The user may be typing, even below later notes.
        self._in_line = False  # The last text on stdout did not end its line.
        self._in_prompt = False  # The cursor is behind a prompt ...
        self._held: deque[str] = deque(maxlen=HELD_LINES_MAX)  # ... and these lines wait.
        self._message_id = ""
        self._is_screen = sys.stdout.isatty()
        self._paths: dict[str, tuple[str, ...]] = {}  # The labels of an agent and its ancestors.

    def user_message(self, message_id: MessageId, text: str) -> None:
        self.note("\n".join(f"> {line}" for line in text.split("\n")))

    def text(self, message_id: MessageId, text: str) -> None:
        if not self._has_answer:
            return
        if message_id != self._message_id or self._in_prompt:
            self.end_line()
            self._message_id = message_id
        # A model may repeat control characters of a file, which a terminal would execute.
        shown = without_controls(text) if self._is_screen else text
        self.erase()
        print_output(shown)
        self._in_line = not text.endswith("\n")

    def restarted(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def note(self, text: str) -> None:
        self.end_line()
        write_note(text)

    def prompt(self, text: str) -> None:
        """Ask for a line; the next note comes below it, with or without an answer."""
        self.end_line()
        write(sys.stderr, printable(text))
        self._in_prompt = self._asking = True

    def typed(self) -> None:
        """Record that the user has typed the line, including its end."""
        self._in_prompt = False

    def close_prompt(self) -> None:
        """End the prompt and print the agent lines held back meanwhile."""
        self.end_line()
        self._asking = False
        held = list(self._held)
        self._held.clear()
        if len(held) == HELD_LINES_MAX:
            write_note("(earlier lines of agents are left out)")
        for line in held:
            write_note(line)

    def agent(self, agent: Agent) -> AgentLines:
        above = self._paths.get(agent.parent_id, ())
        taken = {path[-1] for path in self._paths.values()}
        path = self._paths[agent.agent_id] = (*above, label_of(agent, taken))
        return AgentLines(path, self._agent_line, self.tools, has_rules=self.has_rules)

    def _agent_line(self, line: str) -> None:
        """Print a line of an agent, but never between a question and its answer."""
        if self._in_prompt:
            self._held.append(line)
        else:
            self.note(line)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        self.end_line()
        if agents:
            self.note(f"tree: {agents + 1:,} agents, {used_text(run.tree_tokens, run.tree_cost)}")
        if run.outcome != "end_turn":
            message, hint = ending_text(run)
            self.note(f"culm: {message}")
            # At the prompt of `culm` the user simply types the next request.
            if not (self._has_prompt and run.outcome in ("canceled", "denied")):
                self.note(f"hint: {hint}")

    def draw(self, status: RunStatus) -> None:
        """Draw the status area, except below an unfinished line or while the user types."""
        in_line = self._in_line and self._is_screen
        if self._status_area is not None and not (in_line or self._asking):
            self._status_area.show(status)

    def erase(self) -> None:
        """Erase the status area."""
        if self._status_area is not None:
            self._status_area.erase()

    def end_line(self) -> None:
        """End an unfinished line, so that the next output starts a new one."""
        self.erase()
        if self._in_prompt:
            write(sys.stderr, "\n")
            self._in_prompt = False
        if self._in_line:
            write(sys.stdout, "\n")
            self._in_line = False
