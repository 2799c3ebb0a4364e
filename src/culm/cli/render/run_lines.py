"""The lines of `culm run --json` and `culm attach --json`: one object each, told apart by `type`.

Programs rely on them. Their schema is published as docs/run-lines.schema.json, made from here.
"""

from typing import Any, Union

import msgspec
from msgspec import Struct

from culm.wire.codec import Json


class RunLine(Struct, tag_field="type"):
    """Of a run itself; of an agent that works for it, the type begins with `agent_`."""


class PromptLine(RunLine, tag="said"):
    """What it was asked, or told meanwhile; only `culm attach` tells it."""

    text: str
    message_id: str


class TextLine(RunLine, tag="text"):
    """More of the answer."""

    text: str
    message_id: str


class RestartLine(RunLine, tag="again"):
    """The text of this message so far is void; it begins anew."""

    message_id: str


class CallLine(RunLine, tag="call"):
    """A tool is called."""

    id: str
    name: str
    input: str  # JSON, as the model wrote it.


class OutputLine(RunLine, tag="output"):
    """What a call puts out while it runs; bounded, and for watching only."""

    id: str
    text: str


class AllowedLine(RunLine, tag="allowed"):
    """A call that needs permission has it, by a rule or an earlier answer."""

    call_id: str


class AskLine(RunLine, tag="ask"):
    """Somebody must answer before the call goes on."""

    id: str
    call_id: str
    tool: str
    action: str
    description: str
    deadline: int  # When it is refused, in seconds since 1970; 0 for never.
    agent_path: list[str]  # Which agents lead to it.


class AnsweredLine(RunLine, tag="answered"):
    """An ask is closed."""

    id: str
    call_id: str
    state: str
    by: str


class ResultLine(RunLine, tag="result"):
    """What a call came to."""

    id: str
    is_error: bool
    content: str


class EndLine(RunLine, tag="end"):
    """The last line: how the run ended, its whole answer, and what was used up."""

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
    agents: int  # How many have worked for it; with them:
    tree_tokens: int
    tree_cost: float
    exit_status: int  # Of `culm run`.


class DetachedLine(RunLine, tag="detached"):
    """The only line of `--detach`: the run goes on."""

    run_id: str
    session_id: str


class StartedLine(Struct, tag_field="type", tag="agent_started"):
    """An agent was given something to do."""

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
    """An agent is done with that."""

    agent_id: str
    session_id: str
    outcome: str
    reason: str
    run_id: str
    tokens: int
    cost: float


OF_RUNS: tuple[type[RunLine], ...] = (
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


def _of_agent(kind: type[RunLine]) -> type[Struct]:
    """The same line, told of an agent."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(
        f"Agent{kind.__name__}",
        [("agent_id", str), ("session_id", str), *fields],
        tag_field="type",
        tag=f"agent_{kind.__struct_config__.tag}",
    )


OF_AGENTS: dict[type[RunLine], type[Struct]] = {kind: _of_agent(kind) for kind in OF_RUNS}
ALL = (*OF_RUNS, EndLine, DetachedLine, StartedLine, EndedLine, *OF_AGENTS.values())


def of_agent(line: RunLine, agent_id: str, session_id: str) -> Struct:
    """What a line of a run is if an agent's session tells it."""
    return OF_AGENTS[type(line)](agent_id, session_id, *msgspec.structs.astuple(line))


def json_schema() -> dict[str, Json]:
    """Of every line there is."""
    schema: dict[str, Any] = msgspec.json.schema(Union[ALL])  # noqa: UP007 - made of a tuple
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of culm run --json",
        **schema,
    }
