"""The runtime executor: the loop of every run, told to a host as it goes on."""

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
from culm.fleet.worker.executors.bamboo_runtime import make_bamboo_runtime
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.executors.runtime_model import fitting_effort
from culm.ids import Ids
from culm.processes.disabled import NoProcesses
from culm.testing.script import Reply, Script, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json, encode
from culm.wire.config import Model
from tests.fleet.runtime_stage import (
    KEY,
    Brake,
    Ear,
    Event,
    Stage,
    calling,
    open_stage,
    provision_of,
)
from tests.support import WAIT_S, contract

COUNTED = ScriptedUsage(input=100, output=10)


# --- what a host hears


async def test_a_run_tells_its_answer_as_it_comes_then_the_message_and_what_it_used(
    tmp_path: Path,
) -> None:
    reply = Reply(reasoning="Let me see.", text="It is fine.", usage=COUNTED)
    async with open_stage(tmp_path, [reply]) as stage:
        spec = {"activation_run_id": "run-7", "logical_session": SESSION}
        assert await stage.run("How is it?", **spec) == completed("It is fine.")
        assert stage.ear.types() == [
            "execution_started",
            "runner_progress",
            "session_message_written",
            "reasoning_token",
            "token",
            "token_budget_updated",
            "session_message_written",
            "complete",
        ]
        assert (stage.ear.text("reasoning_token"), stage.ear.text()) == (
            "Let me see.",
            "It is fine.",
        )
        started, progress = stage.ear.events[:2]
        assert (started["run_id"], started["session_id"]) == ("run-7", "session-7")
        assert started["started_at"] == "2027-01-15T08:00:00.000Z"
        assert progress == {
            "type": "runner_progress",
            "session_id": "session-7",
            "round_count": 1,
        }
        opened, written = (event["message"] for event in stage.ear.of("session_message_written"))
        assert (opened["parts"], opened["rev"]) == ([], 0)
        assert (written["id"], written["rev"], written["role"]) == (opened["id"], 1, "assistant")
        assert (written["model"], written["provider"]) == ("demo-1", "demo")
        assert [part["type"] for part in written["parts"]] == ["reasoning", "text", "finish"]
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        usage |= {"cost": 0.0, "estimated": False}
        assert stage.ear.events[-1] == {"type": "complete", "usage": usage}
        assert stage.read() == [{"role": "user", "content": "How is it?"}]


SESSION: Json = {"session_id": "session-7", "root_session_id": "session-1"}


async def test_calls_are_told_with_what_they_put_out_and_their_results_are_read_by_the_model(
    tmp_path: Path,
) -> None:
    calls = [
        ScriptedCall(name="bash", input={"command": "echo one; exit 3"}, id="a"),
        ScriptedCall(name="nothing", input={}, id="b"),
    ]
    async with open_stage(tmp_path, [Reply(text="I look.", calls=calls)]) as stage:
        assert await stage.run() == completed("Done.")
        told = stage.ear.of("tool_start", "tool_token", "tool_complete", "tool_error")
        assert [(event["type"], event["tool_call_id"]) for event in told] == [
            ("tool_start", "a"),
            ("tool_token", "a"),
            ("tool_complete", "a"),
            ("tool_start", "b"),
            ("tool_error", "b"),
        ]
        assert told[0]["tool_name"] == "bash"
        assert told[0]["arguments"] == {"command": "echo one; exit 3"}
        assert told[1]["content"] == "one\n"
        result = told[2]["result"]
        assert result == {"success": True, "result": "one\nExit code 3"}
        assert "There is no tool 'nothing'" in told[4]["error"]
        # What our own host needs to keep the session: each message when it is whole, in order.
        written = [event["message"] for event in stage.ear.of("session_message_written")]
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
        roles = [(message["role"], message.get("content")) for message in stage.read()]
        assert roles[:3] == [
            ("user", "Do it."),
            ("assistant", "I look."),
            ("tool", "one\nExit code 3"),
        ]
        assert [event["round_count"] for event in stage.ear.of("runner_progress")] == [1, 2]


async def test_an_answer_that_broke_off_is_taken_back_before_it_comes_again(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, [Reply(text="Not this.", cut_after=1)]) as stage:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.ear.until("run_retry")
            await asyncio.sleep(0)  # It waits now.
            stage.clock.hand.advance(60)
        assert run.result() == completed("Done.")
        cleared = stage.ear.types().index("answer_cleared")
        assert stage.ear.types()[cleared - 1 : cleared + 3] == [
            "token",
            "answer_cleared",
            "run_retry",
            "token",
        ]
        (event,) = stage.ear.of("answer_cleared")
        last = stage.ear.of("session_message_written")[-1]["message"]
        assert (last["id"], last["rev"]) == (event["message_id"], 2)
        assert last["parts"][0] == {"type": "text", "data": {"text": "Done."}}


