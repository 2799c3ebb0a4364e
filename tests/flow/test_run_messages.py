"""Every message says in whose turn it stands: live, listed, replayed, and after a crash."""

from pathlib import Path

from culm.testing.script import Reply, Rule, ScriptedUsage
from culm.wire.codec import decode
from culm.wire.messages import Message, full_text
from culm.wire.runs import Run
from tests.flow.agents_lives import open_lives as open_agents_lives
from tests.flow.agents_stage import calls, held, open_agents, start, talk
from tests.flow.drive import until
from tests.flow.lives import open_lives, outcomes
from tests.flow.mail_stage import deliver, letter, ring, until_state
from tests.flow.probes import SUMMARY, Gate, Probe, calling, script
from tests.flow.runs import Image, Stage, held_readers, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
SHORT = Rule(when=SUMMARY, reply=Reply(text="In short."))

Row = tuple[str, str, str]


def rows_of(messages: list[Message]) -> list[Row]:
    return [(m.run_id, m.role, full_text(m.parts)) for m in messages]


async def rows(stage: Stage) -> list[Row]:
    """Run, role and text of every message; whoever was told of them, was told the same."""
    listed = await stage.messages()
    await stage.catch_up()
    run_ids = {message.id: message.run_id for message in listed}
    told = [m for m in stage.heard.all("message", Message) if m.id in run_ids]
    assert {message.id for message in told} == set(run_ids)
    assert [m for m in told if m.run_id != run_ids[m.id]] == [], "it never changes"
    return rows_of(listed)


@contract("EXC-25")
async def test_prompts_answers_and_results_of_each_run_in_a_queue_have_its_id(
    tmp_path: Path, kind: str
) -> None:
    play = script(calling("look", "look"), HELD)
    async with open_runs(tmp_path, kind, play, tools=[Probe("look")]) as stage:
        await stage.prompt("First.", run_id="first")
        await stage.prompt("Second.", run_id="second")
        await stage.heard.text("Hello")
        grown = (await stage.messages())[-1]
        assert (grown.run_id, full_text(grown.parts)) == ("first", "Hello "), "also while it grows"
        stage.model.release()
        await stage.heard.complete("second")
        assert await rows(stage) == [
            ("first", "user", "First."),
            ("first", "assistant", ""),
            ("first", "tool", ""),
            ("first", "tool", ""),
            ("first", "assistant", "Hello there."),
            ("second", "user", "Second."),
            ("second", "assistant", "Fine."),
        ]


@contract("EXC-25")
async def test_what_joins_a_turn_has_the_id_of_its_host(tmp_path: Path) -> None:
    gate = Gate()
    play, slow = script(calling("slow")), Probe("slow", gate.pass_through)
    async with open_runs(tmp_path, play=play, tools=[slow]) as stage:
        host = await stage.prompt("First.")
        await until(lambda: gate.inside == 1)
        joins = await stage.prompt("And this.")
        steers = decode((await stage.of_session("steer", prompt="Quick.")).body, Run).id
        gate.release()
        for run_id in (host, joins, steers):
            await stage.heard.complete(run_id)
        assert {(await stage.run(run_id)).host_run_id for run_id in (joins, steers)} == {host}
        assert await rows(stage) == [
            (host, "user", "First."),
            (host, "assistant", ""),
            (host, "tool", ""),
            (host, "user", "And this."),
            (host, "user", "Quick."),
            (host, "assistant", "Fine."),
        ]


