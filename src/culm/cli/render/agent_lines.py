"""How an agent that works for a run looks to a person: whole lines, each behind its name.

What it says is told line by line, as several of them talk at once.
"""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from culm.cli.render.call_lines import HEAD_CHARS, head_of
from culm.cli.render.call_notes import CallNotes, path_text
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged

LABEL_CHARS = 20  # A margin, not a title.
ID_CHARS = 8
_LOOSE = " \"'`([{<,;:.-*"  # Signs that say nothing at the end of what was cut.


def label_of(agent: Agent, taken: Collection[str]) -> str:
    """A short name that none of the others has."""
    name = head_of(agent.name) or agent.role or agent.agent_id[:ID_CHARS]
    short = name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1].rstrip(_LOOSE) + "…"
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
        about.append("only reads")
    if agent.branch:
        about.append(f"on branch {agent.branch}")
    works_for = f", for {above}" if above else ""
    return f"started: {', '.join(filter(None, about))}{works_for}"


def ended_line(agent: Agent) -> str:
    used = used_text(agent.tokens, agent.cost)
    reason = f"{head_of(agent.reason).removesuffix('.')}; " if agent.reason else ""
    return f"{agent.outcome or 'gone'}: {reason}{used}"


class AgentLines(CallNotes):
    """One agent, below the names of those it works for."""

    def __init__(
        self,
        path: tuple[str, ...],
        put: Callable[[str], None],
        *,
        has_rules: bool = False,
    ) -> None:
        super().__init__(has_rules=has_rules)
        self._path = path
        self._put = put
        self._message_id = ""
        self._begun = ""  # A line of its text.

    def started(self, agent: Agent) -> None:
        self.note(started_line(agent, self._path[-2] if len(self._path) > 1 else ""))

    def ended(self, agent: Agent) -> None:
        self.note(ended_line(agent))

    def said(self, message_id: MessageId, text: str) -> None:
        self.note(f"> {head_of(text)}")

    def text(self, message_id: MessageId, text: str) -> None:
        if message_id != self._message_id:
            self._end_line()
            self._message_id = message_id
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._print(line)
        # A model that never ends a line is read as well.
        while len(self._begun) > HEAD_CHARS:
            self._print(self._begun[:HEAD_CHARS])
            self._begun = self._begun[HEAD_CHARS:]

    def again(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def ask(self, ask: AskChanged) -> None:
        way = f" ({path_text(self._path)})" if len(self._path) > 1 else ""
        super().ask(replace(ask, tool_name=f"{ask.tool_name}{way}"))

    def note(self, words: str) -> None:
        self._end_line()
        self._put(f"[{self._path[-1]}] {words}")

    def _end_line(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            self._print(begun)

    def _print(self, line: str) -> None:
        self._put(f"[{self._path[-1]}] | {line.expandtabs(4)}".rstrip())
