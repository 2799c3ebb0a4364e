"""The run id of every message: live, listed, replayed, and after a crash."""

from pathlib import Path

from culm.testing.script import Reply, ReplyRule, ScriptedUsage
from culm.wire.codec import decode
from culm.wire.messages import Message, full_text
from culm.wire.runs import Run
from tests.flow.agents_harness import calls, held, open_agents, start, talk
from tests.flow.agents_restarts import open_restarts as open_agent_restarts
from tests.flow.drive import until
from tests.flow.mail_harness import deliver, letter, ring, until_state
from tests.flow.probes import SUMMARY, Gate, Probe, calling, script
from tests.flow.restarts import open_restarts, outcomes
from tests.flow.runs import CrashImage, Harness, held_readers, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
SHORT = ReplyRule(when=SUMMARY, reply=Reply(text="In short."))

Row = tuple[str, str, str]


def rows_of(messages: list[Message]) -> list[Row]:
    return [(m.run_id, m.role, full_text(m.parts)) for m in messages]


async def rows(harness: Harness) -> list[Row]:
    """Run, role and text of every message; the published messages must agree."""
    listed = await harness.messages()
    await harness.catch_up()
    run_ids = {message.id: message.run_id for message in listed}
    published = [m for m in harness.received.all("message", Message) if m.id in run_ids]
    assert {message.id for message in published} == set(run_ids)
    assert [m for m in published if m.run_id != run_ids[m.id]] == [], "it never changes"
    return rows_of(listed)


@contract("EXC-25")
async def test_messages_of_queued_runs_have_their_run_ids(tmp_path: Path, kind: str) -> None:
    play = script(calling("look", "look"), HELD)
    async with open_runs(tmp_path, kind, play, tools=[Probe("look")]) as harness:
        await harness.prompt("First.", run_id="first")
        await harness.prompt("Second.", run_id="second")
        await harness.received.text("Hello")
        grown = (await harness.messages())[-1]
        assert (grown.run_id, full_text(grown.parts)) == ("first", "Hello "), (
            "also while it streams"
        )
        harness.model.release()
        await harness.received.complete("second")
        assert await rows(harness) == [
            ("first", "user", "First."),
            ("first", "assistant", ""),
            ("first", "tool", ""),
            ("first", "tool", ""),
            ("first", "assistant", "Hello there."),
            ("second", "user", "Second."),
            ("second", "assistant", "Fine."),
        ]


@contract("EXC-25")
async def test_messages_that_join_a_turn_have_the_run_id_of_the_host(tmp_path: Path) -> None:
    gate = Gate()
    play, slow = script(calling("slow")), Probe("slow", gate.pass_through)
    async with open_runs(tmp_path, play=play, tools=[slow]) as harness:
        host = await harness.prompt("First.")
        await until(lambda: gate.inside == 1)
        joins = await harness.prompt("And this.")
        steers = decode((await harness.of_session("steer", prompt="Quick.")).body, Run).id
        gate.release()
        for run_id in (host, joins, steers):
            await harness.received.complete(run_id)
        assert {(await harness.run(run_id)).host_run_id for run_id in (joins, steers)} == {host}
        assert await rows(harness) == [
            (host, "user", "First."),
            (host, "assistant", ""),
            (host, "tool", ""),
            (host, "user", "And this."),
            (host, "user", "Quick."),
            (host, "assistant", "Fine."),
        ]


