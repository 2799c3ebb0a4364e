"""How a run looks to a program: one JSON object a line on stdout; stderr is for people still."""

import sys

from msgspec import Struct

from culm.cli.render import run_lines
from culm.cli.render.renderers import note_line
from culm.cli.render.run_lines import RunLine, of_agent
from culm.cli.run_ends import status_of
from culm.cli.terminal.streams import write
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import encode
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run


class JsonRenderer:
    """Of a run, or of an agent that works for it."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._agent = agent

    def agent(self, agent: Agent) -> "JsonRenderer":
        return JsonRenderer(agent)

    def started(self, agent: Agent) -> None:
        put_line(
            run_lines.StartedLine(
                agent_id=agent.agent_id,
                session_id=agent.session_id,
                parent_id=agent.parent_id,
                name=agent.name,
                role=agent.role,
                provider=agent.provider,
                model=agent.model,
                depth=agent.depth,
                run_id=agent.run_id,
            )
        )

    def ended(self, agent: Agent) -> None:
        put_line(
            run_lines.EndedLine(
                agent_id=agent.agent_id,
                session_id=agent.session_id,
                outcome=agent.outcome or "",
                reason=agent.reason,
                run_id=agent.run_id,
                tokens=agent.tokens,
                cost=agent.cost,
            )
        )

    def said(self, message_id: MessageId, text: str) -> None:
        self._put(run_lines.PromptLine(text, message_id))

    def text(self, message_id: MessageId, text: str) -> None:
        self._put(run_lines.TextLine(text, message_id))

    def again(self, message_id: MessageId) -> None:
        self._put(run_lines.RestartLine(message_id))

    def call(self, call: ToolCall) -> None:
        self._put(run_lines.CallLine(call.id, call.name, call.input))

    def output(self, call_id: str, text: str) -> None:
        self._put(run_lines.OutputLine(call_id, text))

    def allowed(self, call: ToolCall) -> None:
        self._put(run_lines.AllowedLine(call.id))

    def ask(self, ask: AskChanged) -> None:
        self._put(
            run_lines.AskLine(
                id=ask.ask_id,
                call_id=ask.tool_call_id,
                tool=ask.tool_name,
                action=ask.action,
                description=ask.description,
                deadline=ask.deadline,
                agent_path=list(ask.agent_path),
            )
        )

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self._put(run_lines.AnsweredLine(ask.ask_id, ask.tool_call_id, ask.state, ask.by))

    def result(self, result: ToolResult) -> None:
        self._put(run_lines.ResultLine(result.tool_call_id, result.is_error, result.content))

    def note(self, words: str) -> None:
        note_line(words)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        put_line(end_of(run, text, agents))

    def _put(self, line: RunLine) -> None:
        agent = self._agent
        put_line(line if agent is None else of_agent(line, agent.agent_id, agent.session_id))


def end_of(run: Run, text: str, agents: int) -> run_lines.EndLine:
    return run_lines.EndLine(
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
        exit_status=status_of(run),
    )


def put_line(line: Struct) -> None:
    # Bytes: JSON is UTF-8, whatever the terminal speaks.
    write(sys.stdout.buffer, encode(line) + b"\n")