# --- steering


async def test_steering_joins_at_the_next_step_and_is_admitted_before_anything_of_that_step(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, [calling("ls"), Reply(text="Hm.", hold_after=0)]) as stage:
        stage.wheel.waiting = [SteerMessage("First this.", "m-1")]
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.ear.until("runner_progress", round_count=2)
            await stage.model.until_requests(2)
            # Too late for this step, and it is the last one: so there is one more.
            stage.wheel.waiting = [SteerMessage("And that.", "m-2"), SteerMessage("Soon.")]
            stage.model.release()
        assert run.result() == completed("Done.")
        types = stage.ear.types()
        assert types[:3] == ["execution_started", "message_admitted", "runner_progress"]
        second = types.index("message_admitted", 2)
        assert types[second + 1] == "runner_progress"
        assert [event["id"] for event in stage.ear.of("message_admitted")] == ["m-1", "m-2"]
        said = [m["content"] for m in stage.read() if m["role"] == "user"]
        assert said == ["Do it.", "First this.", "And that.", "Soon."]
        assert [m["content"] for m in stage.read() if m["role"] == "assistant"][-1] == "Hm."


# --- how it ends


@pytest.mark.parametrize(
    ("fields", "spec", "words"),
    [
        ({"secrets": Secrets()}, {}, "no credential for provider 'demo'"),
        (
            {"secrets": Secrets([Credential("demo", KEY, "http://127.0.0.1:9", "martian")])},
            {},
            "nobody here speaks to a provider of type 'martian'",
        ),
        ({"secrets": Secrets([Credential("demo", KEY)])}, {}, "provider 'demo' has no base_url"),
        ({"model": ModelName("demo", "")}, {}, "no model of provider 'demo'"),
        ({}, {"reasoning_effort": "High"}, "reasoning_effort must be one of low, medium"),
        ({"workspace": "/nowhere/at/all"}, {}, "/nowhere/at/all is no directory"),
        ({}, {"permission_policy": {"requested_mode": "auto"}}, "provided together"),
        ({}, {"permission_policy": {"environment_lease": {}}}, "environment_lease"),
    ],
)
async def test_what_a_run_lacks_is_said_in_its_error_without_the_key(
    tmp_path: Path, fields: dict[str, Json], spec: dict[str, Json], words: str
) -> None:
    if policy := spec.get("permission_policy"):
        whole = {"revision": 1, "bypass_permissions": False, "session_id": "s", "policy": None}
        spec = {"permission_policy": {**whole, **policy}}
    async with open_stage(tmp_path, **fields) as stage:
        outcome = await stage.run(**spec)
    assert outcome.status == "error"
    assert outcome.error is not None
    assert words in outcome.error
    assert KEY not in outcome.error
    assert stage.model.requests == []


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
async def test_a_model_that_fails_is_cut_off_or_goes_on_for_too_long_ends_the_run_in_words(
    tmp_path: Path, replies: list[Reply], outcome: Outcome | None
) -> None:
    async with open_stage(tmp_path, replies, limits=ProvisionLimits(max_rounds=2)) as stage:
        ended = await stage.run()
        if outcome is None:
            assert ended.status == "error"
            assert "401" in (ended.error or "")
            assert KEY not in repr(ended)
        else:
            assert ended == outcome
        last = stage.ear.events[-1]
        assert last["type"] == ("complete" if ended.status == "completed" else "error")
        assert last.get("message") == ended.error
        assert KEY.encode() not in encode(stage.ear.events)


async def test_an_agent_that_repeats_itself_is_ended(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [calling("ls")] * 12) as stage:
        outcome = await stage.run()
    assert outcome.status == "error"
    assert "repeated itself" in (outcome.error or "")


@pytest.mark.parametrize("when", ["before", "while the model speaks", "while a command runs"])
async def test_a_cancelled_run_ends_at_once_and_its_processes_with_it(
    tmp_path: Path, when: str
) -> None:
    sleeping = calling("bash", command="echo $$; exec sleep 60")
    replies = [sleeping if when == "while a command runs" else Reply(text="a b", stall_after=1)]
    async with open_stage(tmp_path, replies) as stage:
        if when == "before":
            stage.cancel.set()
            assert await stage.run() == CANCELLED
            assert stage.ear.events == []
            return
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.ear.until("tool_token" if when == "while a command runs" else "token")
            stage.cancel.set()
        assert run.result() == CANCELLED
        assert stage.ear.events[-1]["type"] == "cancelled"
        assert not is_alive(stage)
        # Its host hears what there is, and every call has a result.
        written = [event["message"] for event in stage.ear.of("session_message_written")]
        assert written[-1]["parts"][-1]["data"]["reason"] == "canceled"
        if when == "while a command runs":
            assert [m["role"] for m in written] == ["assistant", "assistant", "tool", "assistant"]
        else:
            await stage.model.until_left(1)


