"""The queue of a session: listed, edited, ordered, cleared, bounded; prompts that join a turn."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.ids import RunId
from culm.settings import Settings
from culm.testing.script import Reply
from culm.wire.codec import decode
from culm.wire.runs import QueueChanged, QueuedPrompt, Run
from tests.flow.drive import UNKNOWN, until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import Stage, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@asynccontextmanager
async def open_queue(folder: Path, *waiting: str, queue_max: int = 100) -> AsyncGenerator[Stage]:
    """A session whose first run waits for its model, with these behind it."""
    settings = Settings(queue_max=queue_max)
    async with open_runs(folder, play=script(HELD), settings=settings) as stage:
        await stage.prompt("First.", run_id="first")
        await stage.heard.text("Hello")
        for name in waiting:
            await stage.prompt(f"Prompt {name}.", run_id=name)
        yield stage


async def answered(stage: Stage, *run_ids: str) -> list[str]:
    """Let everything run; returns what the model was asked for, in order."""
    stage.model.release()
    for run_id in ("first", *run_ids):
        await stage.heard.complete(run_id)
    await stage.until_idle()
    return [str(stage.sent(n)[-1].content) for n in range(1, len(stage.seen()) + 1)]


async def queues(stage: Stage) -> list[list[str]]:
    """Every state of the queue that was told."""
    await stage.catch_up()
    told = stage.heard.all("queue_changed", QueueChanged)
    return [[item.run_id for item in queue.items] for queue in told]


# --- seen


@contract("INV-33", "EXC-20")
async def test_what_waits_is_listed_in_order_and_every_change_is_told(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b") as stage:
        both = [QueuedPrompt(RunId(name), f"Prompt {name}.") for name in "ab"]
        assert await stage.queue() == both
        listed = await stage.of_session("prompts/list", "GET")
        assert listed.json() == ["Prompt a.", "Prompt b."]
        assert (await stage.of_session("prompts/queued", "GET")).json() == 2
        assert {run.id for run in await stage.runs(state="queued")} == {"a", "b"}
        assert [run.id for run in await stage.runs(session=stage.session_id, state="active")] == [
            "first"
        ]
        assert await answered(stage, "a", "b") == ["First.", "Prompt a.", "Prompt b."]
        assert await queues(stage) == [["a"], ["a", "b"], ["b"], []]
        assert await stage.queue() == []


async def test_the_queue_of_a_session_that_is_not_there_is_empty(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        for session_id in (stage.session_id, UNKNOWN):
            base = f"/agent/sessions/{session_id}"
            assert (await stage.request("GET", f"{base}/queue")).json() == []
            assert (await stage.request("GET", f"{base}/prompts/list")).json() == []
            assert (await stage.request("GET", f"{base}/prompts/queued")).json() == 0
            assert (await stage.request("POST", f"{base}/prompts/clear")).status == 200
            answer = await stage.request("PUT", f"{base}/queue", {"run_ids": []})
            assert (answer.status, answer.json()) == (200, [])


# --- changed


@contract("EXC-20")
async def test_a_prompt_that_waits_can_be_edited_and_the_model_reads_the_new_one(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b") as stage:
        answer = await stage.request("PUT", "/runs/a", {"prompt": "Something else."})
        assert (answer.status, decode(answer.body, Run).prompt) == (200, "Something else.")
        assert [item.prompt for item in await stage.queue()] == ["Something else.", "Prompt b."]
        assert await answered(stage, "a", "b") == ["First.", "Something else.", "Prompt b."]
        assert ("user", "Something else.", "stop") in await stage.rows()
        assert (await queues(stage))[2] == ["a", "b"]  # The edit was told, too.


@pytest.mark.parametrize("prompt", ["", " \n"])
async def test_a_prompt_edited_to_nothing_is_400_and_unchanged(tmp_path: Path, prompt: str) -> None:
    async with open_queue(tmp_path, "a") as stage:
        assert (await stage.request("PUT", "/runs/a", {"prompt": prompt})).status == 400
        assert [item.prompt for item in await stage.queue()] == ["Prompt a."]


async def test_an_edit_of_a_prompt_that_has_started_or_ended_is_409(tmp_path: Path) -> None:
    async with open_queue(tmp_path) as stage:
        for _ in ("running", "ended"):
            answer = await stage.request("PUT", "/runs/first", {"prompt": "Too late."})
            assert (answer.status, b"run_started" in answer.body) == (409, True)
            await answered(stage)
        assert [text for _, text, _ in await stage.rows()] == ["First.", "Hello there."]


@contract("EXC-20")
async def test_a_queue_that_was_put_into_another_order_runs_in_it_and_later_ones_come_last(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b", "c") as stage:
        answer = await stage.of_session("queue", "PUT", run_ids=["c", "a", "b"])
        assert answer.status == 200
        assert decode(answer.body, list[QueuedPrompt]) == await stage.queue()
        await stage.prompt("Prompt d.", run_id="d")
        assert [item.run_id for item in await stage.queue()] == ["c", "a", "b", "d"]
        asked = await answered(stage, "d")
        assert asked == ["First.", "Prompt c.", "Prompt a.", "Prompt b.", "Prompt d."]
        told = await queues(stage)
        assert told[3:5] == [["c", "a", "b"], ["c", "a", "b", "d"]]
        assert stage.heard.completed() == ["first", "c", "a", "b", "d"]


@pytest.mark.parametrize(
    "order", [["a"], ["a", "b", "first"], ["a", "a"], ["a", "b", "b"], ["b", "x"], []]
)
async def test_an_order_of_other_runs_than_those_that_wait_is_409_and_changes_nothing(
    tmp_path: Path, order: list[str]
) -> None:
    async with open_queue(tmp_path, "a", "b") as stage:
        answer = await stage.of_session("queue", "PUT", run_ids=order)
        assert (answer.status, b"queue_differs" in answer.body) == (409, True)
        assert [item.run_id for item in await stage.queue()] == ["a", "b"]


@contract("INV-53", "EXC-12", "EXC-20")
async def test_a_cleared_queue_ends_each_of_its_runs_once_and_the_running_one_goes_on(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b") as stage:
        made = await stage.prompt("Without an id.")
        assert (await stage.of_session("prompts/clear")).status == 200
        assert await stage.queue() == []
        for run_id in ("a", "b", made):
            complete = await stage.heard.complete(run_id)
            assert (complete.cancelled, complete.error) == (True, "")
        assert await answered(stage) == ["First."]
        await stage.catch_up()
        assert sorted(stage.heard.completed()) == sorted(["a", "b", made, "first"])
        assert (await stage.of_session("prompts/clear")).status == 200
        assert [cancel.target for cancel in stage.heard.cancels()][:1] == ["queue"]
        assert [text for _, text, _ in await stage.rows()] == ["First.", "Hello there."]


@contract("EXC-20")
async def test_one_that_waits_can_be_dropped_and_one_that_runs_cannot(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b") as stage:
        answer = await stage.request("POST", "/runs/a/drop")
        assert (answer.status, decode(answer.body, Run).outcome) == (200, "canceled")
        assert (await stage.request("POST", "/runs/first/drop")).status == 409
        assert (await stage.request("POST", "/runs/b/start")).status == 409  # It is not held.
        assert await answered(stage, "b") == ["First.", "Prompt b."]
        again = await stage.request("POST", "/runs/a/drop")
        assert again.status == 409
        assert sorted(stage.heard.completed()) == ["a", "b", "first"]


async def test_a_queue_that_is_full_is_429_until_there_is_room(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b", queue_max=2) as stage:
        answer = await stage.post("One too many.", run_id="c")
        assert (answer.status, b"limit_exceeded" in answer.body) == (429, True)
        # The same prompt again is not one more.
        assert await stage.prompt("Prompt b.", run_id="b") == "b"
        assert [item.run_id for item in await stage.queue()] == ["a", "b"]
        await stage.request("POST", "/runs/a/drop")
        assert await stage.prompt("One too many.", run_id="c") == "c"
        assert await answered(stage, "c") == ["First.", "Prompt b.", "One too many."]


async def test_a_workspace_with_as_many_runs_as_it_may_have_is_429(tmp_path: Path) -> None:
    settings = Settings(runs_max=2)
    async with open_runs(tmp_path, play=script(HELD, HELD), settings=settings) as stage:
        other = await stage.remote.create_session("other")
        third = await stage.remote.create_session("third")
        await stage.prompt("One.", run_id="one")
        await stage.prompt("Two.", other.id, run_id="two")
        assert (await stage.post("Three.", third.id)).status == 429
        await stage.asked(2)
        stage.model.release()
        await stage.heard.complete("one")
        await stage.heard.complete("two")
        await stage.heard.complete(await stage.prompt("Three.", third.id))


# --- joining the turn


@contract("INV-35")
async def test_a_prompt_without_an_id_joins_the_running_turn_at_its_next_step(
    tmp_path: Path, kind: str
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through)]
    play = script(calling("held", text="One moment."))
    async with open_runs(tmp_path, kind, play, tools=tools) as stage:
        host = await stage.prompt("Hi.", run_id="host")
        await until(lambda: gate.inside == 1)
        guests = [await stage.prompt("And this."), await stage.prompt("And that.")]
        waits = await stage.prompt("Later.", run_id="waits")
        assert [item.run_id for item in await stage.queue()] == [*guests, waits]
        gate.release()
        host_end = await stage.heard.complete(host)
        for guest in guests:
            end = await stage.heard.complete(guest)
            assert (end.message_id, end.text) == (host_end.message_id, "Fine.")
            assert (await stage.run(guest)).host_run_id == host
            assert stage.heard.states(guest) == ["queued", "folded", "ended"]
        await stage.heard.complete(waits)
        await stage.catch_up()
        assert stage.heard.completed() == [host, *guests, waits]
        roles = [(message.role, message.content) for message in stage.sent(2)]
        assert roles == [
            ("user", "Hi."),
            ("assistant", "One moment."),
            ("tool", "held passed"),
            ("user", "And this."),
            ("user", "And that."),
        ]
        assert len(stage.seen()) == 3
        said = [text for role, text, _ in await stage.rows() if role == "user"]
        assert said == ["Hi.", "And this.", "And that.", "Later."]


@contract("INV-35", "EXC-12")
async def test_a_prompt_without_an_id_that_finds_no_next_step_has_a_turn_of_its_own(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        await stage.prompt("Hi.", run_id="host")
        await stage.heard.text("Hello")
        late = await stage.prompt("And this.")
        stage.model.release()
        assert (await stage.heard.complete(late)).text == "Fine."
        run = await stage.run(late)
        assert (run.outcome, run.host_run_id) == ("end_turn", "")
        assert [text for _, text, _ in await stage.rows()] == [
            "Hi.", "Hello there.", "And this.", "Fine.",
        ]  # fmt: skip


@contract("INV-39")
async def test_a_turn_that_fails_is_one_error_and_the_end_of_whoever_had_joined_it(
    tmp_path: Path,
) -> None:
    gate = Gate()
    play = script(calling("held"), Reply(status=401))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as stage:
        host = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        guest = await stage.prompt("And this.")
        gate.release()
        for run_id in (host, guest):
            assert "Authentication" in (await stage.heard.complete(run_id)).error
        assert [error.run_id for error in stage.heard.errors()] == [host]


# --- steering


async def test_a_live_run_is_steered_before_its_next_step(tmp_path: Path, kind: str) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through)]
    async with open_runs(tmp_path, kind, script(calling("held")), tools=tools) as stage:
        host = await stage.prompt("Hi.", run_id="host")
        await until(lambda: gate.inside == 1)
        answer = await stage.of_session("steer", prompt="Rather this.")
        run = decode(answer.body, Run)
        assert (answer.status, run.state, run.prompt) == (202, "queued", "Rather this.")
        gate.release()
        await stage.heard.complete(run.id)
        assert stage.sent(2)[-1].content == "Rather this."
        assert (await stage.run(run.id)).host_run_id == host


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [("Rather this.", 409, b"nothing_runs"), ("", 400, b"invalid_request")],
)
async def test_steering_where_nothing_runs_is_409_and_with_nothing_400(
    tmp_path: Path, prompt: str, status: int, code: bytes
) -> None:
    async with open_runs(tmp_path) as stage:
        answer = await stage.of_session("steer", prompt=prompt)
        assert (answer.status, code in answer.body) == (status, True)
        assert (await stage.runs(), stage.model.requests) == ([], [])


async def test_a_session_with_a_live_run_is_not_deleted_and_one_without_takes_its_runs_along(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a") as stage:
        answer = await stage.request("DELETE", f"/sessions/{stage.session_id}")
        assert (answer.status, b"session_busy" in answer.body) == (409, True)
        assert len(await stage.messages()) == 2
        await answered(stage, "a")
        answer = await stage.request("DELETE", f"/sessions/{stage.session_id}")
        assert answer.status == 200
        assert await stage.runs() == []


async def test_editing_ordering_and_starting_at_once_lose_nothing(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b", "c") as stage:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.request("PUT", "/runs/b", {"prompt": "Edited."}))
            tasks.create_task(stage.of_session("queue", "PUT", run_ids=["c", "b", "a"]))
            tasks.create_task(stage.request("POST", "/runs/a/drop"))
            stage.model.release()
        for run_id in ("a", "b", "c"):
            await stage.heard.complete(run_id)
        await stage.until_idle()
        await stage.catch_up()
        assert sorted(stage.heard.completed()) == ["a", "b", "c", "first"]
        assert (await queues(stage))[-1] == []
