"""Lines of a sub-agent for people, each prefixed with the agent's name.

Text is printed in whole lines, because several agents write at the same time.
"""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from culm.cli.render.call_lines import CallNotes, KnownTools, path_text
from culm.cli.render.text import HEAD_CHARS, head_of
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged

LABEL_CHARS = 20  # A label is a margin, not a title.
ID_CHARS = 8
_TRAILING = " \"'`([{<,;:.-*"  # Removed from the end of a name that is cut.


def label_of(agent: Agent, taken: Collection[str]) -> str:
    """A short name that is not in `taken`."""
    name = head_of(agent.name) or agent.role or agent.agent_id[:ID_CHARS]
    short = name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1].rstrip(_TRAILING) + "…"
    number, label = 1, short
    while label in taken:
        number += 1
        label = f"{short} {number}"
    return label


def used_text(tokens: int, cost: float) -> str:
    return f"{tokens:,} {'token' if tokens == 1 else 'tokens'}, ${cost:.4f}"


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