async def test_a_run_that_is_dropped_leaves_no_process(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [calling("bash", command="echo $$; sleep 60")]) as stage:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.ear.until("tool_token")
            run.cancel()
        assert not is_alive(stage)


@dataclass(eq=False)
class Stopping(Ear):
    """Does something when it hears the event of this number."""

    number: int = 0
    act: Callable[[], object] = lambda: None

    async def emit(self, event: Event) -> None:
        if len(self.events) == self.number:
            self.act()
        await super().emit(event)


EVENTS = 16  # Of a run with one call.


@pytest.mark.parametrize("how", ["cancelled", "dropped"])
async def test_a_run_that_is_stopped_at_any_event_ends_once_and_leaves_no_task(
    tmp_path: Path, how: str
) -> None:
    async with open_stage(tmp_path) as stage:
        tasks = asyncio.all_tasks()
        for number in range(EVENTS):
            stage.model.play(Script([calling("ls")], otherwise=Reply(text="Done.")))
            stage.cancel = Brake()
            stage.wheel.waiting = [SteerMessage("Soon.", "m-1")]
            run = asyncio.get_running_loop().create_task(stage.run())
            act = run.cancel if how == "dropped" else stage.cancel.set
            stage.ear = Stopping(number=number, act=act)
            await asyncio.wait({run})
            if how == "dropped":
                assert run.cancelled()
            else:  # Once its last words are told, a cancel is too late.
                was_late = stage.ear.types()[-1] == "complete"
                assert run.result() == (completed("Done.") if was_late else CANCELLED)
        assert len(stage.ear.events) == EVENTS
        left = [task.get_name() for task in asyncio.all_tasks() - tasks]
        assert [name for name in left if "turn" in name or "tells" in name] == []


def is_alive(stage: Stage) -> bool:
    """Whether a process that told its own id is still there."""
    return any(Path("/proc", pid).exists() for pid in stage.ear.text("tool_token").split())


# --- one run after the other


async def test_runs_of_one_worker_share_neither_what_they_know_nor_their_jobs(
    tmp_path: Path,
) -> None:
    edit = {"file_path": "note.txt", "old_string": "one", "new_string": "two"}
    job = calling("bash", command="echo $$; sleep 60", run_in_background=True)
    async with open_stage(
        tmp_path,
        [calling("view", file_path="note.txt"), job, Reply(text="Seen."), calling("edit", **edit)],
    ) as stage:
        (stage.folder / "note.txt").write_text("one\n")
        assert await stage.run() == completed("Seen.")
        assert stage.ear.of("tool_error") == []
        assert stage.ear.text("tool_token").strip().isdecimal()
        assert not is_alive(stage)
        assert await stage.run() == completed("Done.")
        (refused,) = stage.ear.of("tool_error")
        assert "was not read in this session yet" in refused["error"]
        assert stage.read(-1)[0] == {"role": "user", "content": "Do it."}


async def test_runs_side_by_side_hear_only_themselves(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [Reply(text="One.", hold_after=0)]) as stage:
        other = Stage(stage.runtime, stage.model, stage.folder, stage.clock, stage.processes)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(stage.run())
            await stage.model.until_requests(1)
            assert await other.run() == completed("Done.")
            stage.model.release()
        assert first.result() == completed("One.")
        assert (stage.ear.text(), other.ear.text()) == ("One.", "Done.")


# --- what it works with


@contract("FLEET-34")
async def test_the_key_goes_to_the_provider_and_nowhere_else(tmp_path: Path) -> None:
    command = "env; tr '\\0' ' ' </proc/$PPID/environ"
    async with open_stage(tmp_path, [calling("bash", command=command)]) as stage:
        assert await stage.run() == completed("Done.")
        assert stage.model.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        (told,) = stage.ear.of("tool_complete")
        assert "PATH=" in told["result"]["result"]
        assert KEY.encode() not in encode(stage.ear.events)
        assert KEY not in " ".join(os.environ.values())
        assert not any(KEY.encode() in seen.raw for seen in stage.model.requests)


async def test_a_worker_without_a_model_works_by_the_embedded_one(tmp_path: Path) -> None:
    async with open_stage(tmp_path, model=None, secrets=Secrets()) as stage:
        (stage.folder / "found.txt").write_text("x")
        outcome = await stage.run("List the files here.")
        assert outcome.status == "completed"
        assert "found.txt" in (outcome.result or "")
        assert stage.ear.events[-1]["usage"]["estimated"]


