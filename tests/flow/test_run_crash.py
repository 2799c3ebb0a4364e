"""After a `kill -9`: a truthful record, nothing done twice, and what may go on goes on."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, Rule
from culm.wire.runs import Run
from tests.flow.conftest import open_flow
from tests.flow.drive import until
from tests.flow.lives import AWAY_S, ends, open_lives, outcomes
from tests.flow.probes import SUMMARY, Gate, Probe, Wound, calling, script
from tests.flow.reading import assert_answered, assert_paired, results_of
from tests.flow.runs import Image, held_readers, open_heard
from tests.support import contract, model_config

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@contract("EXC-16")
@pytest.mark.parametrize("away_s", [AWAY_S, 600.0])
async def test_an_accepted_run_goes_on_by_itself_with_all_that_was_asked(
    tmp_path: Path, away_s: float
) -> None:
    note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
    async with open_lives(tmp_path, script()) as lives:
        async with lives.first() as stage:
            async with held_readers(stage):
                run_id = await stage.prompt("Read.", attachments=[note], limits={"steps": 7})
                image = Image(stage)
            await stage.heard.complete(run_id)
        first_asked = len(stage.seen())
        async with lives.next(away_s=away_s, image=image) as stage:
            assert (await stage.heard.complete(run_id)).text == "Fine."
            assert await ends(stage) == [(run_id, "good")]
            assert [text for _, text, _ in await stage.rows()] == ["Read.", "Fine."]
            assert "hello file" in str(stage.sent(first_asked + 1)[0].content)


@contract("EXC-16")
async def test_the_server_opens_a_workspace_whose_runs_may_go_on_although_nobody_asks(
    tmp_path: Path, kind: str
) -> None:
    async with open_lives(tmp_path, script(), kind) as lives:
        async with lives.first() as stage:
            async with held_readers(stage):
                run_id = await stage.prompt("Hi.")
                image = Image(stage)
            await stage.heard.complete(run_id)
        before = len(stage.seen())
        image.restore()
        config = model_config(lives.model.url)
        clock = Wound(lives.clock.now_s() + AWAY_S)
        async with open_flow(tmp_path, kind, clock=clock, config=config) as flow:
            await until(lambda: len(stage.seen()) > before)
            remote = await (await flow.client()).open_workspace(flow.directory())
            async with open_heard(remote) as heard:
                await until(lambda: not flow.workspace(remote.id).runs.live())
                runs = await remote.client.ask("GET", remote.path("/runs"), list[Run])
                assert [run.outcome for run in runs] == ["end_turn"]
                assert heard.errors() == []


@contract("EXC-16")
async def test_an_accepted_run_is_held_after_more_than_ten_minutes_and_says_so(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script()) as lives:
        async with lives.first() as stage:
            async with held_readers(stage):
                run_id = await stage.prompt("Hi.")
                image = Image(stage)
            await stage.heard.complete(run_id)
        before = len(stage.seen())
        async with lives.next(away_s=601.0, image=image) as stage:
            run = await stage.run(run_id)
            assert (run.state, "away" in run.title) == ("held", True)
            assert len(stage.seen()) == before
            assert (await stage.request("POST", f"/runs/{run_id}/start")).status == 200
            assert (await stage.heard.complete(run_id)).text == "Fine."


@contract("EXC-16")
async def test_a_server_that_was_alive_a_moment_ago_is_not_taken_for_one_that_was_away(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script()) as lives:
        async with lives.first() as stage:
            for _ in range(50):  # It lives for longer than anybody may be away.
                stage.clock.advance(30.0)
            async with held_readers(stage):
                run_id = await stage.prompt("Hi.")
                image = Image(stage)
            await stage.heard.complete(run_id)
        async with lives.next(away_s=599.0, image=image) as stage:
            assert (await stage.heard.complete(run_id)).text == "Fine."


@contract("EXC-16")
async def test_a_run_whose_provider_is_gone_is_held_and_never_changes_to_another(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script()) as lives:
        async with lives.first() as stage:
            async with held_readers(stage):
                run_id = await stage.prompt("Hi.")
                image = Image(stage)
            await stage.heard.complete(run_id)
        before = len(stage.seen())
        other = {"type": "openai-compat", "base_url": lives.model.url, "models": [{"id": "other"}]}
        chosen = {"large": {"provider": "other", "model": "other"}}
        config: dict[str, object] = {"providers": {"other": other}, "models": chosen}
        async with lives.next(image=image, config=config) as stage:
            run = await stage.run(run_id)
            assert (run.state, "'demo'" in run.title) == ("held", True)
            answer = await stage.request("POST", f"/runs/{run_id}/start")
            assert (answer.status, b"model_missing" in answer.body) == (409, True)
            assert (await stage.run(run_id)).state == "held"
        async with lives.next() as stage:
            assert (await stage.run(run_id)).state == "held"
            assert (await stage.request("POST", f"/runs/{run_id}/start")).status == 200
            await stage.heard.complete(run_id)
            assert (await stage.run(run_id)).provider == "demo"
        assert len(stage.seen()) == before + 1


@contract("EXC-16", "EXC-9")
async def test_calls_that_a_crash_left_open_are_answered_by_their_policy_and_not_repeated(
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
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(*tools) as stage:
            await stage.prompt("Hi.", run_id="mine")
            await until(lambda: gate.inside == 3)
            image = Image(stage)
        async with lives.next(*tools, image=image) as stage:
            assert await ends(stage) == [("mine", "interrupted")]
            messages = await stage.messages()
            assert_answered(messages)
            said = {result.name: result.content for result in results_of(messages)}
            assert said["done"] == "done 1"
            assert "safe to repeat" in said["again"]
            assert "Check before" in said["ask"]
            assert "Do not repeat" in said["never"]
            assert "Not run" in said["last"]
            assert [len(tool.calls) for tool in tools] == [1, 1, 1, 1, 0]
            await stage.heard.complete(await stage.prompt("Again."))
            assert_paired(stage.sent(2))


@contract("EXC-16")
async def test_what_had_streamed_before_a_crash_is_kept_as_far_as_it_was_stored(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script(HELD)) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            stage.clock.advance(0.1)
            await stage.catch_up()
            image = Image(stage)
        async with lives.next(image=image) as stage:
            assert (await stage.rows())[1] == ("assistant", "Hello ", "error")
            assert await ends(stage) == [("mine", "interrupted")]


@contract("INV-48", "INV-49", "EXC-16")
async def test_a_cancel_that_was_answered_survives_a_crash_and_covers_nothing_accepted_later(
    tmp_path: Path,
) -> None:
    cleaning = Gate()
    tools = [Probe("slow", cleaning.clean_up_slowly)]
    async with open_lives(tmp_path, script(calling("slow"))) as lives:
        async with lives.first(*tools) as stage:
            await stage.prompt("Hi.", run_id="active")
            await until(lambda: cleaning.inside == 1)
            await stage.prompt("Behind.", run_id="queued")
            await stage.cancel()
            await stage.prompt("After.", run_id="later")
            image = Image(stage)
            cleaning.release()
            await stage.heard.complete("later")
        before = len(stage.seen())
        async with lives.next(*tools, image=image) as stage:
            await stage.heard.complete("later")
            told = await ends(stage)
            assert sorted(told) == [
                ("active", "canceled"),
                ("later", "good"),
                ("queued", "canceled"),
            ]
            assert stage.sent(before + 1)[-1].content == "After."
            assert len(stage.seen()) == before + 1
            assert_answered(await stage.messages())
            settled = {run.run_id: run.settled for run in stage.heard.cancels()[-1].runs}
            assert settled == {"active": "canceled", "queued": "canceled"}


@contract("EXC-10", "EXC-20", "EXC-16")
async def test_a_queue_keeps_its_order_through_a_crash(tmp_path: Path) -> None:
    cleaning = Gate()
    tools = [Probe("slow", cleaning.clean_up_slowly)]
    async with open_lives(tmp_path, script(calling("slow"))) as lives:
        async with lives.first(*tools) as stage:
            await stage.prompt("Hi.", run_id="active")
            await until(lambda: cleaning.inside == 1)
            await stage.cancel()
            for name in "abc":
                await stage.prompt(f"Prompt {name}.", run_id=name)
            await stage.of_session("queue", "PUT", run_ids=["c", "a", "b"])
            await stage.prompt("Prompt d.", run_id="d")
            await stage.request("PUT", "/runs/a", {"prompt": "Edited a."})
            image = Image(stage)
            cleaning.release()
            await stage.heard.complete("d")
        before = len(stage.seen())
        async with lives.next(*tools, image=image) as stage:
            await stage.heard.complete("d")
            asked = [stage.sent(n)[-1].content for n in range(before + 1, len(stage.seen()) + 1)]
            assert asked == ["Prompt c.", "Edited a.", "Prompt b.", "Prompt d."]
            told = await ends(stage)
            assert told == [("active", "canceled"), *((name, "good") for name in "cabd")]


@contract("EXC-16", "INV-36")
@pytest.mark.parametrize("cancelled", [False, True])
async def test_runs_that_share_a_turn_end_together_through_a_crash(
    tmp_path: Path, *, cancelled: bool
) -> None:
    gate, cleaning = Gate(), Gate()
    tools = [Probe("held", gate.pass_through), Probe("slow", cleaning.clean_up_slowly)]
    async with open_lives(tmp_path, script(calling("held"), calling("slow"))) as lives:
        async with lives.first(*tools) as stage:
            await stage.prompt("Hi.", run_id="host")
            await until(lambda: gate.inside == 1)
            guest = await stage.prompt("And this.")
            gate.release()
            await until(lambda: cleaning.inside == 1)
            await stage.prompt("Behind.", run_id="behind")
            if cancelled:
                # Named, so that it covers the host alone.
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(stage.cancel_run("host"))
                    await stage.heard.saying("cancel_changed", "requested")
                    image = Image(stage)
                    cleaning.release()
            else:
                image = Image(stage)
                cleaning.release()
        async with lives.next(*tools, image=image) as stage:
            how = "canceled" if cancelled else "interrupted"
            if cancelled:  # Nothing was interrupted, so it goes on.
                await stage.heard.complete("behind")
            told = await ends(stage)
            assert told[:2] == [("host", how), (guest, how)]
            behind = "end_turn" if cancelled else "held"
            assert (await outcomes(stage))["behind"] == behind


@contract("EXC-3", "EXC-16")
async def test_a_summary_that_a_crash_broke_off_leaves_nothing_of_itself(tmp_path: Path) -> None:
    play = script(rules=[Rule(when=SUMMARY, reply=HELD)])
    async with open_lives(tmp_path, play) as lives:
        async with lives.first() as stage:
            await stage.heard.complete(await stage.prompt("Hi.", run_id="one"))
            summary = (await stage.of_session("compact")).headers["culm-run-id"]
            await stage.heard.text("Hello")
            image = Image(stage)
        async with lives.next(image=image) as stage:
            assert [text for _, text, _ in await stage.rows()] == ["Hi.", "Fine."]
            assert (await stage.session()).summary_message_id == ""
            assert await ends(stage) == [("one", "good"), (summary, "interrupted")]
            complete = await stage.heard.complete(summary)
            assert (complete.message_id, complete.text) == ("", "")


@contract("INV-36", "EXC-16")
async def test_a_run_id_that_was_used_in_an_earlier_life_starts_nothing_in_a_later_one(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script(Reply(text="Done."), HELD)) as lives:
        async with lives.first() as stage:
            await stage.heard.complete(await stage.prompt("One.", run_id="ended"))
            await stage.prompt("Two.", run_id="broken")
            await stage.heard.text("Hello")
            await stage.prompt("Three.", run_id="held")
        before = len(stage.seen())
        async with lives.next() as stage:
            for prompt, run_id in [("One.", "ended"), ("Two.", "broken"), ("Three.", "held")]:
                assert await stage.prompt(prompt, run_id=run_id) == run_id
                assert (await stage.post("Other.", run_id=run_id)).status == 409
            await stage.until_idle()
            assert await outcomes(stage) == {
                "ended": "end_turn",
                "broken": "interrupted",
                "held": "held",
            }
            assert (len(stage.seen()), len(await stage.messages())) == (before, 4)
