"""The runtime executor: the loop of every run, streamed to a host."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.fleet.executor import CANCELLED, Outcome, RunEnded, SteerMessage, completed, failed
from culm.fleet.provision import (
    BadProvision,
    Credential,
    CulmExtension,
    ModelName,
    ProvisionLimits,
    Secrets,
)
from culm.fleet.worker.executors.bamboo_runtime import BambooRuntime
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.executors.runtime_settings import fitting_effort
from culm.ids import Ids
from culm.processes.base import NoProcesses
from culm.testing.script import Reply, Script, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json, encode
from culm.wire.config import Model
from tests.fleet.runtime_harness import (
    KEY,
    Event,
    FakeCancelToken,
    RecordingEventSink,
    RuntimeHarness,
    calling,
    open_runtime_harness,
    provision_of,
)
from tests.support import WAIT_S, contract

COUNTED = ScriptedUsage(input=100, output=10)


# --- events for the host


async def test_run_streams_its_answer_then_the_message_and_usage(
    tmp_path: Path,
) -> None:
    reply = Reply(reasoning="Let me see.", text="It is fine.", usage=COUNTED)
    async with open_runtime_harness(tmp_path, [reply]) as harness:
        spec = {"activation_run_id": "run-7", "logical_session": SESSION}
        assert await harness.run("How is it?", **spec) == completed("It is fine.")
        assert harness.sink.types() == [
            "execution_started",
            "runner_progress",
            "session_message_written",
            "reasoning_token",
            "token",
            "token_budget_updated",
            "session_message_written",
            "complete",
        ]
        assert (harness.sink.text("reasoning_token"), harness.sink.text()) == (
            "Let me see.",
            "It is fine.",
        )
        started, progress = harness.sink.events[:2]
        assert (started["run_id"], started["session_id"]) == ("run-7", "session-7")
        assert started["started_at"] == "2027-01-15T08:00:00.000Z"
        assert progress == {
            "type": "runner_progress",
            "session_id": "session-7",
            "round_count": 1,
        }
        opened, written = (event["message"] for event in harness.sink.of("session_message_written"))
        assert (opened["parts"], opened["rev"]) == ([], 0)
        assert (written["id"], written["rev"], written["role"]) == (opened["id"], 1, "assistant")
        assert (written["model"], written["provider"]) == ("demo-1", "demo")
        assert [part["type"] for part in written["parts"]] == ["reasoning", "text", "finish"]
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        usage |= {"cost": 0.0, "estimated": False}
        assert harness.sink.events[-1] == {"type": "complete", "usage": usage}
        assert harness.model_messages() == [{"role": "user", "content": "How is it?"}]


SESSION: Json = {"session_id": "session-7", "root_session_id": "session-1"}


async def test_tool_calls_are_streamed_and_results_reach_the_model(
    tmp_path: Path,
) -> None:
    calls = [
        ScriptedCall(name="bash", input={"command": "echo one; exit 3"}, id="a"),
        ScriptedCall(name="nothing", input={}, id="b"),
    ]
    async with open_runtime_harness(tmp_path, [Reply(text="I look.", calls=calls)]) as harness:
        assert await harness.run() == completed("Done.")
        events = harness.sink.of("tool_start", "tool_token", "tool_complete", "tool_error")
        assert [(event["type"], event["tool_call_id"]) for event in events] == [
            ("tool_start", "a"),
            ("tool_token", "a"),
            ("tool_complete", "a"),
            ("tool_start", "b"),
            ("tool_error", "b"),
        ]
        assert events[0]["tool_name"] == "bash"
        assert events[0]["arguments"] == {"command": "echo one; exit 3"}
        assert events[1]["content"] == "one\n"
        result = events[2]["result"]
        assert result == {"success": True, "result": "one\nExit code 3"}
        assert "There is no tool 'nothing'" in events[4]["error"]
        # Our own host needs each whole message, in order, to store the session.
        written = [event["message"] for event in harness.sink.of("session_message_written")]
        kinds = [(m["role"], [part["type"] for part in m["parts"]]) for m in written]
        assert kinds == [
            ("assistant", []),
            ("assistant", ["text", "tool_call", "tool_call"]),
            ("tool", ["tool_result", "finish"]),
            ("tool", ["tool_result", "finish"]),
            ("assistant", ["text", "tool_call", "tool_call", "finish"]),
            ("assistant", []),
            ("assistant", ["text", "finish"]),
        ]
        roles = [(message["role"], message.get("content")) for message in harness.model_messages()]
        assert roles[:3] == [
            ("user", "Do it."),
            ("assistant", "I look."),
            ("tool", "one\nExit code 3"),
        ]
        assert [event["round_count"] for event in harness.sink.of("runner_progress")] == [1, 2]


async def test_interrupted_answer_is_cleared_before_the_retry(
    tmp_path: Path,
) -> None:
    async with open_runtime_harness(tmp_path, [Reply(text="Not this.", cut_after=1)]) as harness:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.sink.until("run_retry")
            await asyncio.sleep(0)  # Now it waits for the retry.
            harness.clock.manual.advance(60)
        assert run.result() == completed("Done.")
        cleared = harness.sink.types().index("answer_cleared")
        assert harness.sink.types()[cleared - 1 : cleared + 3] == [
            "token",
            "answer_cleared",
            "run_retry",
            "token",
        ]
        (event,) = harness.sink.of("answer_cleared")
        last = harness.sink.of("session_message_written")[-1]["message"]
        assert (last["id"], last["rev"]) == (event["message_id"], 2)
        assert last["parts"][0] == {"type": "text", "data": {"text": "Done."}}


# --- steering


async def test_steer_message_joins_at_the_next_step_and_is_admitted_first(
    tmp_path: Path,
) -> None:
    async with open_runtime_harness(
        tmp_path, [calling("ls"), Reply(text="Hm.", hold_after=0)]
    ) as harness:
        harness.steer.waiting = [SteerMessage("First this.", "m-1")]
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.sink.until("runner_progress", round_count=2)
            await harness.model.until_requests(2)
            # Too late for this step, and it is the last one: so there is one more.
            harness.steer.waiting = [SteerMessage("And that.", "m-2"), SteerMessage("Soon.")]
            harness.model.release()
        assert run.result() == completed("Done.")
        types = harness.sink.types()
        assert types[:3] == ["execution_started", "message_admitted", "runner_progress"]
        second = types.index("message_admitted", 2)
        assert types[second + 1] == "runner_progress"
        assert [event["id"] for event in harness.sink.of("message_admitted")] == ["m-1", "m-2"]
        prompts = [m["content"] for m in harness.model_messages() if m["role"] == "user"]
        assert prompts == ["Do it.", "First this.", "And that.", "Soon."]
        assert [m["content"] for m in harness.model_messages() if m["role"] == "assistant"][
            -1
        ] == "Hm."


# --- endings


@pytest.mark.parametrize(
    ("fields", "spec", "message"),
    [
        ({"secrets": Secrets()}, {}, "no credential for provider 'demo'"),
        (
            {"secrets": Secrets([Credential("demo", KEY, "http://127.0.0.1:9", "martian")])},
            {},
            "unknown provider type 'martian'",
        ),
        ({"secrets": Secrets([Credential("demo", KEY)])}, {}, "provider 'demo' has no base_url"),
        ({"model": ModelName("demo", "")}, {}, "not name a model of provider 'demo'"),
        ({}, {"reasoning_effort": "High"}, "reasoning_effort must be one of low, medium"),
        ({"workspace": "/nowhere/at/all"}, {}, "/nowhere/at/all is not a directory"),
        ({}, {"permission_policy": {"requested_mode": "auto"}}, "provided together"),
        ({}, {"permission_policy": {"environment_lease": {}}}, "environment_lease"),
    ],
)
async def test_missing_run_setting_is_reported_without_the_key(
    tmp_path: Path, fields: dict[str, Json], spec: dict[str, Json], message: str
) -> None:
    if policy := spec.get("permission_policy"):
        whole = {"revision": 1, "bypass_permissions": False, "session_id": "s", "policy": None}
        spec = {"permission_policy": {**whole, **policy}}
    async with open_runtime_harness(tmp_path, **fields) as harness:
        outcome = await harness.run(**spec)
    assert outcome.status == "error"
    assert outcome.error is not None
    assert message in outcome.error
    assert KEY not in outcome.error
    assert harness.model.requests == []


@pytest.mark.parametrize(
    ("replies", "outcome"),
    [
        ([Reply(status=401, body=f'{{"error":{{"message":"bad {KEY}"}}}}')], None),
        ([Reply(text="So far", finish="max_tokens")], completed("So far")),
        (
            [calling("ls")] * 3,
            failed("limit:max_rounds: The run has used its 2 steps."),
        ),
    ],
)
@contract("FLEET-P6", "FLEET-34")
async def test_model_failure_cutoff_or_step_limit_ends_the_run_with_a_reason(
    tmp_path: Path, replies: list[Reply], outcome: Outcome | None
) -> None:
    async with open_runtime_harness(
        tmp_path, replies, limits=ProvisionLimits(max_rounds=2)
    ) as harness:
        ended = await harness.run()
        if outcome is None:
            assert ended.status == "error"
            assert "401" in (ended.error or "")
            assert KEY not in repr(ended)
        else:
            assert ended == outcome
        last = harness.sink.events[-1]
        assert last["type"] == ("complete" if ended.status == "completed" else "error")
        assert last.get("message") == ended.error
        assert KEY.encode() not in encode(harness.sink.events)


async def test_agent_that_repeats_itself_is_ended(tmp_path: Path) -> None:
    async with open_runtime_harness(tmp_path, [calling("ls")] * 12) as harness:
        outcome = await harness.run()
    assert outcome.status == "error"
    assert "repeated itself" in (outcome.error or "")


@pytest.mark.parametrize("when", ["before", "while the model speaks", "while a command runs"])
async def test_canceled_run_and_its_processes_end_at_once(tmp_path: Path, when: str) -> None:
    sleeping = calling("bash", command="echo $$; exec sleep 60")
    replies = [sleeping if when == "while a command runs" else Reply(text="a b", stall_after=1)]
    async with open_runtime_harness(tmp_path, replies) as harness:
        if when == "before":
            harness.cancel.set()
            assert await harness.run() == CANCELLED
            assert harness.sink.events == []
            return
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.sink.until("tool_token" if when == "while a command runs" else "token")
            harness.cancel.set()
        assert run.result() == CANCELLED
        assert harness.sink.events[-1]["type"] == "cancelled"
        assert not is_alive(harness)
        # The host receives the partial answer, and every call has a result.
        written = [event["message"] for event in harness.sink.of("session_message_written")]
        assert written[-1]["parts"][-1]["data"]["reason"] == "canceled"
        if when == "while a command runs":
            assert [m["role"] for m in written] == ["assistant", "assistant", "tool", "assistant"]
        else:
            await harness.model.until_left(1)


async def test_dropped_run_leaves_no_process(tmp_path: Path) -> None:
    async with open_runtime_harness(
        tmp_path, [calling("bash", command="echo $$; sleep 60")]
    ) as harness:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.sink.until("tool_token")
            run.cancel()
        assert not is_alive(harness)


@dataclass(eq=False)
class ActingEventSink(RecordingEventSink):
    """Calls `act` when it receives the event of this number."""

    number: int = 0
    act: Callable[[], object] = lambda: None

    async def emit(self, event: Event) -> None:
        if len(self.events) == self.number:
            self.act()
        await super().emit(event)


EVENTS = 16  # The events of a run with one call.


@pytest.mark.parametrize("how", ["cancelled", "dropped"])
async def test_run_stopped_at_any_event_ends_once_and_leaves_no_task(
    tmp_path: Path, how: str
) -> None:
    async with open_runtime_harness(tmp_path) as harness:
        tasks = asyncio.all_tasks()
        for number in range(EVENTS):
            harness.model.play(Script([calling("ls")], otherwise=Reply(text="Done.")))
            harness.cancel = FakeCancelToken()
            harness.steer.waiting = [SteerMessage("Soon.", "m-1")]
            run = asyncio.get_running_loop().create_task(harness.run())
            act = run.cancel if how == "dropped" else harness.cancel.set
            harness.sink = ActingEventSink(number=number, act=act)
            await asyncio.wait({run})
            if how == "dropped":
                assert run.cancelled()
            else:  # After the last event a cancel is too late.
                was_late = harness.sink.types()[-1] == "complete"
                assert run.result() == (completed("Done.") if was_late else CANCELLED)
        assert len(harness.sink.events) == EVENTS
        left = [task.get_name() for task in asyncio.all_tasks() - tasks]
        assert [name for name in left if "turn" in name or "tells" in name] == []


def is_alive(harness: RuntimeHarness) -> bool:
    """Return True if a process that printed its pid still exists."""
    return any(Path("/proc", pid).exists() for pid in harness.sink.text("tool_token").split())


# --- one run after the other


async def test_runs_of_one_worker_share_neither_read_stamps_nor_jobs(
    tmp_path: Path,
) -> None:
    edit = {"file_path": "note.txt", "old_string": "one", "new_string": "two"}
    job = calling("bash", command="echo $$; sleep 60", run_in_background=True)
    async with open_runtime_harness(
        tmp_path,
        [calling("view", file_path="note.txt"), job, Reply(text="Seen."), calling("edit", **edit)],
    ) as harness:
        (harness.folder / "note.txt").write_text("one\n")
        assert await harness.run() == completed("Seen.")
        assert harness.sink.of("tool_error") == []
        assert harness.sink.text("tool_token").strip().isdecimal()
        assert not is_alive(harness)
        assert await harness.run() == completed("Done.")
        (refused,) = harness.sink.of("tool_error")
        assert "was not read in this session yet" in refused["error"]
        assert harness.model_messages(-1)[0] == {"role": "user", "content": "Do it."}


async def test_concurrent_runs_receive_only_their_own_events(tmp_path: Path) -> None:
    async with open_runtime_harness(tmp_path, [Reply(text="One.", hold_after=0)]) as harness:
        other = RuntimeHarness(
            harness.runtime, harness.model, harness.folder, harness.clock, harness.processes
        )
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(harness.run())
            await harness.model.until_requests(1)
            assert await other.run() == completed("Done.")
            harness.model.release()
        assert first.result() == completed("One.")
        assert (harness.sink.text(), other.sink.text()) == ("One.", "Done.")


# --- resources of a run


@contract("FLEET-34")
async def test_api_key_is_sent_only_to_the_provider(tmp_path: Path) -> None:
    command = "env; tr '\\0' ' ' </proc/$PPID/environ"
    async with open_runtime_harness(tmp_path, [calling("bash", command=command)]) as harness:
        assert await harness.run() == completed("Done.")
        assert harness.model.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        (event,) = harness.sink.of("tool_complete")
        assert "PATH=" in event["result"]["result"]
        assert KEY.encode() not in encode(harness.sink.events)
        assert KEY not in " ".join(os.environ.values())
        assert not any(KEY.encode() in seen.raw for seen in harness.model.requests)


async def test_worker_without_a_model_uses_the_embedded_one(tmp_path: Path) -> None:
    async with open_runtime_harness(tmp_path, model=None, secrets=Secrets()) as harness:
        (harness.folder / "found.txt").write_text("x")
        outcome = await harness.run("List the files here.")
        assert outcome.status == "completed"
        assert "found.txt" in (outcome.result or "")
        assert harness.sink.events[-1]["usage"]["estimated"]


async def test_disabled_tools_are_not_offered_under_any_name(
    tmp_path: Path,
) -> None:
    async with open_runtime_harness(
        tmp_path, disabled_tools=["fetch", "Edit", "Read", "Bash"]
    ) as harness:
        await harness.run()
        offered = {tool["function"]["name"] for tool in harness.model.requests[0].body["tools"]}
        assert not offered & {"fetch", "edit", "multiedit", "view", "bash", "question"}
        assert {"ls", "glob", "grep", "write", "todos"} <= offered


async def test_run_without_a_workspace_gets_a_temporary_folder(
    tmp_path: Path,
) -> None:
    look = calling("bash", command="ls; pwd")
    write = calling("write", file_path="a.txt", content="x")
    async with open_runtime_harness(
        tmp_path, [write, look, Reply(text="Made."), look], workspace=None
    ) as harness:
        assert await harness.run() == completed("Made.")
        here = f"{tmp_path / 'storage' / 'runs'}/"
        assert harness.sink.of("tool_complete")[1]["result"]["result"].startswith(f"a.txt\n{here}")
        assert await harness.run() == completed("Done.")
        assert harness.sink.of("tool_complete")[0]["result"]["result"].startswith(here)
    assert [*(tmp_path / "storage" / "runs").iterdir()] == []
    assert (tmp_path / "storage").stat().st_mode & 0o777 == 0o700


async def test_nearly_full_context_is_summarized_and_the_run_continues(
    tmp_path: Path,
) -> None:
    full = ScriptedUsage(input=395_000, output=10)
    replies = [
        Reply(calls=[ScriptedCall(name="ls", id="a")], usage=full),
        Reply(text="All that was said."),
    ]
    async with open_runtime_harness(tmp_path, replies) as harness:
        model = ModelName("openai", "gpt-5.1")
        secrets = Secrets([Credential("openai", KEY, harness.model.url, "openai")])
        async with open_runtime_harness(tmp_path, model=model, secrets=secrets) as full_harness:
            assert await full_harness.run("The task.", reasoning_effort="max") == completed("Done.")
            assert full_harness.sink.text() == "Done."
            summaries = [
                event["message"]
                for event in full_harness.sink.of("session_message_written")
                if event["message"]["is_summary_message"]
            ]
            assert [m["parts"][0]["data"] for m in summaries] == [{"text": "All that was said."}]
        first, _, third = harness.model.requests
        assert first.body["reasoning_effort"] == "high"  # The highest level of this model.
        prompts = [m["content"] for m in third.body["messages"] if m["role"] == "user"]
        assert prompts[0] == "All that was said."
        assert prompts[1].endswith("The task.")


@pytest.mark.parametrize(
    ("effort", "levels", "expected"),
    [
        ("high", None, "high"),
        ("max", ["none", "low", "high"], "high"),
        ("low", ["medium", "high"], "medium"),
        ("medium", ["none"], ""),
    ],
)
def test_effort_is_mapped_to_a_level_the_model_supports(
    effort: str, levels: list[str] | None, expected: str
) -> None:
    info = Model(context_window=1, can_reason=True)
    if levels is not None:
        info.reasoning_levels = levels
    assert fitting_effort(effort, info) == expected
    assert fitting_effort(effort, Model(context_window=1)) == ""


@contract("FLEET-34")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": [{"decision": "alow"}]}, "rule 1 is invalid"),
        ({"approve": "perhaps"}, "approve must be ask, allow, deny or a list of rules"),
        ({"hooks": [{"name": "no command"}]}, r"missing required field `command` - at `\$.hooks"),
        ({"hooks": [{"command": "true"}] * 65}, "length <= 64"),
        ({"own_tools": {"Bad Name": {"command": "x", "description": "y"}}}, "own_tools"),
        ({"chosen": ["demo", {}, {}, {"api_key": [KEY]}, False]}, r"got `array` - at `\$.chosen"),
        ({"chosen": {"api_key": KEY}}, r"Expected `array \| null`, got `object`"),
    ],
)
def test_unreadable_culm_extension_makes_the_provision_invalid(
    tmp_path: Path, given: dict[str, Json], message: str
) -> None:
    provision = provision_of(tmp_path, culm=CulmExtension(**given))
    services = WorkerServices(LoopClock(), Ids(1), NoProcesses(), tmp_path)
    with pytest.raises(BadProvision, match=message) as refusal:
        BambooRuntime(provision, services)
    assert KEY not in str(refusal.value)
    assert KEY not in repr(provision)


@dataclass(eq=False)
class ClosingEventSink(RecordingEventSink):
    """Accepts `left` events and then raises `RunEnded`."""

    left: int = 2

    async def emit(self, event: Event) -> None:
        if len(self.events) >= self.left:
            raise RunEnded
        await super().emit(event)


async def test_run_ends_as_canceled_when_its_host_is_gone(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_runtime_harness(tmp_path) as harness:
        harness.sink = ClosingEventSink()
        assert await harness.run() == CANCELLED
