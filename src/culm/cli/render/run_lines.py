"""The lines of `culm run --json` and `culm attach --json`: one object each, tagged by `type`.

Programs rely on them. This module generates their schema, docs/run-lines.schema.json.
"""

from typing import Any, Union

import msgspec
from msgspec import Struct

from culm.wire.codec import Json


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