@contract("EXC-25")
async def test_what_a_cancel_leaves_of_a_run_that_never_began_is_that_runs(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        async with held_readers(stage):
            run_id = await stage.prompt("Hi.")
            await stage.cancel()
        await stage.heard.complete(run_id)
        assert await rows(stage) == [(run_id, "user", "Hi."), (run_id, "assistant", "")]


@contract("EXC-25")
async def test_a_summary_is_of_the_run_that_made_it_and_a_shell_command_of_none(
    tmp_path: Path,
) -> None:
    full = Reply(text="Long.", usage=ScriptedUsage(input=7_990, output=10))
    play, info = script(full, rules=[SHORT]), {"context_window": 10_000}
    async with open_runs(tmp_path, play=play, info=info) as stage:
        run_id = await stage.prompt("Hi.")  # Its answer fills the context.
        await stage.heard.complete(run_id)
        assert (await stage.of_session("shell", command="true")).status == 200
        assert (await stage.of_session("summarize")).status == 200
        (summary,) = [run for run in await stage.runs() if run.kind == "summary"]
        await stage.heard.complete(summary.id)
        assert await rows(stage) == [
            (run_id, "user", "Hi."),
            (run_id, "assistant", "Long."),
            (run_id, "assistant", "In short."),
            ("", "user", ""),
            (summary.id, "assistant", "In short."),
        ]


# --- agents


@contract("EXC-25")
async def test_messages_of_an_agent_are_its_assignments_with_what_was_said_to_it_meanwhile(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", calls("agent_list"), held("", calls=calls("agent_list").calls), then="Yes."),
    ) as stage:
        lead = await stage.prompt("@lead: go")
        working, ann = await stage.asked_by("@ann", 2), await stage.agent("@ann")
        await stage.prompt("also this", ann.session_id)
        deliver(stage, ann.agent_id, letter(stage, "note"))
        await ring(stage, ann.agent_id)
        await until_state(stage, "note", "delivered")
        stage.release(working)
        await stage.heard.complete(lead)
        more = await stage.prompt("@ann: more", ann.session_id)
        await stage.heard.complete(more)
        assert {row[0] for row in await rows(stage)} == {lead}
        found = rows_of(await stage.messages_of("@ann"))
        assert [(run_id, role, text.split("\n")[0][:9]) for run_id, role, text in found] == [
            (ann.run_id, "user", "@ann: go"),
            (ann.run_id, "assistant", ""),
            (ann.run_id, "tool", ""),
            (ann.run_id, "assistant", ""),
            (ann.run_id, "tool", ""),
            (ann.run_id, "user", "also this"),
            (ann.run_id, "user", "[Letter n"),
            (ann.run_id, "assistant", "Yes."),
            (more, "user", "@ann: mor"),
            (more, "assistant", "Yes."),
        ]


@contract("EXC-25")
async def test_what_recovery_writes_for_agents_is_of_their_runs(tmp_path: Path) -> None:
    async with open_agents_lives(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", calls("agent_list"), held()),
    ) as lives:
        async with lives.next() as first:
            lead = await first.prompt("@lead: go")
            await first.asked_by("@ann", 2)
            lives.kill()
        async with lives.next() as stage:
            await stage.until_idle()
            ann = await stage.agent("@ann")
            assert [row[:2] for row in rows_of(await stage.messages())] == [
                (lead, "user"), (lead, "assistant"), (lead, "tool")
            ]  # fmt: skip
            assert [row[:2] for row in rows_of(await stage.messages_of("@ann"))] == [
                (ann.run_id, role) for role in ("user", "assistant", "tool", "assistant")
            ]


# --- crashes


@contract("EXC-25")
async def test_after_a_crash_all_of_a_shared_turn_is_its_hosts_and_what_waited_its_own(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("look"), Probe("slow", gate.pass_through)]
    async with open_lives(tmp_path, script(calling("look"), calling("slow", "look"))) as lives:
        async with lives.first(*tools) as stage:
            async with held_readers(stage):
                host = await stage.prompt("First.")
                await stage.prompt("And this.")
            await until(lambda: gate.inside == 1)
            await stage.prompt("Own.", run_id="own")
            image = Image(stage)
        async with lives.next(*tools, image=image) as stage:
            assert (await outcomes(stage))["own"] == "held"
            assert (await stage.request("POST", "/runs/own/start")).status == 200
            await stage.heard.complete("own")
            assert [row[:2] for row in await rows(stage)] == [
                *((host, role) for role in ("user", "user", "assistant", "tool")),
                *((host, role) for role in ("assistant", "tool", "tool")),
                ("own", "user"),
                ("own", "assistant"),
            ]


@contract("EXC-25")
async def test_a_run_that_goes_on_where_a_killed_server_waited_keeps_its_messages(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            await stage.heard.saying("ask_changed", "open")
            image = Image(stage)
        async with lives.next(tool, image=image) as stage:
            await stage.cancel()
            await stage.heard.complete(run_id)
            assert await rows(stage) == [
                (run_id, "user", "Hi."),
                (run_id, "assistant", ""),
                (run_id, "tool", ""),
            ]


@contract("EXC-25")
async def test_what_recovery_says_of_a_run_that_was_cancelled_before_it_began_is_its_own(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script()) as lives:
        async with lives.first() as stage:
            async with held_readers(stage):
                run_id = await stage.prompt("Hi.")
                await stage.cancel()
                image = Image(stage)
            await stage.heard.complete(run_id)
        async with lives.next(image=image) as stage:
            await stage.heard.complete(run_id)
            assert await rows(stage) == [(run_id, "user", "Hi."), (run_id, "assistant", "")]
