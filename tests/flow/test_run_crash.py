"""Runs after a `kill -9`: correct rows, nothing runs twice, and resumable runs resume."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, ReplyRule
from culm.wire.runs import Run
from tests.flow.conftest import open_flow
from tests.flow.drive import until
from tests.flow.probes import SUMMARY, Gate, Probe, WaitableClock, calling, script
from tests.flow.reading import assert_answered, assert_paired, results_of
from tests.flow.restarts import AWAY_S, ends, open_restarts, outcomes
from tests.flow.runs import CrashImage, held_readers, open_received
from tests.support import contract, model_config

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@contract("EXC-16")
@pytest.mark.parametrize("away_s", [AWAY_S, 600.0])
async def test_accepted_run_resumes_after_a_crash_with_its_whole_request(
    tmp_path: Path, away_s: float
) -> None:
    note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
    async with open_restarts(tmp_path, script()) as restarts:
        async with restarts.first() as harness:
            async with held_readers(harness):
                run_id = await harness.prompt("Read.", attachments=[note], limits={"steps": 7})
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        first_asked = len(harness.seen())
        async with restarts.next(away_s=away_s, image=image) as harness:
            assert (await harness.received.complete(run_id)).text == "Fine."
            assert await ends(harness) == [(run_id, "good")]
            assert [text for _, text, _ in await harness.rows()] == ["Read.", "Fine."]
            assert "hello file" in str(harness.sent(first_asked + 1)[0].content)


@contract("EXC-16")
async def test_server_opens_a_workspace_with_resumable_runs_without_a_client(
    tmp_path: Path, kind: str
) -> None:
    async with open_restarts(tmp_path, script(), kind) as restarts:
        async with restarts.first() as harness:
            async with held_readers(harness):
                run_id = await harness.prompt("Hi.")
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        before = len(harness.seen())
        image.restore()
        config = model_config(restarts.model.url)
        clock = WaitableClock(restarts.clock.now_s() + AWAY_S)
        async with open_flow(tmp_path, kind, clock=clock, config=config) as flow:
            await until(lambda: len(harness.seen()) > before)
            remote = await (await flow.client()).open_workspace(flow.directory())
            async with open_received(remote) as received:
                await until(lambda: not flow.workspace(remote.id).runs.live())
                runs = await remote.client.ask("GET", remote.path("/runs"), list[Run])
                assert [run.outcome for run in runs] == ["end_turn"]
                assert received.errors() == []


@contract("EXC-16")
async def test_accepted_run_is_held_after_more_than_ten_minutes_away(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script()) as restarts:
        async with restarts.first() as harness:
            async with held_readers(harness):
                run_id = await harness.prompt("Hi.")
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        before = len(harness.seen())
        async with restarts.next(away_s=601.0, image=image) as harness:
            run = await harness.run(run_id)
            assert (run.state, "away" in run.title) == ("held", True)
            assert len(harness.seen()) == before
            assert (await harness.request("POST", f"/runs/{run_id}/start")).status == 200
            assert (await harness.received.complete(run_id)).text == "Fine."


@contract("EXC-16")
async def test_time_away_counts_from_the_last_activity_of_the_server(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script()) as restarts:
        async with restarts.first() as harness:
            for _ in range(50):  # It runs for longer than the limit for resuming.
                harness.clock.advance(30.0)
            async with held_readers(harness):
                run_id = await harness.prompt("Hi.")
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        async with restarts.next(away_s=599.0, image=image) as harness:
            assert (await harness.received.complete(run_id)).text == "Fine."


@contract("EXC-16")
async def test_run_with_a_missing_provider_is_held_and_never_changes_provider(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script()) as restarts:
        async with restarts.first() as harness:
            async with held_readers(harness):
                run_id = await harness.prompt("Hi.")
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        before = len(harness.seen())
        other = {
            "type": "openai-compat",
            "base_url": restarts.model.url,
            "models": [{"id": "other"}],
        }
        chosen = {"large": {"provider": "other", "model": "other"}}
        config: dict[str, object] = {"providers": {"other": other}, "models": chosen}
        async with restarts.next(image=image, config=config) as harness:
            run = await harness.run(run_id)
            assert (run.state, "'demo'" in run.title) == ("held", True)
            answer = await harness.request("POST", f"/runs/{run_id}/start")
            assert (answer.status, b"model_missing" in answer.body) == (409, True)
            assert (await harness.run(run_id)).state == "held"
        async with restarts.next() as harness:
            assert (await harness.run(run_id)).state == "held"
            assert (await harness.request("POST", f"/runs/{run_id}/start")).status == 200
            await harness.received.complete(run_id)
            assert (await harness.run(run_id)).provider == "demo"
        assert len(harness.seen()) == before + 1


@contract("EXC-16", "EXC-9")
async def test_open_calls_after_a_crash_are_answered_by_their_crash_policy(
    tmp_path: Path,
) -> None:
    gate = Gate()
    done = Probe("done")
    side = [
        Probe(name, gate.pass_through, parallel=True, crash=name)
        for name in ("again", "ask", "never")
    ]
    tools = [done, *side, Probe("last")]
    play = script(calling("done", "again", "ask", "never", "last"))
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(*tools) as harness:
            await harness.prompt("Hi.", run_id="mine")
            await until(lambda: gate.inside == 3)
            image = CrashImage(harness)
        async with restarts.next(*tools, image=image) as harness:
            assert await ends(harness) == [("mine", "interrupted")]
            messages = await harness.messages()
            assert_answered(messages)
            contents = {result.name: result.content for result in results_of(messages)}
            assert contents["done"] == "done 1"
            assert "safe to repeat" in contents["again"]
            assert "Check before" in contents["ask"]
            assert "Do not repeat" in contents["never"]
            assert "Not run" in contents["last"]
            assert [len(tool.calls) for tool in tools] == [1, 1, 1, 1, 0]
            await harness.received.complete(await harness.prompt("Again."))
            assert_paired(harness.sent(2))


@contract("EXC-16", "EXC-28")
async def test_stored_part_of_a_streamed_answer_survives_a_crash(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script(HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            harness.clock.advance(0.1)
            await harness.catch_up()
            image = CrashImage(harness)
        async with restarts.next(image=image) as harness:
            assert (await harness.rows())[1] == ("assistant", "Hello ", "error")
            assert await ends(harness) == [("mine", "interrupted")]
            run = await harness.run("mine")  # A token has four bytes.
            assert (run.estimated, run.steps, run.prompt_tokens, run.completion_tokens) == (
                True, 1, 1, 2,
            )  # fmt: skip


@contract("INV-48", "INV-49", "EXC-16")
async def test_answered_cancel_survives_a_crash_and_covers_no_later_run(
    tmp_path: Path,
) -> None:
    cleaning = Gate()
    tools = [Probe("slow", cleaning.clean_up_slowly)]
    async with open_restarts(tmp_path, script(calling("slow"))) as restarts:
        async with restarts.first(*tools) as harness:
            await harness.prompt("Hi.", run_id="active")
            await until(lambda: cleaning.inside == 1)
            await harness.prompt("Behind.", run_id="queued")
            await harness.cancel()
            await harness.prompt("After.", run_id="later")
            image = CrashImage(harness)
            cleaning.release()
            await harness.received.complete("later")
        before = len(harness.seen())
        async with restarts.next(*tools, image=image) as harness:
            await harness.received.complete("later")
            ended = await ends(harness)
            assert sorted(ended) == [
                ("active", "canceled"),
                ("later", "good"),
                ("queued", "canceled"),
            ]
            assert harness.sent(before + 1)[-1].content == "After."
            assert len(harness.seen()) == before + 1
            assert_answered(await harness.messages())
            settled = {run.run_id: run.settled for run in harness.received.cancels()[-1].runs}
            assert settled == {"active": "canceled", "queued": "canceled"}


@contract("EXC-10", "EXC-20", "EXC-16")
async def test_queue_keeps_its_order_after_a_crash(tmp_path: Path) -> None:
    cleaning = Gate()
    tools = [Probe("slow", cleaning.clean_up_slowly)]
    async with open_restarts(tmp_path, script(calling("slow"))) as restarts:
        async with restarts.first(*tools) as harness:
            await harness.prompt("Hi.", run_id="active")
            await until(lambda: cleaning.inside == 1)
            await harness.cancel()
            for name in "abc":
                await harness.prompt(f"Prompt {name}.", run_id=name)
            await harness.of_session("queue", "PUT", run_ids=["c", "a", "b"])
            await harness.prompt("Prompt d.", run_id="d")
            await harness.request("PUT", "/runs/a", {"prompt": "Edited a."})
            image = CrashImage(harness)
            cleaning.release()
            await harness.received.complete("d")
        before = len(harness.seen())
        async with restarts.next(*tools, image=image) as harness:
            await harness.received.complete("d")
            asked = [
                harness.sent(n)[-1].content for n in range(before + 1, len(harness.seen()) + 1)
            ]
            assert asked == ["Prompt c.", "Edited a.", "Prompt b.", "Prompt d."]
            ended = await ends(harness)
            assert ended == [("active", "canceled"), *((name, "good") for name in "cabd")]


@contract("EXC-16", "INV-36")
@pytest.mark.parametrize("cancelled", [False, True])
async def test_runs_sharing_a_turn_end_together_after_a_crash(
    tmp_path: Path, *, cancelled: bool
) -> None:
    gate, cleaning = Gate(), Gate()
    tools = [Probe("held", gate.pass_through), Probe("slow", cleaning.clean_up_slowly)]
    async with open_restarts(tmp_path, script(calling("held"), calling("slow"))) as restarts:
        async with restarts.first(*tools) as harness:
            await harness.prompt("Hi.", run_id="host")
            await until(lambda: gate.inside == 1)
            guest = await harness.prompt("And this.")
            gate.release()
            await until(lambda: cleaning.inside == 1)
            await harness.prompt("Behind.", run_id="behind")
            if cancelled:
                # Cancelled by id, so that it covers only the host.
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(harness.cancel_run("host"))
                    await harness.received.event_with("cancel_changed", "requested")
                    image = CrashImage(harness)
                    cleaning.release()
            else:
                image = CrashImage(harness)
                cleaning.release()
        async with restarts.next(*tools, image=image) as harness:
            how = "canceled" if cancelled else "interrupted"
            if cancelled:  # Nothing was interrupted, so the next run starts.
                await harness.received.complete("behind")
            ended = await ends(harness)
            assert ended[:2] == [("host", how), (guest, how)]
            behind = "end_turn" if cancelled else "held"
            assert (await outcomes(harness))["behind"] == behind


@contract("EXC-3", "EXC-16")
async def test_summary_interrupted_by_a_crash_leaves_no_trace(tmp_path: Path) -> None:
    play = script(rules=[ReplyRule(when=SUMMARY, reply=HELD)])
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first() as harness:
            await harness.received.complete(await harness.prompt("Hi.", run_id="one"))
            summary = (await harness.of_session("compact")).headers["culm-run-id"]
            await harness.received.text("Hello")
            image = CrashImage(harness)
        async with restarts.next(image=image) as harness:
            assert [text for _, text, _ in await harness.rows()] == ["Hi.", "Fine."]
            assert (await harness.session()).summary_message_id == ""
            assert await ends(harness) == [("one", "good"), (summary, "interrupted")]
            complete = await harness.received.complete(summary)
            assert (complete.message_id, complete.text) == ("", "")
            run = await harness.run(summary)
            assert (run.estimated, run.steps, run.completion_tokens) == (True, 1, 2)


@contract("INV-36", "EXC-16")
async def test_run_id_used_before_a_restart_starts_no_new_run(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script(Reply(text="Done."), HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.received.complete(await harness.prompt("One.", run_id="ended"))
            await harness.prompt("Two.", run_id="broken")
            await harness.received.text("Hello")
            await harness.prompt("Three.", run_id="held")
        before = len(harness.seen())
        async with restarts.next() as harness:
            for prompt, run_id in [("One.", "ended"), ("Two.", "broken"), ("Three.", "held")]:
                assert await harness.prompt(prompt, run_id=run_id) == run_id
                assert (await harness.post("Other.", run_id=run_id)).status == 409
            await harness.until_idle()
            assert await outcomes(harness) == {
                "ended": "end_turn",
                "broken": "interrupted",
                "held": "held",
            }
            assert (len(harness.seen()), len(await harness.messages())) == (before, 4)
