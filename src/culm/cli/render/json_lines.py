"""`culm run --json` and `culm attach --json`: one object per line on stdout, tagged by `type`.

Notes go to stderr. Programs rely on the lines: this module generates their schema,
docs/run-lines.schema.json.
"""

import sys
from typing import Any, Union

import msgspec
from msgspec import Struct

from culm.cli.terminal.process import run_status, write, write_note
from culm.ids import MessageId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.codec import Json, encode
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run


class RunLine(Struct, tag_field="type"):
    """A line of a run. The same line of a sub-agent has a type that begins with `agent_`."""


class PromptLine(RunLine, tag="said"):
    """A prompt, or a message sent to the running agent; only `culm attach` prints it."""

    text: str
    message_id: str


class TextLine(RunLine, tag="text"):
    """More of the answer."""

    text: str
    message_id: str


class RestartLine(RunLine, tag="again"):
    """The text of this message is void; it starts again from the beginning."""

    message_id: str


class CallLine(RunLine, tag="call"):
    """A tool is called."""

    id: str
    name: str
    input: str  # JSON, as the model wrote it.


class OutputLine(RunLine, tag="output"):
    """Output of a running call; bounded, and for display only."""

    id: str
    text: str


class AllowedLine(RunLine, tag="allowed"):
    """A call that needs permission was allowed by a rule or by an earlier answer."""

    call_id: str


class AskLine(RunLine, tag="ask"):
    """A call waits for permission."""

    id: str
    call_id: str
    tool: str
    action: str
    description: str
    deadline: int  # Time of refusal in seconds since 1970; 0 for never.
    agent_path: list[str]  # The chain of agents that leads to it.


class AnsweredLine(RunLine, tag="answered"):
    """An ask is closed."""

    id: str
    call_id: str
    state: str
    by: str


class ResultLine(RunLine, tag="result"):
    """The result of a call."""

    id: str
    is_error: bool
    content: str


class EndLine(RunLine, tag="end"):
    """The last line: the outcome of the run, its whole answer and its usage."""

    outcome: str
    run_id: str
    session_id: str
    text: str
    error: str
    provider: str
    model: str
    steps: int
    prompt_tokens: int
    completion_tokens: int
    cost: float  # USD.
    agents: int  # Number of sub-agents, which the next two include.
    tree_tokens: int
    tree_cost: float
    exit_status: int  # The exit status of `culm run`.


class DetachedLine(RunLine, tag="detached"):
    """The only line of `--detach`: the run continues in the background."""

    run_id: str
    session_id: str


class StartedLine(Struct, tag_field="type", tag="agent_started"):
    """A sub-agent has started to work on an assignment."""

    agent_id: str
    session_id: str
    parent_id: str
    name: str
    role: str
    provider: str
    model: str
    depth: int
    run_id: str


class EndedLine(Struct, tag_field="type", tag="agent_ended"):
    """A sub-agent has ended its assignment."""

    agent_id: str
    session_id: str
    outcome: str
    reason: str
    run_id: str
    tokens: int
    cost: float


RUN_LINES: tuple[type[RunLine], ...] = (
    PromptLine,
    TextLine,
    RestartLine,
    CallLine,
    OutputLine,
    AllowedLine,
    AskLine,
    AnsweredLine,
    ResultLine,
)


def _agent_kind(kind: type[RunLine]) -> type[Struct]:
    """The same line with the ids of an agent."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(
        f"Agent{kind.__name__}",
        [("agent_id", str), ("session_id", str), *fields],
        tag_field="type",
        tag=f"agent_{kind.__struct_config__.tag}",
    )


AGENT_LINES: dict[type[RunLine], type[Struct]] = {kind: _agent_kind(kind) for kind in RUN_LINES}
ALL_LINES = (*RUN_LINES, EndLine, DetachedLine, StartedLine, EndedLine, *AGENT_LINES.values())


def as_agent_line(line: RunLine, agent_id: str, session_id: str) -> Struct:
    """Turn a line of a run into the same line of a sub-agent."""
    return AGENT_LINES[type(line)](agent_id, session_id, *msgspec.structs.astuple(line))


def json_schema() -> dict[str, Json]:
    """The schema of all lines."""
    schema: dict[str, Any] = msgspec.json.schema(Union[ALL_LINES])  # noqa: UP007 - built from a tuple
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of culm run --json",
        **schema,
    }


# --- the renderer


class JsonRenderer:
    """The lines of a run, or of one of its sub-agents."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._agent = agent

    def agent(self, agent: Agent) -> "JsonRenderer":
        return JsonRenderer(agent)

    def started(self, agent: Agent) -> None:
        write_line(msgspec.convert(agent, StartedLine, from_attributes=True))

    def ended(self, agent: Agent) -> None:
        write_line(
            EndedLine(
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
        self._write(PromptLine(text, message_id))

    def text(self, message_id: MessageId, text: str) -> None:
        self._write(TextLine(text, message_id))

    def restarted(self, message_id: MessageId) -> None:
        self._write(RestartLine(message_id))

    def call(self, call: ToolCall) -> None:
        self._write(CallLine(call.id, call.name, call.input))

    def output(self, call_id: str, text: str) -> None:
        self._write(OutputLine(call_id, text))

    def allowed(self, call: ToolCall) -> None:
        self._write(AllowedLine(call.id))

    def ask(self, ask: AskChanged) -> None:
        self._write(
            AskLine(
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
        self._write(AnsweredLine(ask.ask_id, ask.tool_call_id, ask.state, ask.by))

    def result(self, result: ToolResult) -> None:
        self._write(ResultLine(result.tool_call_id, result.is_error, result.content))

    def note(self, text: str) -> None:
        write_note(text)

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        write_line(end_line(run, text, agents))

    def _write(self, line: RunLine) -> None:
        agent = self._agent
        write_line(line if agent is None else as_agent_line(line, agent.agent_id, agent.session_id))


def end_line(run: Run, text: str, agents: int) -> EndLine:
    return EndLine(
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
