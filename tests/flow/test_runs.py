"""Runs: accepted at once, taken in order, ended once, whoever comes or goes meanwhile."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.agent import AgentEvent, AgentInfo, RunComplete
from culm.wire.messages import Message, full_text
from tests.flow.drive import UNKNOWN, send
from tests.flow.probes import script
from tests.flow.runs import Heard, open_heard, open_runs, open_stage, says
from tests.support import NO_MODEL, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def places(heard: Heard, *types: str) -> list[int]:
    return [n for n, told in enumerate(heard.told) if told.type in types]


# --- accepted


@contract("INV-29", "INV-36", "INV-37")
async def test_a_prompt_is_202_at_once_and_ends_once_with_the_final_text(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as stage:
        assert await stage.prompt("Hi.", run_id="mine") == "mine"
        await stage.heard.text("Hello")
        assert stage.heard.completes() == []
        stage.model.release()
        complete = await stage.heard.complete("mine")
        await stage.catch_up()
        rows = await stage.rows()
        assert rows == [("user", "Hi.", "stop"), ("assistant", "Hello there.", "end_turn")]
        answer = (await stage.messages())[1]
        assert complete == RunComplete(stage.session_id, "mine", answer.id, "Hello there.")
        assert stage.heard.completes() == [complete]


@contract("INV-37")
@pytest.mark.parametrize("view", ["delta", "crush"])
async def test_the_end_of_a_run_is_told_after_everything_that_its_messages_become(
    tmp_path: Path, view: str
) -> None:
    thinking = Reply(reasoning="Let me see.", text="It is so.")
    async with (
        open_runs(tmp_path, play=script(thinking)) as stage,
        open_heard(stage.remote, view=view) as heard,
    ):
        complete = await heard.complete(await stage.prompt("Is it so?"))
        await stage.catch_up(heard)
        (end,) = places(heard, "run_complete")
        assert max(places(heard, "message", "message_delta")) < end
        last = [told.read(Message) for told in heard.told if told.type == "message"][-1]
        assert [last] == (await stage.messages())[1:]
        assert (complete.message_id, complete.text) == (last.id, "It is so.")


@contract("INV-37")
async def test_a_long_final_text_is_whole_in_the_crush_view_and_in_the_message_before_its_end(
    tmp_path: Path,
) -> None:
    text = "A long sentence. " * 400
    async with (
        open_runs(tmp_path, play=script(Reply(text=text))) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("Tell me.")
        assert (await crush.complete(run_id)).text == text
        complete = await stage.heard.complete(run_id)
        told = [t.read(Message) for t in stage.heard.told if t.type == "message"][-1]
        assert (told.id, full_text(told.parts)) == (complete.message_id, text)
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
async def test_a_prompt_that_cannot_be_run_is_refused_at_once_and_starts_nothing(
    tmp_path: Path, body: dict[str, object], status: int, code: str
) -> None:
    async with open_runs(tmp_path) as stage:
        whole = {"session_id": stage.session_id, "prompt": "Hi.", **body}
        answer = await stage.request("POST", "/agent", whole)
        assert answer.status == status
        assert f'"code":"{code}"'.encode() in answer.body
        await stage.catch_up()
        assert (await stage.runs(), await stage.messages()) == ([], [])
        assert places(stage.heard, "run_changed", "run_complete", "agent_event") == []
        assert stage.model.requests == []
        assert not (await stage.session()).is_busy


@contract("INV-29")
async def test_a_prompt_to_an_unknown_workspace_is_404(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        body = {"session_id": stage.session_id, "prompt": "Hi."}
        answer = await send(stage.flow, "POST", f"/v1/workspaces/{UNKNOWN}/agent", body)
        assert answer.status == 404


@contract("INV-29")
async def test_a_prompt_without_any_model_is_400_and_says_what_to_do(tmp_path: Path) -> None:
    async with (
        open_model_server() as model,
        open_stage(tmp_path, "unix", model, config=NO_MODEL) as stage,
    ):
        answer = await stage.post("Hi.")
        assert answer.status == 400
        assert b"culm models" in answer.body
        info = await stage.ask("/agent", AgentInfo)
        assert (info.is_ready, info.is_busy) == (False, False)
        assert await stage.runs() == []


@contract("INV-29")
async def test_an_empty_prompt_beside_a_text_file_is_accepted_and_the_model_reads_the_file(
    tmp_path: Path,
) -> None:
    note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
    async with open_runs(tmp_path) as stage:
        await stage.heard.complete(await stage.prompt("", attachments=[note]))
        assert "hello file" in str(stage.sent(1)[0].content)


@contract("EXC-12")
async def test_a_prompt_without_an_id_gets_one_and_its_end_names_it(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        run_id = await stage.prompt("Hi.")
        complete = await stage.heard.complete(run_id)
        assert (complete.run_id, complete.text) == (run_id, "Fine.")
        run = await stage.run(run_id)
        assert (run.run_id_given, run.state, run.outcome) == (False, "ended", "end_turn")


# --- one at a time, in order


@contract("INV-32", "INV-33", "EXC-10", "EXC-11")
async def test_prompts_at_once_are_answered_one_at_a_time_in_the_order_of_their_acceptance(
    tmp_path: Path, kind: str
) -> None:
    held = [Reply(deltas=[f"{n}"], hold_after=1) for n in range(4)]
    async with open_runs(tmp_path, kind, script(*held)) as stage:
        async with asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(stage.prompt(f"Prompt {name}.", run_id=name))
        order = [run.id for run in reversed(await stage.runs())]
        for n, run_id in enumerate(order):
            seen = await stage.asked(n + 1)
            assert stage.sent(n + 1)[-1].content == f"Prompt {run_id}."
            assert [s.n for s in stage.seen() if not s.ended] == [seen.n]
            assert stage.heard.completed() == order[:n]
            stage.model.release(seen.n)
            await stage.heard.complete(run_id)
        texts = [text for role, text, _ in await stage.rows() if role == "assistant"]
        assert texts == ["0", "1", "2", "3"]


@contract("INV-34", "INV-41")
async def test_a_queued_prompt_with_an_id_has_a_turn_of_its_own_after_the_running_one(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD, HELD)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        await stage.prompt("Two.", run_id="two")
        assert (await stage.run("two")).state == "queued"
        stage.model.release()
        await stage.heard.complete("one")
        # The end of the first took nothing from the second.
        assert (await stage.session()).is_busy
        await stage.asked(2)
        stage.model.release()
        second = await stage.heard.complete("two")
        assert stage.heard.completed() == ["one", "two"]
        assert await stage.rows() == [
            ("user", "One.", "stop"),
            ("assistant", "Hello there.", "end_turn"),
            ("user", "Two.", "stop"),
            ("assistant", "Hello there.", "end_turn"),
        ]
        assert second.message_id == (await stage.messages())[3].id
        assert [m.content for m in stage.sent(2)] == ["One.", "Hello there.", "Two."]


@contract("EXC-1", "EXC-11")
async def test_a_failed_run_is_told_before_the_next_begins_and_the_next_runs_all_the_same(
    tmp_path: Path,
) -> None:
    refused = Reply(status=401, delay_s=0.05)
    async with open_runs(tmp_path, play=script(HELD, refused)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        await stage.prompt("Two.", run_id="two")
        await stage.prompt("Three.", run_id="three")
        stage.model.release()
        await stage.heard.complete("three")
        ends = [(c.run_id, bool(c.error)) for c in stage.heard.completes()]
        assert ends == [("one", False), ("two", True), ("three", False)]
        assert [error.run_id for error in stage.heard.errors()] == ["two"]

        def place(told_type: str, run_id: str, state: str = "") -> int:
            words = [f'"run_id":"{run_id}"', f'"state":"{state}"' if state else ""]
            told = stage.heard.told
            return next(n for n, t in enumerate(told) if t.type == told_type and says(t, *words))

        assert place("run_complete", "one") < place("run_changed", "two", "active")
        assert place("run_complete", "two") < place("run_changed", "three", "active")


# --- busy, and how it ended


@contract("INV-40")
@pytest.mark.parametrize("ending", ["agent_event", "run_complete"])
async def test_a_session_is_busy_from_its_202_and_no_longer_when_its_end_is_heard(
    tmp_path: Path, ending: str
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        await stage.prompt("Hi.")
        assert (await stage.session()).is_busy
        assert (await stage.ask("/agent", AgentInfo)).is_busy
        assert [s.is_busy for s in await stage.remote.sessions()] == [True]
        await stage.heard.text("Hello")
        stage.model.release()
        await stage.heard.until(lambda told: told.type == ending)
        assert not (await stage.session()).is_busy
        assert not (await stage.ask("/agent", AgentInfo)).is_busy


@contract("INV-40")
async def test_a_good_end_is_told_as_agent_finished_with_the_sessions_title(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        await stage.heard.complete(await stage.prompt("First."))
        await stage.heard.saying("session", "A title")
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        said = stage.heard.all("agent_event", AgentEvent)[-1]
        finished = AgentEvent("agent_finished", "", run_id, stage.session_id, "A title")
        assert said == finished


@contract("INV-38")
async def test_an_attempt_that_is_repeated_with_success_is_no_error_to_anybody(
    tmp_path: Path,
) -> None:
    broken = Reply(deltas=["Half an ", "answer"], cut_after=1)
    async with open_runs(tmp_path, play=script(broken)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.clock.pass_retry(5.0)
        complete = await stage.heard.complete(run_id)
        assert (complete.text, complete.error) == ("Fine.", "")
        await stage.catch_up()
        assert stage.heard.errors() == []
        assert stage.heard.completed() == [run_id]
        assert await stage.rows() == [("user", "Hi.", "stop"), ("assistant", "Fine.", "end_turn")]
        assert (await stage.messages())[1].rev == 2  # Taken back once, finished once.


@contract("INV-39")
async def test_a_failed_run_is_told_as_an_error_with_its_session_and_its_id(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(Reply(status=401))) as stage:
        run_id = await stage.prompt("Hi.", run_id="mine")
        complete = await stage.heard.complete(run_id)
        (error,) = stage.heard.errors()
        assert (error.session_id, error.run_id) == (stage.session_id, "mine")
        assert error.error == complete.error != ""
        run = await stage.run(run_id)
        assert (run.outcome, run.title) == ("error", "Authentication problem")
