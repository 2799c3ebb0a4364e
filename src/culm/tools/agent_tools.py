"""`agent`, `agent_wait`, `agent_send`, `agent_stop`, `agent_list`, `mail`: delegating work.

Owns the requests of these tools and the interface of their handler, the `Delegation`. The tools are
the same in the server and in a worker. In the server the handler is the tree of agents itself; in a
worker it forwards each request to the host, as a host call whose `op` is the tag. A request needs
no approval: a started agent asks for approval of its own calls.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct, field

from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, Watch, free_plan
from culm.wire.agents import NAME_CHARS_MAX, PROMPT_CHARS_MAX, Name, Until
from culm.wire.codec import Json, encodable
from culm.wire.runs import CrashPolicy, Limits, Money, Tokens
from culm.wire.tools import ToolFacts

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


# --- the arguments that models write


AGENTS_MAX = 200  # The maximum in one call.

AGENT = """\
Start agents that work for you, each in a conversation of its own. Use it for work that is separate
from yours: a large search, parts that can be done in parallel, a review. Do not use it for a few
calls. Pass one assignment (prompt and its settings) or several, which run in parallel
(assignments). With wait you get the report of each; without it you get their ids, and agent_wait
gets the reports later."""

AGENT_WAIT = """\
Wait for agents that you started without waiting or sent more work to, and get their reports.
Without agents it waits for all of yours. If the time runs out it lists the agents that are still
working; they continue."""

AGENT_SEND = """\
Send a message to an agent that you started. If it is working, it reads the message before its next
step; if it has ended, the message is more work for it, and it still knows its earlier work. For an
agent that is not yours use mail."""

AGENT_STOP = """\
Stop agents that you started, and all agents that work for them. Their changes are kept."""

AGENT_LIST = """\
List the agents that work for you and those that work for them: their ids, their current activity,
what they wait for and their cost. For their reports use agent_wait."""

MAIL = """\
Write to another agent of this project, by its id, even if it is not working: the letter is kept
until it is read. send needs to and text; reply needs letter (the one you reply to) and text; status
needs letter, and reports the state of one you sent. For an agent that works for you agent_send is
faster."""

_Agents = Annotated[list[Name], Meta(max_length=AGENTS_MAX)]


class AgentArguments(AgentAssignment, frozen=True):
    """One assignment, or a list of them."""

    prompt: Annotated[
        str,
        Meta(
            description="The work, the expected report, and everything it has to know: it does "
            "not see this conversation.",
            max_length=PROMPT_CHARS_MAX,
        ),
    ] = ""
    assignments: Annotated[
        list[AgentAssignment],
        Meta(
            description="Instead of all of the above, several agents: each has a prompt and its "
            "settings.",
            max_length=ASSIGNMENTS_MAX,
        ),
    ] = field(default_factory=list[AgentAssignment])
    wait: Annotated[bool, Meta(description="Whether to wait until they have ended.")] = True


class AgentWaitArguments(Struct, frozen=True):
    agents: Annotated[_Agents, Meta(description="Their ids; none means all of yours.")] = field(
        default_factory=list[Name]
    )
    until: Annotated[
        Until, Meta(description="all have ended, any one has, or one has failed (first_error).")
    ] = "all"
    timeout_s: Annotated[
        float, Meta(description=f"Seconds, at most {TIMEOUT_S_MAX:g}.", ge=0, le=TIMEOUT_S_MAX)
    ] = 600.0


class AgentSendArguments(Struct, frozen=True):
    agent: Annotated[Name, Meta(description="Its id.", min_length=1)]
    message: Annotated[
        str, Meta(description="The message.", min_length=1, max_length=PROMPT_CHARS_MAX)
    ]
    wait: Annotated[bool, Meta(description="Whether to wait for its report.")] = False


class AgentStopArguments(Struct, frozen=True):
    agents: Annotated[_Agents, Meta(description="Their ids.", min_length=1)]


class AgentListArguments(Struct, frozen=True):
    agent: Annotated[Name, Meta(description="The id of one; only its own are listed.")] = ""


class MailArguments(Struct, frozen=True):
    action: Annotated[
        Literal["send", "reply", "status"], Meta(description="send, reply or status.")
    ]
    to: Annotated[Name, Meta(description="The id of the agent to write to.")] = ""
    kind: Annotated[
        Literal["task", "ask", "handoff"],
        Meta(description="task: work to do. ask: wants a reply. handoff: your work is now its."),
    ] = "task"
    text: Annotated[
        str, Meta(description="The text of the letter.", max_length=PROMPT_CHARS_MAX)
    ] = ""
    letter: Annotated[Name, Meta(description="The id of a letter.")] = ""


# --- parsing of arguments into requests


def read_start(raw: dict[str, Json]) -> StartAgents:
    arguments = parse_arguments(raw, AgentArguments)
    own = AgentAssignment(*(getattr(arguments, name) for name in AgentAssignment.__struct_fields__))
    if not arguments.assignments:
        if not arguments.prompt.strip():
            raise InvalidArguments("give a prompt, or assignments that each have one")
        return StartAgents([own], arguments.wait)
    if own != AgentAssignment(""):
        # Ignoring a `read_only` beside them would let all of them write.
        raise InvalidArguments(
            "beside assignments only wait is taken; put the rest into each of them"
        )
    if any(not one.prompt.strip() for one in arguments.assignments):
        raise InvalidArguments("every one of the assignments needs a prompt")
    return StartAgents(arguments.assignments, arguments.wait)


def read_wait(raw: dict[str, Json]) -> WaitForAgents:
    arguments = parse_arguments(raw, AgentWaitArguments)
    return WaitForAgents(arguments.agents, arguments.until, arguments.timeout_s)


def read_send(raw: dict[str, Json]) -> SteerAgent:
    arguments = parse_arguments(raw, AgentSendArguments)
    return SteerAgent(arguments.agent, arguments.message, arguments.wait)


def read_stop(raw: dict[str, Json]) -> StopAgents:
    return StopAgents(parse_arguments(raw, AgentStopArguments).agents)


def read_list(raw: dict[str, Json]) -> ListAgents:
    return ListAgents(parse_arguments(raw, AgentListArguments).agent)


def read_mail(raw: dict[str, Json]) -> MailRequest:
    arguments = parse_arguments(raw, MailArguments)
    needed = {
        "send": {"to": arguments.to, "text": arguments.text},
        "reply": {"letter": arguments.letter, "text": arguments.text},
        "status": {"letter": arguments.letter},
    }[arguments.action]
    if missing := [name for name, value in needed.items() if not value.strip()]:
        raise InvalidArguments(f"{arguments.action} needs {' and '.join(missing)}")
    return MailRequest(
        arguments.action, arguments.to, arguments.kind, arguments.text, arguments.letter
    )


# --- the tools


class AgentTool(Struct, frozen=True):
    """A tool that turns its arguments into one agent request."""

    spec: ToolSpec
    read: Callable[[dict[str, Json]], AgentRequest]  # Raises `InvalidArguments`.
    delegation: Delegation
    parallel: bool
    crash: CrashPolicy

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            request = encodable(self.read(call.arguments or {}))
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        return free_plan(call, lambda watch: self.delegation.do(call, request, watch))


_Kind = tuple[ToolSpec, Callable[[dict[str, Json]], AgentRequest], bool, CrashPolicy]
_DELEGATES = ToolFacts(kind="agent")
# Made once, because a worker makes its tools for every run. The first group is only for agents
# that may start others.
_STARTING: tuple[_Kind, ...] = (
    (
        make_spec(
            "agent",
            AGENT,
            AgentArguments,
            ToolFacts(kind="agent", shown_arguments=("prompt", "assignments")),
        ),
        read_start,
        True,
        "ask",
    ),
    (make_spec("agent_wait", AGENT_WAIT, AgentWaitArguments, _DELEGATES), read_wait, True, "again"),
    (
        make_spec(
            "agent_send",
            AGENT_SEND,
            AgentSendArguments,
            ToolFacts(kind="agent", shown_arguments=("agent", "message")),
        ),
        read_send,
        False,
        "ask",
    ),
    (
        make_spec("agent_stop", AGENT_STOP, AgentStopArguments, _DELEGATES),
        read_stop,
        False,
        "again",
    ),
)
_OTHERS: tuple[_Kind, ...] = (
    (make_spec("agent_list", AGENT_LIST, AgentListArguments, _DELEGATES), read_list, True, "again"),
    (
        make_spec(
            "mail",
            MAIL,
            MailArguments,
            ToolFacts(shown_arguments=("action", "to", "letter", "text")),
        ),
        read_mail,
        False,
        "ask",
    ),
)
SPECS = tuple(spec for spec, *_ in (*_STARTING, *_OTHERS))


def make_agent_tools(
    delegation: Delegation, *, may_start: bool, roles: str = ""
) -> dict[str, Tool]:
    """Make the tools of an agent; one that may not start others cannot wait for or stop any.

    `roles` describes the available roles to the model.
    """
    kinds = (*_STARTING, *_OTHERS) if may_start else _OTHERS
    return {
        spec.name: AgentTool(_with_roles(spec, roles), read, delegation, parallel, crash)
        for spec, read, parallel, crash in kinds
    }


def _with_roles(spec: ToolSpec, roles: str) -> ToolSpec:
    if spec.name != "agent" or not roles:
        return spec
    return msgspec.structs.replace(spec, description=f"{spec.description} Roles: {roles}")