async def test_tools_that_are_disabled_by_our_names_or_another_systems_are_not_offered(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, disabled_tools=["fetch", "Edit", "Read", "Bash"]) as stage:
        await stage.run()
        offered = {tool["function"]["name"] for tool in stage.model.requests[0].body["tools"]}
        assert not offered & {"fetch", "edit", "multiedit", "view", "bash", "question"}
        assert {"ls", "glob", "grep", "write", "todos"} <= offered


async def test_without_a_workspace_a_run_has_a_folder_of_its_own_which_goes_with_it(
    tmp_path: Path,
) -> None:
    look = calling("bash", command="ls; pwd")
    write = calling("write", file_path="a.txt", content="x")
    async with open_stage(
        tmp_path, [write, look, Reply(text="Made."), look], workspace=None
    ) as stage:
        assert await stage.run() == completed("Made.")
        here = f"{tmp_path / 'storage' / 'runs'}/"
        assert stage.ear.of("tool_complete")[1]["result"]["result"].startswith(f"a.txt\n{here}")
        assert await stage.run() == completed("Done.")
        assert stage.ear.of("tool_complete")[0]["result"]["result"].startswith(here)
    assert [*(tmp_path / "storage" / "runs").iterdir()] == []
    assert (tmp_path / "storage").stat().st_mode & 0o777 == 0o700


async def test_a_context_that_is_nearly_full_is_summarized_and_the_work_goes_on(
    tmp_path: Path,
) -> None:
    full = ScriptedUsage(input=395_000, output=10)
    replies = [
        Reply(calls=[ScriptedCall(name="ls", id="a")], usage=full),
        Reply(text="All that was said."),
    ]
    async with open_stage(tmp_path, replies) as stage:
        model = ModelName("openai", "gpt-5.1")
        secrets = Secrets([Credential("openai", KEY, stage.model.url, "openai")])
        async with open_stage(tmp_path, model=model, secrets=secrets) as full_stage:
            assert await full_stage.run("The task.", reasoning_effort="max") == completed("Done.")
            assert full_stage.ear.text() == "Done."
            summaries = [
                event["message"]
                for event in full_stage.ear.of("session_message_written")
                if event["message"]["is_summary_message"]
            ]
            assert [m["parts"][0]["data"] for m in summaries] == [{"text": "All that was said."}]
        first, _, third = stage.model.requests
        assert first.body["reasoning_effort"] == "high"  # The most that this model knows.
        said = [m["content"] for m in third.body["messages"] if m["role"] == "user"]
        assert said[0] == "All that was said."
        assert said[1].endswith("The task.")


@pytest.mark.parametrize(
    ("effort", "levels", "fits"),
    [
        ("high", None, "high"),
        ("max", ["none", "low", "high"], "high"),
        ("low", ["medium", "high"], "medium"),
        ("medium", ["none"], ""),
    ],
)
def test_an_effort_is_the_greatest_the_model_knows_below_it(
    effort: str, levels: list[str] | None, fits: str
) -> None:
    info = Model(context_window=1, can_reason=True)
    if levels is not None:
        info.reasoning_levels = levels
    assert fitting_effort(effort, info) == fits
    assert fitting_effort(effort, Model(context_window=1)) == ""


@contract("FLEET-34")
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rules": [{"decision": "alow"}]}, "rule 1 is wrong"),
        ({"approve": "perhaps"}, "approve must be ask, allow, deny or a list of rules"),
        ({"hooks": [{"name": "no command"}]}, r"missing required field `command` - at `\$.hooks"),
        ({"hooks": [{"command": "true"}] * 65}, "length <= 64"),
        ({"own_tools": {"Bad Name": {"command": "x", "description": "y"}}}, "own_tools"),
        ({"chosen": ["demo", {}, {}, {"api_key": [KEY]}, False]}, r"got `array` - at `\$.chosen"),
        ({"chosen": {"api_key": KEY}}, r"Expected `array \| null`, got `object`"),
    ],
)
def test_what_cannot_be_read_of_our_own_parents_words_is_no_provision(
    tmp_path: Path, said: dict[str, Json], words: str
) -> None:
    provision = provision_of(tmp_path, culm=CulmExtension(**said))
    services = WorkerServices(LoopClock(), Ids(1), NoProcesses(), tmp_path)
    with pytest.raises(BadProvision, match=words) as refusal:
        make_bamboo_runtime(provision, services)
    assert KEY not in str(refusal.value)
    assert KEY not in repr(provision)


@dataclass(eq=False)
class Deaf(Ear):
    """Hears so many events, and then is gone."""

    left: int = 2

    async def emit(self, event: Event) -> None:
        if len(self.events) >= self.left:
            raise RunEnded
        await super().emit(event)


async def test_a_host_that_is_gone_ends_the_run_quietly(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_stage(tmp_path) as stage:
        stage.ear = Deaf()
        assert await stage.run() == CANCELLED
