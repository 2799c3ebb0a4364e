"""A worker's run and a host of ours: errands, budgets, questions, and what it says beside them."""

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
from tests.fleet.runtime_stage import KEY, NEVER, Above, Stage, calling, extension_of, open_stage
from tests.support import contract

NESTS = Capabilities(nested_spawn=True)
COUNTED = ScriptedUsage(input=1_000_000, output=100_000)


def ours(stage: Stage, **replies: list[Json]) -> Stage:
    """With a host that takes calls, and replies so."""
    stage.above = Above(takes_calls=True, replies=dict(replies))
    return stage


# --- errands


@contract("INV-79")
@pytest.mark.parametrize(
    ("reply", "told"),
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
async def test_an_errand_of_a_worker_is_its_hosts_and_the_reply_is_what_the_model_reads(
    tmp_path: Path, reply: Json, told: Mapping[str, Json]
) -> None:
    call = calling("agent", assignments=[{"prompt": "Look."}, {"prompt": "Seek.", "role": "r"}])
    async with open_stage(tmp_path, [call], capabilities=NESTS) as stage:
        ours(stage, agent=[reply])
        assert await stage.run() == completed("Done.")
        assert stage.above.of("agent") == [
            {
                "op": "agent",
                "assignments": [
                    {"prompt": "Look.", "limits": {}},
                    {"prompt": "Seek.", "role": "r", "limits": {}},
                ],
                "for": "call-agent",
            }
        ]
        (heard,) = stage.ear.of("tool_complete", "tool_error")
        assert heard == {**told, "tool_call_id": "call-agent"}


async def test_a_run_that_is_cancelled_while_it_waits_for_agents_ends_at_once(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, [calling("agent_wait")], capabilities=NESTS) as stage:
        ours(stage)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.above.is_asked.wait()
            stage.cancel.set()
        assert run.result() == CANCELLED
        assert stage.ear.events[-1]["type"] == "cancelled"


AGENT_TOOLS = {"agent", "agent_wait", "agent_send", "agent_stop", "agent_list", "mail"}


@contract("FLEET-100")
@pytest.mark.parametrize(
    ("host", "capabilities", "depth", "offered"),
    [
        ("foreign", NESTS, 1, set[str]()),
        ("ours", NESTS, 3, {*AGENT_TOOLS, "question"}),
        ("ours", NESTS, 4, {"agent_list", "mail", "question"}),
        ("ours", NEVER, 1, {"agent_list", "mail", "question"}),
        ("ours", Capabilities(nested_spawn=True, max_spawn_depth=2), 2, {"agent_list", "mail"}),
    ],
)
async def test_an_agent_is_offered_others_only_where_its_host_and_its_depth_allow_them(
    tmp_path: Path, host: str, capabilities: Capabilities, depth: int, offered: set[str]
) -> None:
    culm = extension_of(tmp_path, questions="question" in offered or host == "foreign")
    fields: dict[str, Json] = {"capabilities": capabilities, "culm": culm}
    async with open_stage(tmp_path, identity=Identity("child-1", depth=depth), **fields) as stage:
        stage.above.takes_calls = host == "ours"
        assert await stage.run() == completed("Done.")
        tools = {tool["function"]["name"] for tool in stage.model.requests[0].body["tools"]}
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


async def test_each_question_is_reserved_first_and_reported_before_what_follows_at_the_chosen_price(
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
        async with open_stage(tmp_path, **fields) as stage:
            (stage.folder / "RULES.md").write_text("Never guess.")
            (stage.folder / "AGENTS.md").write_text("Not read.")
            assert await ours(stage).run() == completed("All.")
            # Who was asked, and how, is what the parent chose.
            asked = model.requests[-1]
            assert asked.headers["X-Team"] == "seven"
            assert asked.headers["Authorization"] == f"Bearer {KEY}"
            assert (asked.body["model"], asked.body["max_tokens"]) == ("big-1", 500)
            system = asked.body["messages"][0]["content"]
            assert system.startswith("You are of mine.")
            assert system.endswith("You only look.")
            assert "Never guess." in system
            assert "Not read." not in system
            reserved = stage.above.of("reserve")
            assert [sorted(call) for call in reserved] == [["cost", "op", "tokens"]] * 2
            assert all(call["tokens"] > 500 and call["cost"] > 0 for call in reserved)
            first, second = stage.ear.of("usage_reported")
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
            types = stage.ear.types()
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
            failed("Budget not known: nothing could be set aside: no such run"),
            None,
        ),
        (RunEnded(), CANCELLED, None),
    ],
)
async def test_a_question_that_is_not_granted_is_not_asked_and_ends_the_run_with_its_reason(
    tmp_path: Path, reply: Json, outcome: Outcome, reason: str | None
) -> None:
    async with open_stage(tmp_path, [calling("ls")]) as stage:
        ours(stage, reserve=[{"id": "r-1"}, reply])
        assert await stage.run() == outcome
        assert len(stage.model.requests) == 1
        assert [event["reservation"] for event in stage.ear.of("usage_reported")] == ["r-1"]
        last = stage.ear.of("session_message_written")[-1]["message"]
        assert last["role"] == "assistant"
        assert last["parts"][-1]["data"].get("culm_reason") == reason
        assert stage.ear.events[-1].get("message", "") == (outcome.error or "User canceled request")


