"""`agent`, `agent_wait`, `agent_send`, `agent_stop`, `agent_list`, `mail`: having others work.

Owns how a model asks for it, and reads what it wrote into an errand. Doing it is the delegation's
(`delegation.py`). Nobody need be asked about an errand: whoever is started asks for what it does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from culm.model.base import ToolSpec
from culm.tools.agent_requests import (
    ASSIGNMENTS_MAX,
    TIMEOUT_S_MAX,
    AgentAssignment,
    AgentRequest,
    Delegation,
    ListAgents,
    MailRequest,
    StartAgents,
    SteerAgent,
    StopAgents,
    WaitForAgents,
)
from culm.tools.arguments import InvalidArguments, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, free_plan
from culm.wire.agents import PROMPT_CHARS_MAX, Name, Until
from culm.wire.codec import Json, encodable
from culm.wire.runs import CrashPolicy

AGENTS_MAX = 200  # Named in one call.

AGENT = """\
Have agents work for you, each in a conversation of its own. Use it for work that can be told apart
from yours: a search through much, parts that can be done side by side, a review. Not for what takes
you a few calls. Give one (prompt and what belongs to it) or several, which work side by side
(assignments). With wait you get what each reports; without, their ids, and agent_wait later gets
the reports."""

AGENT_WAIT = """\
Wait for agents that you did not wait for when you started them, or sent more to do, and get what
they report. Without agents it waits for all of yours. If the time runs out it says who still works;
they go on."""

AGENT_SEND = """\
Say something to an agent that you started. If it works, it reads this before its next step; if it
has ended, it takes this as more work and still knows all it did. For an agent that is not yours use
mail."""

AGENT_STOP = """\
Stop agents that you started, and all that work for them. What they have done stays done."""

AGENT_LIST = """\
List the agents that work for you and those that work for them: their ids, what they are doing, what
they wait for and what they cost. For what they report use agent_wait."""

MAIL = """\
Write to another agent of this project, by its id, also when it is not at work: the letter is kept
until it is read. send needs to and text; reply needs letter (the one you answer) and text; status
needs letter, and says what became of one you sent. For an agent that works for you agent_send is
quicker."""

_Agents = Annotated[list[Name], Meta(max_length=AGENTS_MAX)]


class AgentArguments(AgentAssignment, frozen=True):
    """One assignment as it is, or several of them."""

    prompt: Annotated[
        str,
        Meta(
            description="What the agent shall do and report, and all it has to know: it sees "
            "nothing of this conversation.",
            max_length=PROMPT_CHARS_MAX,
        ),
    ] = ""
    assignments: Annotated[
        list[AgentAssignment],
        Meta(
            description="Instead of all of the above, several agents: each has a prompt and what "
            "belongs to it.",
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
        str, Meta(description="What to tell it.", min_length=1, max_length=PROMPT_CHARS_MAX)
    ]
    wait: Annotated[bool, Meta(description="Whether to wait for what it reports then.")] = False


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
    text: Annotated[str, Meta(description="What to write.", max_length=PROMPT_CHARS_MAX)] = ""
    letter: Annotated[Name, Meta(description="The id of a letter.")] = ""


# --- what a model wrote, as an errand


def read_start(given: dict[str, Json]) -> StartAgents:
    said = parse_arguments(given, AgentArguments)
    own = AgentAssignment(*(getattr(said, name) for name in AgentAssignment.__struct_fields__))
    if not said.assignments:
        if not said.prompt.strip():
            raise InvalidArguments("give a prompt, or assignments that each have one")
        return StartAgents([own], said.wait)
    if own != AgentAssignment(""):
        # To pass over a `read_only` beside them would let them all write.
        raise InvalidArguments(
            "beside assignments only wait is taken; put the rest into each of them"
        )
    if any(not one.prompt.strip() for one in said.assignments):
        raise InvalidArguments("every one of the assignments needs a prompt")
    return StartAgents(said.assignments, said.wait)


def read_wait(given: dict[str, Json]) -> WaitForAgents:
    said = parse_arguments(given, AgentWaitArguments)
    return WaitForAgents(said.agents, said.until, said.timeout_s)


def read_send(given: dict[str, Json]) -> SteerAgent:
    said = parse_arguments(given, AgentSendArguments)
    return SteerAgent(said.agent, said.message, said.wait)


def read_stop(given: dict[str, Json]) -> StopAgents:
    return StopAgents(parse_arguments(given, AgentStopArguments).agents)


def read_list(given: dict[str, Json]) -> ListAgents:
    return ListAgents(parse_arguments(given, AgentListArguments).agent)


def read_mail(given: dict[str, Json]) -> MailRequest:
    said = parse_arguments(given, MailArguments)
    needed = {
        "send": {"to": said.to, "text": said.text},
        "reply": {"letter": said.letter, "text": said.text},
        "status": {"letter": said.letter},
    }[said.action]
    if missing := [name for name, value in needed.items() if not value.strip()]:
        raise InvalidArguments(f"{said.action} needs {' and '.join(missing)}")
    return MailRequest(said.action, said.to, said.kind, said.text, said.letter)


# --- the tools


@dataclass(frozen=True, slots=True)
class AgentTool:
    spec: ToolSpec
    read: Callable[[dict[str, Json]], AgentRequest]  # Raises `BadArguments`.
    delegation: Delegation
    parallel: bool
    crash: CrashPolicy

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            request = encodable(self.read(call.arguments or {}))
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        return free_plan(call, lambda watch: self.delegation.do(call, request, watch))


# Their schemas are made once: a worker makes its tools for every run.
_STARTING = (
    partial(
        AgentTool,
        make_spec("agent", AGENT, AgentArguments),
        read_start,
        parallel=True,
        crash="ask",
    ),
    partial(
        AgentTool,
        make_spec("agent_wait", AGENT_WAIT, AgentWaitArguments),
        read_wait,
        parallel=True,
        crash="again",
    ),
    partial(
        AgentTool,
        make_spec("agent_send", AGENT_SEND, AgentSendArguments),
        read_send,
        parallel=False,
        crash="ask",
    ),
    partial(
        AgentTool,
        make_spec("agent_stop", AGENT_STOP, AgentStopArguments),
        read_stop,
        parallel=False,
        crash="again",
    ),
)
_OTHERS = (
    partial(
        AgentTool,
        make_spec("agent_list", AGENT_LIST, AgentListArguments),
        read_list,
        parallel=True,
        crash="again",
    ),
    partial(
        AgentTool,
        make_spec("mail", MAIL, MailArguments),
        read_mail,
        parallel=False,
        crash="ask",
    ),
)


def make_agent_tools(
    delegation: Delegation, *, may_start: bool, roles: str = ""
) -> dict[str, Tool]:
    """Those of an agent; one that may start no others has nobody to wait for, or to stop.

    `roles` is what a model is told of those that there are.
    """
    kinds = (*_STARTING, *_OTHERS) if may_start else _OTHERS
    tools = [kind(delegation=delegation) for kind in kinds]
    return {tool.spec.name: _with_roles(tool, roles) for tool in tools}


def _with_roles(tool: AgentTool, roles: str) -> AgentTool:
    if tool.spec.name != "agent" or not roles:
        return tool
    described = f"{tool.spec.description} Roles: {roles}"
    return replace(tool, spec=msgspec.structs.replace(tool.spec, description=described))
