"""A run as JSON lines for programs: one object per line on stdout; notes go to stderr."""

import sys

from msgspec import Struct

from culm.cli.exits import run_status
from culm.cli.render import run_lines
from culm.cli.render.renderers import note_line
from culm.cli.render.run_lines import RunLine, as_agent_line
from culm.cli.terminal.streams import write
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import encode
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run


class JsonRenderer:
    """The lines of a run, or of one of its sub-agents."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._agent = agent

    def agent(self, agent: Agent) -> "JsonRenderer":
        return JsonRenderer(agent)

    def started(self, agent: Agent) -> None:
        write_line(
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
        write_line(
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

    def user_message(self, message_id: MessageId, text: str) -> None:
        self._write(run_lines.PromptLine(text, message_id))

    def text(self, message_id: MessageId, text: str) -> None:
        self._write(run_lines.TextLine(text, message_id))

    def restarted(self, message_id: MessageId) -> None:
        self._write(run_lines.RestartLine(message_id))

    def call(self, call: ToolCall) -> None:
        self._write(run_lines.CallLine(call.id, call.name, call.input))

    def output(self, call_id: str, text: str) -> None:
        self._write(run_lines.OutputLine(call_id, text))

    def allowed(self, call: ToolCall) -> None:
        self._write(run_lines.AllowedLine(call.id))

    def ask(self, ask: AskChanged) -> None:
        self._write(
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
        self._write(run_lines.AnsweredLine(ask.ask_id, ask.tool_call_id, ask.state, ask.by))

    def result(self, result: ToolResult) -> None:
        self._write(run_lines.ResultLine(result.tool_call_id, result.is_error, result.content))

    def note(self, text: str) -> None:
        note_line(text)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        write_line(end_line(run, text, agents))

    def _write(self, line: RunLine) -> None:
        agent = self._agent
        write_line(line if agent is None else as_agent_line(line, agent.agent_id, agent.session_id))


def end_line(run: Run, text: str, agents: int) -> run_lines.EndLine:
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
        exit_status=run_status(run),
    )


def write_line(line: Struct) -> None:
    # Written as bytes: JSON is UTF-8, whatever the encoding of the terminal.
    write(sys.stdout.buffer, encode(line) + b"\n")