@contract("EXC-25")
async def test_messages_of_a_cancelled_unstarted_run_have_its_run_id(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        async with held_readers(harness):
            run_id = await harness.prompt("Hi.")
            await harness.cancel()
        await harness.received.complete(run_id)
        assert await rows(harness) == [(run_id, "user", "Hi."), (run_id, "assistant", "")]


@contract("EXC-25")
async def test_summary_has_the_run_id_of_its_run_and_a_shell_command_none(
    tmp_path: Path,
) -> None:
    full = Reply(text="Long.", usage=ScriptedUsage(input=7_990, output=10))
    play, info = script(full, rules=[SHORT]), {"context_window": 10_000}
    async with open_runs(tmp_path, play=play, info=info) as harness:
        run_id = await harness.prompt("Hi.")  # Its answer fills the context.
        await harness.received.complete(run_id)
        assert (await harness.of_session("shell", command="true")).status == 200
        assert (await harness.of_session("summarize")).status == 200
        (summary,) = [run for run in await harness.runs() if run.kind == "summary"]
        await harness.received.complete(summary.id)
        assert await rows(harness) == [
            (run_id, "user", "Hi."),
            (run_id, "assistant", "Long."),
            (run_id, "assistant", "In short."),
            ("", "user", ""),
            (summary.id, "assistant", "In short."),
        ]


# --- agents


@contract("EXC-25")
async def test_messages_of_an_agent_have_the_run_id_of_its_assignment(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", calls("agent_list"), held("", calls=calls("agent_list").calls), then="Yes."),
    ) as harness:
        lead = await harness.prompt("@lead: go")
        working, ann = await harness.until_asked_by("@ann", 2), await harness.agent("@ann")
        await harness.prompt("also this", ann.session_id)
        deliver(harness, ann.agent_id, letter(harness, "note"))
        await ring(harness, ann.agent_id)
        await until_state(harness, "note", "delivered")
        harness.release(working)
        await harness.received.complete(lead)
        more = await harness.prompt("@ann: more", ann.session_id)
        await harness.received.complete(more)
        assert {row[0] for row in await rows(harness)} == {lead}
        found = rows_of(await harness.messages_of("@ann"))
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
async def test_messages_written_by_recovery_of_agents_have_their_run_ids(tmp_path: Path) -> None:
    async with open_agent_restarts(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", calls("agent_list"), held()),
    ) as restarts:
        async with restarts.next() as first:
            lead = await first.prompt("@lead: go")
            await first.until_asked_by("@ann", 2)
            restarts.kill()
        async with restarts.next() as harness:
            await harness.until_idle()
            ann = await harness.agent("@ann")
            assert [row[:2] for row in rows_of(await harness.messages())] == [
                (lead, "user"), (lead, "assistant"), (lead, "tool")
            ]  # fmt: skip
            assert [row[:2] for row in rows_of(await harness.messages_of("@ann"))] == [
                (ann.run_id, role) for role in ("user", "assistant", "tool", "assistant")
            ]


# --- crashes


@contract("EXC-25")
async def test_shared_turn_after_a_crash_has_the_host_run_id(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("look"), Probe("slow", gate.pass_through)]
    async with open_restarts(
        tmp_path, script(calling("look"), calling("slow", "look"))
    ) as restarts:
        async with restarts.first(*tools) as harness:
            async with held_readers(harness):
                host = await harness.prompt("First.")
                await harness.prompt("And this.")
            await until(lambda: gate.inside == 1)
            await harness.prompt("Own.", run_id="own")
            image = CrashImage(harness)
        async with restarts.next(*tools, image=image) as harness:
            assert (await outcomes(harness))["own"] == "held"
            assert (await harness.request("POST", "/runs/own/start")).status == 200
            await harness.received.complete("own")
            assert [row[:2] for row in await rows(harness)] == [
                *((host, role) for role in ("user", "user", "assistant", "tool")),
                *((host, role) for role in ("assistant", "tool", "tool")),
                ("own", "user"),
                ("own", "assistant"),
            ]


@contract("EXC-25")
async def test_resumed_waiting_run_keeps_the_run_id_of_its_messages(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            await harness.received.event_with("ask_changed", "open")
            image = CrashImage(harness)
        async with restarts.next(tool, image=image) as harness:
            await harness.cancel()
            await harness.received.complete(run_id)
            assert await rows(harness) == [
                (run_id, "user", "Hi."),
                (run_id, "assistant", ""),
                (run_id, "tool", ""),
            ]


@contract("EXC-25")
async def test_recovery_of_a_cancelled_unstarted_run_writes_its_run_id(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script()) as restarts:
        async with restarts.first() as harness:
            async with held_readers(harness):
                run_id = await harness.prompt("Hi.")
                await harness.cancel()
                image = CrashImage(harness)
            await harness.received.complete(run_id)
        async with restarts.next(image=image) as harness:
            await harness.received.complete(run_id)
            assert await rows(harness) == [(run_id, "user", "Hi."), (run_id, "assistant", "")]
