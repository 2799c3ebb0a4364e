"""Current activity and usage of a run and its sub-agents, for the status area.

Reads the client's mirror. The mirror drops agents that have ended, and a session has the tokens of
its latest step only, so this module adds up both as they change.
"""

from collections.abc import Iterator

from culm.cli.render.agent_lines import label_of
from culm.cli.render.call_lines import KnownTools, call_line
from culm.cli.terminal.status_area import AgentStatus, RunStatus
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
