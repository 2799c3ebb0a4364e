"""The queue of a session: list, edit, order, clear, limits; prompts that join a turn."""

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
from tests.flow.runs import Harness, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@asynccontextmanager
async def open_queue(folder: Path, *waiting: str, queue_max: int = 100) -> AsyncGenerator[Harness]:
    """A session whose first run waits for its model, with these runs queued."""
    settings = Settings(queue_max=queue_max)
    async with open_runs(folder, play=script(HELD), settings=settings) as harness:
        await harness.prompt("First.", run_id="first")
        await harness.received.text("Hello")
        for name in waiting:
            await harness.prompt(f"Prompt {name}.", run_id=name)
        yield harness


async def answered(harness: Harness, *run_ids: str) -> list[str]:
    """Let everything run; returns the prompts of the model requests in order."""
    harness.model.release()
    for run_id in ("first", *run_ids):
        await harness.received.complete(run_id)
    await harness.until_idle()
    return [str(harness.sent(n)[-1].content) for n in range(1, len(harness.seen()) + 1)]


async def queues(harness: Harness) -> list[list[str]]:
    """Every published state of the queue."""
    await harness.catch_up()
    published = harness.received.all("queue_changed", QueueChanged)
    return [[item.run_id for item in queue.items] for queue in published]


# --- listed


