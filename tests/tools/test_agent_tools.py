"""The agent tools: a call becomes an agent request, or an error that says what is valid."""

from dataclasses import dataclass, field

import msgspec
import pytest

from culm.tools.agent_tools import (
    AGENTS_MAX,
    ASSIGNMENTS_MAX,
    TIMEOUT_S_MAX,
    AgentAssignment,
    AgentRequest,
    ListAgents,
    MailRequest,
    StartAgents,
    SteerAgent,
    StopAgents,
    WaitForAgents,
    make_agent_tools,
)
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, Watch
from culm.wire.agents import PROMPT_CHARS_MAX
from culm.wire.codec import Json, decode, encode
from culm.wire.runs import Limits
from tests.support import run_call


@dataclass(eq=False)
class RecordingDelegation:
    """A delegation that records the requests it gets."""

    requests: list[tuple[CallRequest, AgentRequest]] = field(
        default_factory=list[tuple[CallRequest, AgentRequest]]
    )

    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        self.requests.append((call, request))
        return CallResult("It is done.", metadata='{"agents":[]}')


def call_of(name: str, given: dict[str, Json]) -> CallRequest:
    return CallRequest("call-1", name, "", given, "session-1")


def tool_of(name: str, delegation: RecordingDelegation | None = None) -> Tool:
    return make_agent_tools(delegation or RecordingDelegation(), may_start=True)[name]


async def request_of(name: str, given: dict[str, Json]) -> AgentRequest:
    delegation = RecordingDelegation()
    call = call_of(name, given)
    result = await run_call(tool_of(name, delegation), call)
    assert result == CallResult("It is done.", metadata='{"agents":[]}')
    ((made, asked),) = delegation.requests
    assert made == call
    # It survives encoding as a host call.
    assert decode(encode(asked), type(asked)) == asked
    return asked


ONE: dict[str, Json] = {
    "prompt": "Look for it.",
    "name": "seeker",
    "role": "explorer",
    "model": "demo/demo-1",
    "tools": ["view", "grep"],
    "read_only": True,
    "worktree": True,
    "limits": {"wall_s": 60, "steps": 5, "tokens": 1000, "cost": 0.5},
}
SEEKER = AgentAssignment(
    "Look for it.",
    "seeker",
    "explorer",
    "demo/demo-1",
    ["view", "grep"],
    read_only=True,
    worktree=True,
    limits=Limits(60, 5, 1000, 0.5),
)


