"""How a run looks to a program: one JSON object a line on stdout; stderr is for people still."""

import sys

from culm.cli.faces import note_line
from culm.cli.streams import write
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import Json, encode
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run


class JsonLines:
    """Of a run, or of an agent that works for it: then every type begins with `agent_`."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._kind = "" if agent is None else "agent_"
        self._whose: dict[str, Json] = {}
        if agent is not None:
            self._whose = {"agent_id": agent.agent_id, "session_id": agent.session_id}

    def agent(self, agent: Agent) -> "JsonLines":
        return JsonLines(agent)

    def started(self, agent: Agent) -> None:
        self._put(
            "started",
            parent_id=agent.parent_id,
            name=agent.name,
            role=agent.role,
            provider=agent.provider,
            model=agent.model,
            depth=agent.depth,
            run_id=agent.run_id,
        )

    def ended(self, agent: Agent) -> None:
        self._put(
            "ended",
            outcome=agent.outcome,
            reason=agent.reason,
            run_id=agent.run_id,
            tokens=agent.tokens,
            cost=agent.cost,
        )

    def text(self, message_id: MessageId, text: str) -> None:
        self._put("text", text=text, message_id=message_id)

    def again(self, message_id: MessageId) -> None:
        self._put("again", message_id=message_id)

    def call(self, call: ToolCall) -> None:
        self._put("call", id=call.id, name=call.name, input=call.input)

    def output(self, call_id: str, text: str) -> None:
        self._put("output", id=call_id, text=text)

    def allowed(self, call: ToolCall) -> None:
        self._put("allowed", call_id=call.id)

    def ask(self, ask: AskChanged) -> None:
        self._put(
            "ask",
            id=ask.ask_id,
            call_id=ask.tool_call_id,
            tool=ask.tool_name,
            action=ask.action,
            description=ask.description,
            deadline=ask.deadline,
            agent_path=list(ask.agent_path),
        )

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self._put("answered", id=ask.ask_id, call_id=ask.tool_call_id, state=ask.state, by=ask.by)

    def result(self, result: ToolResult) -> None:
        content, is_error = result.content, result.is_error
        self._put("result", id=result.tool_call_id, is_error=is_error, content=content)

    def note(self, words: str) -> None:
        note_line(words)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        self._put(
            "end",
            outcome=run.outcome or run.state,
            run_id=run.id,
            session_id=run.session_id,
            text=text,
            error=": ".join(filter(None, (run.title, run.details))),
            provider=run.provider,
            model=run.model,
            steps=run.steps,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            cost=run.cost,
            agents=agents,
            tree_tokens=run.tree_tokens,
            tree_cost=run.tree_cost,
        )

    def _put(self, kind: str, **fields: Json) -> None:
        # Bytes: JSON is UTF-8, whatever the terminal speaks.
        write(
            sys.stdout.buffer, encode({"type": self._kind + kind, **self._whose, **fields}) + b"\n"
        )