@contract("INV-33", "EXC-20")
async def test_queued_prompts_are_listed_in_order_and_changes_are_published(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b") as harness:
        both = [QueuedPrompt(RunId(name), f"Prompt {name}.") for name in "ab"]
        assert await harness.queue() == both
        listed = await harness.of_session("prompts/list", "GET")
        assert listed.json() == ["Prompt a.", "Prompt b."]
        assert (await harness.of_session("prompts/queued", "GET")).json() == 2
        assert {run.id for run in await harness.runs(state="queued")} == {"a", "b"}
        assert [
            run.id for run in await harness.runs(session=harness.session_id, state="active")
        ] == ["first"]
        assert await answered(harness, "a", "b") == ["First.", "Prompt a.", "Prompt b."]
        assert await queues(harness) == [["a"], ["a", "b"], ["b"], []]
        assert await harness.queue() == []


async def test_queue_of_an_unknown_session_is_empty(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        for session_id in (harness.session_id, UNKNOWN):
            base = f"/agent/sessions/{session_id}"
            assert (await harness.request("GET", f"{base}/queue")).json() == []
            assert (await harness.request("GET", f"{base}/prompts/list")).json() == []
            assert (await harness.request("GET", f"{base}/prompts/queued")).json() == 0
            assert (await harness.request("POST", f"{base}/prompts/clear")).status == 200
            answer = await harness.request("PUT", f"{base}/queue", {"run_ids": []})
            assert (answer.status, answer.json()) == (200, [])


# --- changed


@contract("EXC-20")
async def test_queued_prompt_can_be_edited_and_the_model_gets_the_new_text(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b") as harness:
        answer = await harness.request("PUT", "/runs/a", {"prompt": "Something else."})
        assert (answer.status, decode(answer.body, Run).prompt) == (200, "Something else.")
        assert [item.prompt for item in await harness.queue()] == ["Something else.", "Prompt b."]
        assert await answered(harness, "a", "b") == ["First.", "Something else.", "Prompt b."]
        assert ("user", "Something else.", "stop") in await harness.rows()
        assert (await queues(harness))[2] == ["a", "b"]  # The edit was published, too.


@pytest.mark.parametrize("prompt", ["", " \n"])
async def test_edit_to_an_empty_prompt_is_400_and_changes_nothing(
    tmp_path: Path, prompt: str
) -> None:
    async with open_queue(tmp_path, "a") as harness:
        assert (await harness.request("PUT", "/runs/a", {"prompt": prompt})).status == 400
        assert [item.prompt for item in await harness.queue()] == ["Prompt a."]


async def test_edit_of_a_started_or_ended_prompt_is_409(tmp_path: Path) -> None:
    async with open_queue(tmp_path) as harness:
        for _ in ("running", "ended"):
            answer = await harness.request("PUT", "/runs/first", {"prompt": "Too late."})
            assert (answer.status, b"run_started" in answer.body) == (409, True)
            await answered(harness)
        assert [text for _, text, _ in await harness.rows()] == ["First.", "Hello there."]


@contract("EXC-20")
async def test_reordered_queue_runs_in_its_order_and_later_prompts_come_last(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b", "c") as harness:
        answer = await harness.of_session("queue", "PUT", run_ids=["c", "a", "b"])
        assert answer.status == 200
        assert decode(answer.body, list[QueuedPrompt]) == await harness.queue()
        await harness.prompt("Prompt d.", run_id="d")
        assert [item.run_id for item in await harness.queue()] == ["c", "a", "b", "d"]
        asked = await answered(harness, "d")
        assert asked == ["First.", "Prompt c.", "Prompt a.", "Prompt b.", "Prompt d."]
        published = await queues(harness)
        assert published[3:5] == [["c", "a", "b"], ["c", "a", "b", "d"]]
        assert harness.received.completed() == ["first", "c", "a", "b", "d"]


@pytest.mark.parametrize(
    "order", [["a"], ["a", "b", "first"], ["a", "a"], ["a", "b", "b"], ["b", "x"], []]
)
async def test_order_that_differs_from_the_queued_runs_is_409(
    tmp_path: Path, order: list[str]
) -> None:
    async with open_queue(tmp_path, "a", "b") as harness:
        answer = await harness.of_session("queue", "PUT", run_ids=order)
        assert (answer.status, b"queue_differs" in answer.body) == (409, True)
        assert [item.run_id for item in await harness.queue()] == ["a", "b"]


@contract("INV-53", "EXC-12", "EXC-20")
async def test_cleared_queue_ends_each_run_once_and_the_running_one_continues(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a", "b") as harness:
        made = await harness.prompt("Without an id.")
        assert (await harness.of_session("prompts/clear")).status == 200
        assert await harness.queue() == []
        for run_id in ("a", "b", made):
            complete = await harness.received.complete(run_id)
            assert (complete.cancelled, complete.error) == (True, "")
        assert await answered(harness) == ["First."]
        await harness.catch_up()
        assert sorted(harness.received.completed()) == sorted(["a", "b", made, "first"])
        assert (await harness.of_session("prompts/clear")).status == 200
        assert [cancel.target for cancel in harness.received.cancels()][:1] == ["queue"]
        assert [text for _, text, _ in await harness.rows()] == ["First.", "Hello there."]


@contract("EXC-20")
async def test_queued_run_can_be_dropped_and_a_running_one_cannot(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b") as harness:
        answer = await harness.request("POST", "/runs/a/drop")
        assert (answer.status, decode(answer.body, Run).outcome) == (200, "canceled")
        assert (await harness.request("POST", "/runs/first/drop")).status == 409
        assert (await harness.request("POST", "/runs/b/start")).status == 409  # It is not held.
        assert await answered(harness, "b") == ["First.", "Prompt b."]
        again = await harness.request("POST", "/runs/a/drop")
        assert again.status == 409
        assert sorted(harness.received.completed()) == ["a", "b", "first"]


async def test_full_queue_is_429_until_there_is_room(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b", queue_max=2) as harness:
        answer = await harness.post("One too many.", run_id="c")
        assert (answer.status, b"limit_exceeded" in answer.body) == (429, True)
        # The same run id again does not count twice.
        assert await harness.prompt("Prompt b.", run_id="b") == "b"
        assert [item.run_id for item in await harness.queue()] == ["a", "b"]
        await harness.request("POST", "/runs/a/drop")
        assert await harness.prompt("One too many.", run_id="c") == "c"
        assert await answered(harness, "c") == ["First.", "Prompt b.", "One too many."]


async def test_prompt_beyond_the_run_limit_of_a_workspace_is_429(tmp_path: Path) -> None:
    settings = Settings(runs_max=2)
    async with open_runs(tmp_path, play=script(HELD, HELD), settings=settings) as harness:
        other = await harness.remote.create_session("other")
        third = await harness.remote.create_session("third")
        await harness.prompt("One.", run_id="one")
        await harness.prompt("Two.", other.id, run_id="two")
        assert (await harness.post("Three.", third.id)).status == 429
        await harness.until_asked(2)
        harness.model.release()
        await harness.received.complete("one")
        await harness.received.complete("two")
        await harness.received.complete(await harness.prompt("Three.", third.id))


# --- joining the turn


@contract("INV-35")
async def test_prompt_without_an_id_joins_the_running_turn_at_its_next_step(
    tmp_path: Path, kind: str
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through)]
    play = script(calling("held", text="One moment."))
    async with open_runs(tmp_path, kind, play, tools=tools) as harness:
        host = await harness.prompt("Hi.", run_id="host")
        await until(lambda: gate.inside == 1)
        guests = [await harness.prompt("And this."), await harness.prompt("And that.")]
        waits = await harness.prompt("Later.", run_id="waits")
        assert [item.run_id for item in await harness.queue()] == [*guests, waits]
        gate.release()
        host_end = await harness.received.complete(host)
        for guest in guests:
            end = await harness.received.complete(guest)
            assert (end.message_id, end.text) == (host_end.message_id, "Fine.")
            assert (await harness.run(guest)).host_run_id == host
            assert harness.received.states(guest) == ["queued", "folded", "ended"]
        await harness.received.complete(waits)
        await harness.catch_up()
        assert harness.received.completed() == [host, *guests, waits]
        roles = [(message.role, message.content) for message in harness.sent(2)]
        assert roles == [
            ("user", "Hi."),
            ("assistant", "One moment."),
            ("tool", "held passed"),
            ("user", "And this."),
            ("user", "And that."),
        ]
        assert len(harness.seen()) == 3
        prompts = [text for role, text, _ in await harness.rows() if role == "user"]
        assert prompts == ["Hi.", "And this.", "And that.", "Later."]


@contract("INV-35", "EXC-12")
async def test_prompt_without_an_id_and_next_step_gets_its_own_turn(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        await harness.prompt("Hi.", run_id="host")
        await harness.received.text("Hello")
        late = await harness.prompt("And this.")
        harness.model.release()
        assert (await harness.received.complete(late)).text == "Fine."
        run = await harness.run(late)
        assert (run.outcome, run.host_run_id) == ("end_turn", "")
        assert [text for _, text, _ in await harness.rows()] == [
            "Hi.", "Hello there.", "And this.", "Fine.",
        ]  # fmt: skip


@contract("INV-39")
async def test_failed_turn_is_one_error_and_ends_every_run_in_it(
    tmp_path: Path,
) -> None:
    gate = Gate()
    play = script(calling("held"), Reply(status=401))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as harness:
        host = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        guest = await harness.prompt("And this.")
        gate.release()
        for run_id in (host, guest):
            assert "Authentication" in (await harness.received.complete(run_id)).error
        assert [error.run_id for error in harness.received.errors()] == [host]


# --- steering


async def test_live_run_is_steered_before_its_next_step(tmp_path: Path, kind: str) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through)]
    async with open_runs(tmp_path, kind, script(calling("held")), tools=tools) as harness:
        host = await harness.prompt("Hi.", run_id="host")
        await until(lambda: gate.inside == 1)
        answer = await harness.of_session("steer", prompt="Rather this.")
        run = decode(answer.body, Run)
        assert (answer.status, run.state, run.prompt) == (202, "queued", "Rather this.")
        gate.release()
        await harness.received.complete(run.id)
        assert harness.sent(2)[-1].content == "Rather this."
        assert (await harness.run(run.id)).host_run_id == host


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [("Rather this.", 409, b"nothing_runs"), ("", 400, b"invalid_request")],
)
async def test_steering_without_a_run_is_409_and_without_text_400(
    tmp_path: Path, prompt: str, status: int, code: bytes
) -> None:
    async with open_runs(tmp_path) as harness:
        answer = await harness.of_session("steer", prompt=prompt)
        assert (answer.status, code in answer.body) == (status, True)
        assert (await harness.runs(), harness.model.requests) == ([], [])


async def test_session_delete_is_409_with_a_live_run_and_deletes_its_runs(
    tmp_path: Path,
) -> None:
    async with open_queue(tmp_path, "a") as harness:
        answer = await harness.request("DELETE", f"/sessions/{harness.session_id}")
        assert (answer.status, b"session_busy" in answer.body) == (409, True)
        assert len(await harness.messages()) == 2
        await answered(harness, "a")
        answer = await harness.request("DELETE", f"/sessions/{harness.session_id}")
        assert answer.status == 200
        assert await harness.runs() == []


async def test_simultaneous_edit_order_and_drop_lose_nothing(tmp_path: Path) -> None:
    async with open_queue(tmp_path, "a", "b", "c") as harness:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(harness.request("PUT", "/runs/b", {"prompt": "Edited."}))
            tasks.create_task(harness.of_session("queue", "PUT", run_ids=["c", "b", "a"]))
            tasks.create_task(harness.request("POST", "/runs/a/drop"))
            harness.model.release()
        for run_id in ("a", "b", "c"):
            await harness.received.complete(run_id)
        await harness.until_idle()
        await harness.catch_up()
        assert sorted(harness.received.completed()) == ["a", "b", "c", "first"]
        assert (await queues(harness))[-1] == []