@pytest.mark.parametrize(
    ("name", "given", "asked"),
    [
        ("agent", {"prompt": "Go."}, StartAgents([AgentAssignment("Go.")])),
        # Models write numbers and booleans as text, and null or nothing for omitted values.
        (
            "agent",
            {"prompt": "Go.", "wait": "false", "assignments": []},
            StartAgents([AgentAssignment("Go.")], wait=False),
        ),
        ("agent", ONE, StartAgents([SEEKER])),
        (
            "agent",
            {
                "assignments": [ONE, {"prompt": "Go.", "role": None}],
                "prompt": "",
                "role": None,
                "wait": False,
            },
            StartAgents([SEEKER, AgentAssignment("Go.")], wait=False),
        ),
        (
            "agent",
            {"prompt": "half \ud83d of it"},
            StartAgents([AgentAssignment("half \ufffd of it")]),
        ),
        ("agent_wait", {}, WaitForAgents()),
        (
            "agent_wait",
            {"agents": ["a", "b"], "until": "first_error", "timeout_s": "1.5"},
            WaitForAgents(["a", "b"], "first_error", 1.5),
        ),
        ("agent_send", {"agent": "a", "message": "Stop that."}, SteerAgent("a", "Stop that.")),
        (
            "agent_send",
            {"agent": "a", "message": "More.", "wait": True},
            SteerAgent("a", "More.", wait=True),
        ),
        ("agent_stop", {"agents": ["a", "b"]}, StopAgents(["a", "b"])),
        ("agent_list", {}, ListAgents()),
        ("agent_list", {"agent": "a"}, ListAgents("a")),
        (
            "mail",
            {"action": "send", "to": "a", "text": "Hi."},
            MailRequest("send", "a", "task", "Hi."),
        ),
        (
            "mail",
            {"action": "send", "to": "a", "kind": "ask", "text": "Hm?"},
            MailRequest("send", "a", "ask", "Hm?"),
        ),
        (
            "mail",
            {"action": "reply", "letter": "l", "text": "Yes."},
            MailRequest("reply", text="Yes.", letter="l"),
        ),
        ("mail", {"action": "status", "letter": "l"}, MailRequest("status", letter="l")),
    ],
)
async def test_a_call_becomes_a_request_and_its_answer_the_result(
    name: str, given: dict[str, Json], asked: AgentRequest
) -> None:
    assert await request_of(name, given) == asked


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("agent", {}, "give a prompt, or assignments that each have one"),
        ("agent", {"prompt": "  "}, "give a prompt"),
        ("agent", {"prompt": "x" * (PROMPT_CHARS_MAX + 1)}, "everything it has to know"),
        ("agent", {"prompt": "Go.", "tools": "view"}, "The only tools it may use"),
        ("agent", {"prompt": "Go.", "limits": {"steps": "many"}}, "wall_s, steps, tokens, cost"),
        ("agent", {"prompt": "Go.", "assignments": [ONE]}, "beside assignments only wait is taken"),
        ("agent", {"read_only": True, "assignments": [ONE]}, "put the rest into each of them"),
        ("agent", {"assignments": [{"role": "worker"}]}, "`prompt` - assignments[0]"),
        (
            "agent",
            {"assignments": [{"prompt": " "}]},
            "every one of the assignments needs a prompt",
        ),
        ("agent", {"assignments": [{"prompt": "x"}] * (ASSIGNMENTS_MAX + 1)}, "several agents"),
        ("agent_wait", {"until": "some"}, "all have ended, any one has, or one has failed"),
        ("agent_wait", {"timeout_s": TIMEOUT_S_MAX + 1}, "at most 3600"),
        ("agent_wait", {"timeout_s": -1}, "at most 3600"),
        ("agent_wait", {"agents": ["a"] * (AGENTS_MAX + 1)}, "Their ids"),
        ("agent_send", {"agent": "a"}, "missing required field `message`"),
        ("agent_send", {"agent": "", "message": "x"}, "Its id"),
        ("agent_send", {"agent": "a" * 257, "message": "x"}, "Its id"),
        ("agent_stop", {"agents": []}, "Their ids"),
        ("agent_list", {"agent": 7}, "The id of one"),
        ("mail", {"action": "burn"}, "send, reply or status"),
        ("mail", {"action": "send", "to": "a"}, "send needs text"),
        ("mail", {"action": "send"}, "send needs to and text"),
        ("mail", {"action": "reply", "text": "x"}, "reply needs letter"),
        ("mail", {"action": "status"}, "status needs letter"),
        ("mail", {"action": "send", "to": "a", "text": "x", "kind": "reply"}, "handoff"),
    ],
)
async def test_invalid_arguments_are_refused_with_what_is_valid(
    name: str, given: dict[str, Json], message: str
) -> None:
    delegation = RecordingDelegation()
    result = await tool_of(name, delegation).prepare(call_of(name, given))
    assert isinstance(result, CallResult)
    assert result.is_error
    assert result.content.startswith(f"{name}: ")
    assert message in result.content
    assert delegation.requests == []


async def test_an_agent_call_needs_no_approval_and_does_nothing_before_it_runs() -> None:
    delegation = RecordingDelegation()
    plan = await tool_of("agent", delegation).prepare(call_of("agent", {"prompt": "Go."}))
    assert isinstance(plan, CallPlan)
    assert plan.action.is_free
    assert delegation.requests == []


def test_each_agent_tool_declares_its_parallelism_crash_rule_and_schema() -> None:
    tools = make_agent_tools(RecordingDelegation(), may_start=True)
    assert {name: (tool.parallel, tool.crash) for name, tool in tools.items()} == {
        "agent": (True, "ask"),
        "agent_wait": (True, "again"),
        "agent_send": (False, "ask"),
        "agent_stop": (False, "again"),
        "agent_list": (True, "again"),
        "mail": (False, "ask"),
    }
    assert [*make_agent_tools(RecordingDelegation(), may_start=False)] == ["agent_list", "mail"]
    assert {name: tool.spec.parameters["required"] for name, tool in tools.items()} == {
        "agent": [],
        "agent_wait": [],
        "agent_send": ["agent", "message"],
        "agent_stop": ["agents"],
        "agent_list": [],
        "mail": ["action"],
    }
    properties = tools["agent"].spec.parameters["properties"]
    # A Crush client shows such a call by its first argument, the prompt.
    assert next(iter(properties)) == "prompt"
    assert properties["assignments"]["items"]["required"] == ["prompt"]
    assert b"$ref" not in msgspec.json.encode([tool.spec for tool in tools.values()])
