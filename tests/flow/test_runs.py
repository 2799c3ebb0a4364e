"""Runs: accepted at once, started in order, ended once."""

import asyncio
from pathlib import Path

import pytest

from culm.store import writer
from culm.store.base import WriteJob, finish_group
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.messages import Message, full_text
from culm.wire.runs import AgentEvent, AgentInfo, RunComplete
from tests.flow.drive import UNKNOWN, send
from tests.flow.probes import script
from tests.flow.runs import ReceivedEvents, has_text, open_harness, open_received, open_runs
from tests.support import NO_MODEL, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def positions(received: ReceivedEvents, *types: str) -> list[int]:
    return [n for n, event in enumerate(received.events) if event.type in types]


# --- accepted


@contract("INV-29", "INV-36", "INV-37")
async def test_prompt_is_202_at_once_and_completes_once_with_the_final_text(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as harness:
        assert await harness.prompt("Hi.", run_id="mine") == "mine"
        await harness.received.text("Hello")
        assert harness.received.completes() == []
        harness.model.release()
        complete = await harness.received.complete("mine")
        await harness.catch_up()
        rows = await harness.rows()
        assert rows == [("user", "Hi.", "stop"), ("assistant", "Hello there.", "end_turn")]
        answer = (await harness.messages())[1]
        assert complete == RunComplete(harness.session_id, "mine", answer.id, "Hello there.")
        assert harness.received.completes() == [complete]


@contract("INV-37")
@pytest.mark.parametrize("view", ["delta", "crush"])
async def test_run_complete_is_published_after_all_message_events(
    tmp_path: Path, view: str
) -> None:
    thinking = Reply(reasoning="Let me see.", text="It is so.")
    async with (
        open_runs(tmp_path, play=script(thinking)) as harness,
        open_received(harness.remote, view=view) as received,
    ):
        complete = await received.complete(await harness.prompt("Is it so?"))
        await harness.catch_up(received)
        (end,) = positions(received, "run_complete")
        assert max(positions(received, "message", "message_delta")) < end
        last = [event.read(Message) for event in received.events if event.type == "message"][-1]
        assert [last] == (await harness.messages())[1:]
        assert (complete.message_id, complete.text) == (last.id, "It is so.")


@contract("INV-37")
async def test_long_final_text_is_complete_in_both_views(
    tmp_path: Path,
) -> None:
    text = "A long sentence. " * 400
    async with (
        open_runs(tmp_path, play=script(Reply(text=text))) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("Tell me.")
        assert (await crush.complete(run_id)).text == text
        complete = await harness.received.complete(run_id)
        message = [t.read(Message) for t in harness.received.events if t.type == "message"][-1]
        assert (message.id, full_text(message.parts)) == (complete.message_id, text)
        assert complete.text in ("", text)


@contract("INV-29")
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": ""}, 400, "invalid_request"),
        ({"prompt": " \n\t"}, 400, "invalid_request"),
        ({"prompt": "", "attachments": [{"mime_type": "image/png"}]}, 400, "invalid_request"),
        ({"session_id": ""}, 400, "invalid_request"),
        ({"session_id": UNKNOWN}, 404, "session_not_found"),
        ({"run_id": "x" * 201}, 400, "invalid_request"),
        ({"run_id": "a\r\nX-Injected: 1"}, 400, "invalid_request"),
        ({"run_id": "ö"}, 400, "invalid_request"),
        ({"limits": {"wall_s": -1}}, 400, "invalid_request"),
        ({"limits": {"steps": -1}}, 400, "invalid_request"),
        ({"limits": {"cost": "much"}}, 400, "invalid_request"),
        ({"prompt": "x" * ((4 << 20) + 1)}, 413, "too_large"),
    ],
)
async def test_invalid_prompt_is_refused_at_once_and_starts_nothing(
    tmp_path: Path, body: dict[str, object], status: int, code: str
) -> None:
    async with open_runs(tmp_path) as harness:
        whole = {"session_id": harness.session_id, "prompt": "Hi.", **body}
        answer = await harness.request("POST", "/agent", whole)
        assert answer.status == status
        assert f'"code":"{code}"'.encode() in answer.body
        await harness.catch_up()
        assert (await harness.runs(), await harness.messages()) == ([], [])
        assert positions(harness.received, "run_changed", "run_complete", "agent_event") == []
        assert harness.model.requests == []
        assert not (await harness.session()).is_busy


