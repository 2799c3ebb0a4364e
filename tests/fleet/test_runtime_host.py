"""A worker's run and our own host: agent calls, budgets, questions and other host calls."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from culm.fleet.executor import CANCELLED, HostCallFailed, Outcome, RunEnded, completed, failed
from culm.fleet.provision import Capabilities, Identity, ProvisionContext, Secrets
from culm.model.base import ProviderAccess
from culm.model.choice import ChosenModel
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from tests.fleet.runtime_harness import (
    KEY,
    NEVER,
    FakeHost,
    RuntimeHarness,
    calling,
    extension_of,
    open_runtime_harness,
)
from tests.support import contract

NESTS = Capabilities(nested_spawn=True)
COUNTED = ScriptedUsage(input=1_000_000, output=100_000)


def with_host_calls(harness: RuntimeHarness, **replies: list[Json]) -> RuntimeHarness:
    """Give the harness a host that accepts calls and sends these replies."""
    harness.host = FakeHost(takes_calls=True, replies=dict(replies))
    return harness


# --- agent calls


@contract("INV-79")
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            {"content": "Two found it.", "metadata": '{"agents":["a"]}'},
            {
                "type": "tool_complete",
                "result": {"success": True, "result": "Two found it."},
                "metadata": '{"agents":["a"]}',
            },
        ),
        (
            {"content": "One failed.", "is_error": True},
            {"type": "tool_error", "error": "One failed.", "metadata": ""},
        ),
        (
            HostCallFailed("agents nest at most 2 deep"),
            {"type": "tool_error", "error": "agent: agents nest at most 2 deep", "metadata": ""},
        ),
        (
            {"words": 1},
            {
                "type": "tool_error",
                "error": "agent: the host's answer cannot be read",
                "metadata": "",
            },
        ),
    ],
)
async def test_agent_call_is_sent_to_the_host_and_its_reply_is_the_result(
    tmp_path: Path, reply: Json, expected: Mapping[str, Json]
) -> None:
    call = calling("agent", assignments=[{"prompt": "Look."}, {"prompt": "Seek.", "role": "r"}])
    async with open_runtime_harness(tmp_path, [call], capabilities=NESTS) as harness:
        with_host_calls(harness, agent=[reply])
        assert await harness.run() == completed("Done.")
        assert harness.host.of("agent") == [
            {
                "op": "agent",
                "assignments": [
                    {"prompt": "Look.", "limits": {}},
                    {"prompt": "Seek.", "role": "r", "limits": {}},
                ],
                "for": "call-agent",
            }
        ]
        (received,) = harness.sink.of("tool_complete", "tool_error")
        assert received == {**expected, "tool_call_id": "call-agent"}


async def test_run_canceled_while_waiting_for_agents_ends_at_once(
    tmp_path: Path,
) -> None:
    async with open_runtime_harness(
        tmp_path, [calling("agent_wait")], capabilities=NESTS
    ) as harness:
        with_host_calls(harness)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.host.is_asked.wait()
            harness.cancel.set()
        assert run.result() == CANCELLED
        assert harness.sink.events[-1]["type"] == "cancelled"


AGENT_TOOLS = {"agent", "agent_wait", "agent_send", "agent_stop", "agent_list", "mail"}


@contract("FLEET-100")
@pytest.mark.parametrize(
    ("host_kind", "capabilities", "depth", "offered"),
    [
        ("foreign", NESTS, 1, set[str]()),
        ("ours", NESTS, 3, {*AGENT_TOOLS, "question"}),
        ("ours", NESTS, 4, {"agent_list", "mail", "question"}),
        ("ours", NEVER, 1, {"agent_list", "mail", "question"}),
        ("ours", Capabilities(nested_spawn=True, max_spawn_depth=2), 2, {"agent_list", "mail"}),
    ],
)
async def test_agent_tools_are_offered_only_where_host_and_depth_allow(
    tmp_path: Path, host_kind: str, capabilities: Capabilities, depth: int, offered: set[str]
) -> None:
    culm = extension_of(tmp_path, questions="question" in offered or host_kind == "foreign")
    fields: dict[str, Json] = {"capabilities": capabilities, "culm": culm}
    async with open_runtime_harness(
        tmp_path, identity=Identity("child-1", depth=depth), **fields
    ) as harness:
        harness.host.takes_calls = host_kind == "ours"
        assert await harness.run() == completed("Done.")
        tools = {tool["function"]["name"] for tool in harness.model.requests[0].body["tools"]}
        assert tools & {*AGENT_TOOLS, "question"} == offered


# --- budgets


def chosen_at(url: str) -> ChosenModel:
    return ChosenModel(
        "mine",
        SelectedModel("big-1", "mine", max_tokens=500),
        ModelInfo(id="big-1", cost_per_1m_in=2.0, cost_per_1m_out=10.0, context_window=10_000_000),
        ProviderAccess("openai-compat", "", url, KEY, {"X-Team": "seven"}),
        flat_rate=False,
        system_prefix="You are of mine.",
    )


async def test_model_request_is_reserved_first_and_its_usage_reported(
    tmp_path: Path,
) -> None:
    script = Script([calling("ls"), Reply(text="All.", usage=COUNTED)])
    async with open_model_server(script) as model:
        culm = extension_of(
            tmp_path,
            chosen=msgspec.to_builtins(chosen_at(model.url)),
            prompt="You only look.",
            context_paths=ProvisionContext(project=["RULES.md"]),
        )
        fields: dict[str, Json] = {"model": None, "secrets": Secrets(), "culm": culm}
        async with open_runtime_harness(tmp_path, **fields) as harness:
            (harness.folder / "RULES.md").write_text("Never guess.")
            (harness.folder / "AGENTS.md").write_text("Not read.")
            assert await with_host_calls(harness).run() == completed("All.")
            # The model and its settings are the parent's choice.
            asked = model.requests[-1]
            assert asked.headers["X-Team"] == "seven"
            assert asked.headers["Authorization"] == f"Bearer {KEY}"
            assert (asked.body["model"], asked.body["max_tokens"]) == ("big-1", 500)
            system = asked.body["messages"][0]["content"]
            assert system.startswith("You are of mine.")
            assert system.endswith("You only look.")
            assert "Never guess." in system
            assert "Not read." not in system
            reserved = harness.host.of("reserve")
            assert [sorted(call) for call in reserved] == [["cost", "op", "tokens"]] * 2
            assert all(call["tokens"] > 500 and call["cost"] > 0 for call in reserved)
            first, second = harness.sink.of("usage_reported")
            assert first["reservation"] == "r-1"
            assert second == {
                "type": "usage_reported",
                "reservation": "r-2",
                "used": {
                    "prompt_tokens": 1_000_000,
                    "completion_tokens": 100_000,
                    "cost": 3.0,
                    "estimated": False,
                    "cached_tokens": 0,
                },
            }
            types = harness.sink.types()
            for number in (n for n, type_ in enumerate(types) if type_ == "usage_reported"):
                assert types[number - 1] in ("session_message_written", "token")
                assert types[number + 1] == "token_budget_updated"
                assert types[number + 2] == "session_message_written"


@contract("FLEET-P6")
@pytest.mark.parametrize(
    ("reply", "outcome", "reason"),
    [
        (
            {"refused": "The run it works for has used its 2 USD."},
            failed("limit:budget: The run it works for has used its 2 USD."),
            "budget",
        ),
        (
            HostCallFailed("no such run"),
            failed("Budget not known: no budget could be reserved: no such run"),
            None,
        ),
        (RunEnded(), CANCELLED, None),
    ],
)
async def test_refused_reservation_ends_the_run_without_a_model_request(
    tmp_path: Path, reply: Json, outcome: Outcome, reason: str | None
) -> None:
    async with open_runtime_harness(tmp_path, [calling("ls")]) as harness:
        with_host_calls(harness, reserve=[{"id": "r-1"}, reply])
        assert await harness.run() == outcome
        assert len(harness.model.requests) == 1
        assert [event["reservation"] for event in harness.sink.of("usage_reported")] == ["r-1"]
        last = harness.sink.of("session_message_written")[-1]["message"]
        assert last["role"] == "assistant"
        assert last["parts"][-1]["data"].get("culm_reason") == reason
        assert harness.sink.events[-1].get("message", "") == (
            outcome.error or "User canceled request"
        )


# --- questions to people


QUESTION: dict[str, Json] = {"type": "yes_no", "question": "Go on?", "description": "Or stop."}
ASKED: dict[str, Json] = {**QUESTION, "id": "q-1"}


@pytest.mark.parametrize(
    ("reply", "expected", "outcome"),
    [
        (
            {
                "request": {
                    "id": "b-1",
                    "session_id": "s",
                    "tool_call_id": "call-question",
                    "questions": [ASKED],
                },
                "responses": [{"request_id": "q-1", "yes": True}],
            },
            "Go on?\nyes",
            completed("Done."),
        ),
        ({"declined": "User cancelled this question"}, "User cancelled this question", None),
        (
            HostCallFailed("nobody is there"),
            "This cannot be asked: nobody is there",
            completed("Done."),
        ),
    ],
)
async def test_question_is_asked_by_the_host_and_its_answer_is_the_result(
    tmp_path: Path, reply: Json, expected: str, outcome: Outcome | None
) -> None:
    culm = extension_of(tmp_path, questions=True)
    call = calling("question", text="Hm.", questions=[QUESTION])
    async with open_runtime_harness(tmp_path, [call], culm=culm) as harness:
        with_host_calls(harness, question=[reply])
        assert await harness.run() == (outcome or completed("Hm."))
        (asked,) = harness.host.of("question")
        assert asked == {
            "op": "question",
            "tool_call_id": "call-question",
            "questions": [{**QUESTION, "id": "", "label": "", "choices": []}],
            "confirm_title": "",
            "confirm_description": "",
            "for": "call-question",
        }
        (event,) = harness.sink.of("tool_complete", "tool_error")
        assert expected == (event.get("error") or event["result"]["result"])


# --- hooks and custom tools


@contract("INV-76")
async def test_workspace_hooks_and_custom_tools_apply_to_a_worker(tmp_path: Path) -> None:
    deny = """echo '{"decision":"deny","reason":"Not with me."}'"""
    rewrite = """echo '{"updated_input":{"name":"Bob"},"context":"It was Ann."}'"""
    culm = extension_of(
        tmp_path,
        hooks=[
            {"command": deny, "matcher": "^bash$"},
            {"command": rewrite, "matcher": "^greet$"},
        ],
        own_tools={
            "greet": {"command": "read line; echo $line", "description": "Greets.", "is_free": True}
        },
    )
    calls = [
        ScriptedCall(name="bash", input={"command": "touch made"}, id="a"),
        ScriptedCall(name="greet", input={"name": "Ann"}, id="b"),
    ]
    async with open_runtime_harness(tmp_path, [Reply(calls=calls)], culm=culm) as harness:
        assert await harness.run() == completed("Done.")
        refused, greeted = harness.sink.of("tool_error", "tool_complete")
        assert (refused["tool_call_id"], refused["error"]) == ("a", "Not with me.")
        assert '"decision":"deny"' in refused["metadata"]
        assert not (harness.folder / "made").exists()
        result = greeted["result"]["result"]
        assert '"name":"Bob"' in result
        assert result.endswith("It was Ann.")


async def test_host_receives_changed_files_of_successful_calls_only(
    tmp_path: Path,
) -> None:
    edit: dict[str, Json] = {"old_string": "x", "new_string": "y"}
    calls = [
        ScriptedCall(name="write", input={"file_path": "a.txt", "content": "x"}, id="a"),
        ScriptedCall(name="edit", input={"file_path": "a.txt", **edit}, id="b"),
        ScriptedCall(name="edit", input={"file_path": "a.txt", **edit}, id="c"),
        ScriptedCall(name="view", input={"file_path": "a.txt"}, id="d"),
    ]
    async with open_runtime_harness(tmp_path, [Reply(calls=calls)]) as harness:
        assert await harness.run() == completed("Done.")
        path = str(harness.folder.resolve() / "a.txt")
        events = harness.sink.of("tool_start", "files_changed", "tool_complete", "tool_error")
        assert [event.get("tool_call_id") or event["paths"] for event in events] == [
            *("a", [path], "a"),
            *("b", [path], "b"),
            *("c", "c"),
            *("d", "d"),
        ]
