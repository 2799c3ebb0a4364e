"""The interface for delegating work to other agents: the requests and their handler.

The tools are the same in the server and in a worker. In the server the handler is the tree of
agents itself; in a worker it forwards each request to the host, as a host call whose `op` is the
tag.
"""

from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field

from culm.tools.base import CallRequest, CallResult, Watch
from culm.wire.agents import NAME_CHARS_MAX, PROMPT_CHARS_MAX, Name, Until
from culm.wire.runs import Limits, Money, Tokens

ASSIGNMENTS_MAX = 50  # In one call; the limits of the tree are checked separately.
TIMEOUT_S_MAX = 3600.0


class AgentAssignment(Struct, frozen=True, omit_defaults=True):
    """The work and the settings of one agent to start."""

    prompt: Annotated[
        str,
        Meta(
            description="Everything it has to know: it does not see this conversation.",
            min_length=1,
            max_length=PROMPT_CHARS_MAX,
        ),
    ]
    name: Annotated[
        str, Meta(description="A short name that people see.", max_length=NAME_CHARS_MAX)
    ] = ""
    role: Annotated[
        Name, Meta(description="explorer (only reads), worker, reviewer, or a configured one.")
    ] = ""
    model: Annotated[Name, Meta(description="Another model, as provider/model.")] = ""
    tools: Annotated[
        Annotated[list[Name], Meta(max_length=100)] | None,
        Meta(description="The only tools it may use."),
    ] = None
    read_only: Annotated[bool, Meta(description="It may only read.")] = False
    worktree: Annotated[
        bool, Meta(description="It works in a git worktree of its own, on its own branch.")
    ] = False
    limits: Annotated[
        Limits, Meta(description="Its limits: wall_s, steps, tokens, cost (USD).")
    ] = field(default_factory=Limits)


class StartAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="agent"):
    """Start all of the assignments, or none of them."""

    assignments: Annotated[list[AgentAssignment], Meta(min_length=1, max_length=ASSIGNMENTS_MAX)]
    wait: bool = True  # Otherwise they are detached and the call returns at once.


class WaitForAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="wait"):
    agents: list[Name] = field(default_factory=list[Name])  # Empty: all of its own.
    until: Until = "all"
    timeout_s: Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)] = 600.0


class SteerAgent(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="send"):
    agent: Name
    text: str
    wait: bool = False


class StopAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="stop"):
    agents: list[Name]


class ListAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="list"):
    agent: Name = ""  # The root of the tree; empty is the caller.


class MailRequest(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="mail"):
    """Send a letter, reply to one, or query the status of one."""

    action: Literal["send", "reply", "status"]
    to: Name = ""
    kind: Literal["task", "ask", "handoff"] = "task"
    text: str = ""
    letter: Name = ""  # The letter to reply to or to query.


AgentRequest = StartAgents | WaitForAgents | SteerAgent | StopAgents | ListAgents | MailRequest


class Delegation(Protocol):
    """Handles the requests of one agent."""

    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        """Handle a request and return its result; a request that cannot be done is an error result.

        Cancelling it stops the agents that were started to be waited for.
        """
        ...


# --- other requests of a worker to its host; not for models


class ReserveBudget(Struct, frozen=True, tag_field="op", tag="reserve"):
    """Reserve part of every budget above for a model request."""

    tokens: Tokens
    cost: Money


class ReservedBudget(Struct, frozen=True, omit_defaults=True):
    """A reservation; without an id it was refused, and `refused` names the exhausted budget."""

    id: str = ""
    refused: str = ""