@contract("INV-29")
async def test_prompt_to_an_unknown_workspace_is_404(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        body = {"session_id": harness.session_id, "prompt": "Hi."}
        answer = await send(harness.flow, "POST", f"/v1/workspaces/{UNKNOWN}/agent", body)
        assert answer.status == 404


@contract("INV-29")
async def test_prompt_without_a_model_is_400_with_a_hint(tmp_path: Path) -> None:
    async with (
        open_model_server() as model,
        open_harness(tmp_path, "unix", model, config=NO_MODEL) as harness,
    ):
        answer = await harness.post("Hi.")
        assert answer.status == 400
        assert b"culm models" in answer.body
        info = await harness.ask("/agent", AgentInfo)
        assert (info.is_ready, info.is_busy) == (False, False)
        assert await harness.runs() == []


@contract("INV-29")
async def test_empty_prompt_with_a_text_file_is_accepted_and_the_file_is_sent(
    tmp_path: Path,
) -> None:
    note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
    async with open_runs(tmp_path) as harness:
        await harness.received.complete(await harness.prompt("", attachments=[note]))
        assert "hello file" in str(harness.sent(1)[0].content)


@contract("EXC-12")
async def test_prompt_without_an_id_gets_one_and_run_complete_names_it(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        run_id = await harness.prompt("Hi.")
        complete = await harness.received.complete(run_id)
        assert (complete.run_id, complete.text) == (run_id, "Fine.")
        run = await harness.run(run_id)
        assert (run.run_id_given, run.state, run.outcome) == (False, "ended", "end_turn")


# --- one at a time, in order


@contract("INV-32", "INV-33", "EXC-10", "EXC-11")
async def test_simultaneous_prompts_are_answered_in_order_of_acceptance(
    tmp_path: Path, kind: str
) -> None:
    held = [Reply(deltas=[f"{n}"], hold_after=1) for n in range(4)]
    async with open_runs(tmp_path, kind, script(*held)) as harness:
        async with asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(harness.prompt(f"Prompt {name}.", run_id=name))
        order = [run.id for run in reversed(await harness.runs())]
        for n, run_id in enumerate(order):
            seen = await harness.until_asked(n + 1)
            assert harness.sent(n + 1)[-1].content == f"Prompt {run_id}."
            assert [s.n for s in harness.seen() if not s.ended] == [seen.n]
            assert harness.received.completed() == order[:n]
            harness.model.release(seen.n)
            await harness.received.complete(run_id)
        texts = [text for role, text, _ in await harness.rows() if role == "assistant"]
        assert texts == ["0", "1", "2", "3"]


@contract("INV-34", "INV-41")
async def test_queued_prompt_with_an_id_gets_its_own_turn(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD, HELD)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        await harness.prompt("Two.", run_id="two")
        assert (await harness.run("two")).state == "queued"
        harness.model.release()
        await harness.received.complete("one")
        # The end of the first run does not affect the second.
        assert (await harness.session()).is_busy
        await harness.until_asked(2)
        harness.model.release()
        second = await harness.received.complete("two")
        assert harness.received.completed() == ["one", "two"]
        assert await harness.rows() == [
            ("user", "One.", "stop"),
            ("assistant", "Hello there.", "end_turn"),
            ("user", "Two.", "stop"),
            ("assistant", "Hello there.", "end_turn"),
        ]
        assert second.message_id == (await harness.messages())[3].id
        assert [m.content for m in harness.sent(2)] == ["One.", "Hello there.", "Two."]


@contract("EXC-1", "EXC-11")
async def test_failed_run_is_published_before_the_next_starts(
    tmp_path: Path,
) -> None:
    refused = Reply(status=401, delay_s=0.05)
    async with open_runs(tmp_path, play=script(HELD, refused)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        await harness.prompt("Two.", run_id="two")
        await harness.prompt("Three.", run_id="three")
        harness.model.release()
        await harness.received.complete("three")
        ends = [(c.run_id, bool(c.error)) for c in harness.received.completes()]
        assert ends == [("one", False), ("two", True), ("three", False)]
        assert [error.run_id for error in harness.received.errors()] == ["two"]

        def position(type_: str, run_id: str, state: str = "") -> int:
            texts = [f'"run_id":"{run_id}"', f'"state":"{state}"' if state else ""]
            events = harness.received.events
            return next(
                n
                for n, event in enumerate(events)
                if event.type == type_ and has_text(event, *texts)
            )

        assert position("run_complete", "one") < position("run_changed", "two", "active")
        assert position("run_complete", "two") < position("run_changed", "three", "active")


# --- busy state and outcome


@contract("INV-40")
@pytest.mark.parametrize("ending", ["agent_event", "run_complete"])
async def test_session_is_busy_from_the_202_until_its_end_is_published(
    tmp_path: Path, ending: str
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        await harness.prompt("Hi.")
        assert (await harness.session()).is_busy
        assert (await harness.ask("/agent", AgentInfo)).is_busy
        assert [s.is_busy for s in await harness.remote.sessions()] == [True]
        await harness.received.text("Hello")
        harness.model.release()
        await harness.received.until(lambda event: event.type == ending)
        assert not (await harness.session()).is_busy
        assert not (await harness.ask("/agent", AgentInfo)).is_busy


@contract("INV-40")
async def test_session_of_a_run_that_is_shown_as_ended_is_not_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_late(jobs: list[WriteJob]) -> None:
        asyncio.get_running_loop().call_later(0.05, finish_group, jobs)

    monkeypatch.setattr(writer, "finish_group", finish_late)
    async with open_runs(tmp_path) as harness:
        run_id = await harness.prompt("Hi.")
        while (await harness.run(run_id)).state != "ended":
            pass
        await harness.remote.delete_session(harness.session_id)


@contract("INV-40")
async def test_successful_run_is_published_as_agent_finished_with_the_title(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        await harness.received.complete(await harness.prompt("First."))
        await harness.received.event_with("session", "A title")
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        published = harness.received.all("agent_event", AgentEvent)[-1]
        finished = AgentEvent("agent_finished", "", run_id, harness.session_id, "A title")
        assert published == finished


@contract("INV-38")
async def test_successful_retry_is_not_an_error(
    tmp_path: Path,
) -> None:
    broken = Reply(deltas=["Half an ", "answer"], cut_after=1)
    async with open_runs(tmp_path, play=script(broken)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.clock.pass_retry(5.0)
        complete = await harness.received.complete(run_id)
        assert (complete.text, complete.error) == ("Fine.", "")
        await harness.catch_up()
        assert harness.received.errors() == []
        assert harness.received.completed() == [run_id]
        assert await harness.rows() == [("user", "Hi.", "stop"), ("assistant", "Fine.", "end_turn")]
        assert (await harness.messages())[1].rev == 2  # Cleared once, finished once.


@contract("INV-39")
async def test_failed_run_is_published_as_an_error_with_session_and_run_id(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(Reply(status=401))) as harness:
        run_id = await harness.prompt("Hi.", run_id="mine")
        complete = await harness.received.complete(run_id)
        (error,) = harness.received.errors()
        assert (error.session_id, error.run_id) == (harness.session_id, "mine")
        assert error.error == complete.error != ""
        run = await harness.run(run_id)
        assert (run.outcome, run.title) == ("error", "Authentication problem")
