"""The seam towards whoever has other agents work: what an agent wants done, and who does it.

The tools for it are the same in the server and in a worker. In the server the office is the tree of
agents itself; a worker's passes each errand on to its host, by a host call whose `op` is the tag.
"""

from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field

from culm.tools.base import CallRequest, CallResult, Watch
from culm.wire.agents import NAME_CHARS_MAX, PROMPT_CHARS_MAX, Name, Until
from culm.wire.runs import Limits, Money, Tokens

ASSIGNMENTS_MAX = 50  # In one call; the limits of the tree are checked apart from it.
TIMEOUT_S_MAX = 3600.0


class AgentAssignment(Struct, frozen=True, omit_defaults=True):
    prompt: Annotated[
        str,
        Meta(
            description="All it has to know: it sees nothing of this conversation.",
            min_length=1,
            max_length=PROMPT_CHARS_MAX,
        ),
    ]
    name: Annotated[
        str, Meta(description="A few words by which people know it.", max_length=NAME_CHARS_MAX)
    ] = ""
    role: Annotated[
        Name, Meta(description="explorer (only reads), worker, reviewer, or a configured one.")
    ] = ""
    model: Annotated[Name, Meta(description="Another model, as provider/model.")] = ""
    tools: Annotated[
        Annotated[list[Name], Meta(max_length=100)] | None,
        Meta(description="The only tools it may use."),
    ] = None
    read_only: Annotated[bool, Meta(description="It may only look.")] = False
    worktree: Annotated[
        bool, Meta(description="It works in a git worktree of its own, on its own branch.")
    ] = False
    limits: Annotated[
        Limits, Meta(description="What it may use up: wall_s, steps, tokens, cost (USD).")
    ] = field(default_factory=Limits)


class StartAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="agent"):
    """Nothing is started unless all of it can be."""

    assignments: Annotated[list[AgentAssignment], Meta(min_length=1, max_length=ASSIGNMENTS_MAX)]
    wait: bool = True  # Else they are detached, and this returns at once.


class WaitForAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="wait"):
    agents: list[Name] = field(default_factory=list[Name])  # None are all that one has started.
    until: Until = "all"
    timeout_s: Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)] = 600.0


class SteerAgent(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="send"):
    agent: Name
    text: str
    wait: bool = False


class StopAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="stop"):
    agents: list[Name]


class ListAgents(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="list"):
    agent: Name = ""  # Whose tree; empty is one's own.


class MailRequest(Struct, frozen=True, omit_defaults=True, tag_field="op", tag="mail"):
    """Send a letter, answer one, or ask what became of one."""

    action: Literal["send", "reply", "status"]
    to: Name = ""
    kind: Literal["task", "ask", "handoff"] = "task"
    text: str = ""
    letter: Name = ""  # The one that is answered, or asked about.


AgentRequest = StartAgents | WaitForAgents | SteerAgent | StopAgents | ListAgents | MailRequest


class Delegation(Protocol):
    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        """Do it, and say what came of it. What cannot be done is an error result, in words.

        To cancel it ends what it waits for: agents that were started to be waited for.
        """
        ...


# --- what else a worker has its host do; not for models


class ReserveBudget(Struct, frozen=True, tag_field="op", tag="reserve"):
    """Set something aside for a question to a model, on every budget above."""

    tokens: Tokens
    cost: Money


class ReservedBudget(Struct, frozen=True, omit_defaults=True):
    """Without an id it was refused, and `refused` says which budget is used up."""

    id: str = ""
    refused: str = ""