# --- people


QUESTION: dict[str, Json] = {"type": "yes_no", "question": "Go on?", "description": "Or stop."}
ASKED: dict[str, Json] = {**QUESTION, "id": "q-1"}


@pytest.mark.parametrize(
    ("reply", "read", "outcome"),
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
async def test_a_question_to_people_is_asked_by_the_host_and_the_answer_is_read(
    tmp_path: Path, reply: Json, read: str, outcome: Outcome | None
) -> None:
    culm = extension_of(tmp_path, questions=True)
    call = calling("question", text="Hm.", questions=[QUESTION])
    async with open_stage(tmp_path, [call], culm=culm) as stage:
        ours(stage, question=[reply])
        assert await stage.run() == (outcome or completed("Hm."))
        (asked,) = stage.above.of("question")
        assert asked == {
            "op": "question",
            "tool_call_id": "call-question",
            "questions": [{**QUESTION, "id": "", "label": "", "choices": []}],
            "confirm_title": "",
            "confirm_description": "",
            "for": "call-question",
        }
        (told,) = stage.ear.of("tool_complete", "tool_error")
        assert read == (told.get("error") or told["result"]["result"])


# --- what the configuration adds


@contract("INV-76")
async def test_hooks_and_own_tools_of_the_workspace_hold_for_a_worker_too(tmp_path: Path) -> None:
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
    async with open_stage(tmp_path, [Reply(calls=calls)], culm=culm) as stage:
        assert await stage.run() == completed("Done.")
        refused, greeted = stage.ear.of("tool_error", "tool_complete")
        assert (refused["tool_call_id"], refused["error"]) == ("a", "Not with me.")
        assert '"decision":"deny"' in refused["metadata"]
        assert not (stage.folder / "made").exists()
        said = greeted["result"]["result"]
        assert '"name":"Bob"' in said
        assert said.endswith("It was Ann.")


async def test_a_host_hears_which_files_a_call_has_changed_and_of_one_that_failed_nothing(
    tmp_path: Path,
) -> None:
    edit: dict[str, Json] = {"old_string": "x", "new_string": "y"}
    calls = [
        ScriptedCall(name="write", input={"file_path": "a.txt", "content": "x"}, id="a"),
        ScriptedCall(name="edit", input={"file_path": "a.txt", **edit}, id="b"),
        ScriptedCall(name="edit", input={"file_path": "a.txt", **edit}, id="c"),
        ScriptedCall(name="view", input={"file_path": "a.txt"}, id="d"),
    ]
    async with open_stage(tmp_path, [Reply(calls=calls)]) as stage:
        assert await stage.run() == completed("Done.")
        path = str(stage.folder.resolve() / "a.txt")
        told = stage.ear.of("tool_start", "files_changed", "tool_complete", "tool_error")
        assert [event.get("tool_call_id") or event["paths"] for event in told] == [
            *("a", [path], "a"),
            *("b", [path], "b"),
            *("c", "c"),
            *("d", "d"),
        ]
