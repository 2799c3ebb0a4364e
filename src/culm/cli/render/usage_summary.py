"""What a run and all who work for it do at this moment, and what they have used up by now.

Reads the mirror that the client keeps. Agents that have ended are dropped from it, and a session
knows the tokens of its latest step only, so both are summed up here as they pass.
"""

from collections.abc import Iterator

from culm.cli.render.agent_lines import label_of
from culm.cli.render.call_lines import call_line
from culm.cli.terminal.status_lines import AgentStatus, RunStatus
from culm.client.mirror import Mirror
from culm.client.tree import AgentBranch, SessionTree
from culm.ids import AgentId, RunId, SessionId
from culm.wire.messages import (
    Message,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
    is_finished,
)

_WAITS = {
    "slot": "waits until others have ended",
    "ask": "waits for permission",
    "question": "waits for an answer",
    "agents": "waits for its agents",
}
_OF_AGENTS = ("agent", "agent_wait")  # What these are about stands below: those at work.


class UsageSummary:
    """Counts from when it is made. Whoever takes events in has it `count` before they are shown."""

    def __init__(self, tree: SessionTree, run_id: RunId, started_s: float) -> None:
        self._tree = tree
        self._run_id = run_id
        self._started_s = started_s
        self._step = self._step_now()
        self._step_tokens = 0  # Of the run's own steps.
        self._cost_before = self._cost_now()
        self._first: dict[AgentId, int] = {}  # Tokens of agents that work for it, at first ...
        self._last: dict[AgentId, int] = {}  # ... and by now. Both with all below them.
        self._labels: dict[AgentId, str] = {}

    def count(self) -> None:
        """Take in what was used up since the last time."""
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

    def doing(self, now_s: float) -> RunStatus:
        """The whole tree at this moment."""
        self.count()
        active = _latest_answer(self._tree)
        calls = [call_text(call) for call in running_calls(self._tree)]
        return RunStatus(
            model="/".join(filter(None, (active.provider, active.model))) if active else "",
            elapsed_s=max(now_s - self._started_s, 0.0),
            tokens=self._step_tokens + sum(self._last.values()) - sum(self._first.values()),
            # What agents cost is part of what the session costs.
            cost=max(self._cost_now() - self._cost_before, 0.0),
            calls=calls if self._has_begun() else [],
            state=_thinking(self._tree) if self._has_begun() else "waits for its turn",
            agents=list(self._agents()),
        )

    def _agents(self) -> Iterator[AgentStatus]:
        """Those at work, each above those that work for it."""
        top, branches = self._tree.top, self._tree.branches
        below: dict[SessionId, list[AgentBranch]] = {}
        for branch in branches.values():
            # Who has nobody above it that is known here works for the run all the same.
            above = SessionId(branch.agent.parent_session_id)
            below.setdefault(above if above in branches else top, []).append(branch)
        left = [(branch, 0) for branch in reversed(below.get(top, ()))]
        while left:
            branch, depth = left.pop()
            agent = branch.agent
            if agent.state != "ended":
                label = self._labels[agent.agent_id]
                yield AgentStatus(label, activity_of(branch), agent.tokens, agent.cost, depth)
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


def activity_of(branch: AgentBranch) -> str:
    """What an agent does, in a few words."""
    if branch.agent.state == "pending":
        return "starts"
    if branch.agent.waiting_for in ("ask", "question", "slot"):
        return _WAITS[branch.agent.waiting_for]
    if calls := running_calls(branch.mirror):
        return ", ".join(map(call_text, calls))
    return _WAITS.get(branch.agent.waiting_for) or _thinking(branch.mirror)


def running_calls(mirror: Mirror) -> list[ToolCall]:
    """Calls of the latest answer that are whole and have no result."""
    answered: set[str] = set()
    for message in reversed(mirror.messages.values()):
        answered.update(p.data.tool_call_id for p in message.parts if isinstance(p, ToolResultPart))
        if _is_answer(message):
            calls = [part.data for part in message.parts if isinstance(part, ToolCallPart)]
            return [call for call in calls if call.finished and call.id not in answered]
    return []


def call_text(call: ToolCall) -> str:
    return call.name if call.name in _OF_AGENTS else call_line(call).removeprefix("→ ")


def _thinking(mirror: Mirror) -> str:
    """What a model does that makes no call."""
    active = _latest_answer(mirror)
    if active is None or is_finished(active.parts):
        return "asks the model"
    is_thinking = not active.parts or isinstance(active.parts[-1], ReasoningPart)
    return "thinks" if is_thinking else "writes"


def _latest_answer(mirror: Mirror) -> Message | None:
    """The latest answer, begun or whole."""
    return next(filter(_is_answer, reversed(mirror.messages.values())), None)


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.is_summary_message
