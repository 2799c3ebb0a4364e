"""Edge cases of agent trees: workspace limits, deleted sessions, summaries, messages."""

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from culm.run.context import SUMMARY_SYSTEM
from culm.settings import Settings
from culm.testing.script import Reply, ReplyRule, ScriptedCall, ScriptedUsage
from tests.flow.agents_harness import COST, TOKENS, calls, held, open_agents, start, talk
from tests.flow.drive import until
from tests.support import contract

LISTS = [ScriptedCall(name="agent_list")]
FULL = ScriptedUsage(input=95_000, output=10)  # Of a window of 100,000.


def summaries(reply: Reply) -> list[ReplyRule]:
    return [ReplyRule(when=SUMMARY_SYSTEM[:30], reply=reply)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(runs_max=3), "too many live runs in this workspace: at most 3"),
        (Settings(sessions_max=3), "too many sessions in this workspace: at most 3"),
    ],
    ids=["runs", "sessions"],
)
async def test_agents_beyond_the_workspace_limits_are_all_refused(
    tmp_path: Path, settings: Settings, text: str
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go", "@cat: go"), then="Over."),
        settings=settings,
    ) as harness:
        assert (await harness.received.complete(await harness.prompt("@lead: go"))).text == "Over."
        (result,) = await harness.results()
        assert (result.is_error, result.content) == (True, f"Not done: {text}.")
        assert (await harness.agents(), harness.launcher.workers) == ([], [])


@contract("INV-79")
async def test_deleted_agent_session_does_not_hide_the_results_of_other_agents(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go"), then="Over."),
        talk("@ann", then="Ann is done."),
        talk("@bob", held("Bob is done.")),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        seen = await harness.until_asked_by("@bob")
        ann = await harness.until_agent("@ann", lambda one: one.state == "ended")
        gone = await harness.request("DELETE", f"/sessions/{quote(ann.session_id, safe='')}")
        assert gone.status == 200
        harness.release(seen)
        await harness.received.complete(run_id)
        (result,) = await harness.results()
        assert not result.is_error
        assert "Its session was deleted" in result.content
        assert "Bob is done." in result.content


async def test_cancel_of_the_parent_session_ends_a_summary_of_an_agent_session(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann")
    ) as harness:
        await harness.received.complete(await harness.prompt("@lead: go"))
        ann = await harness.agent("@ann")
        harness.play(summaries(held("A summary.")))
        path = f"/agent/sessions/{quote(ann.session_id, safe='')}/summarize"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(harness.request("POST", path))
            await until(lambda: SUMMARY_SYSTEM[:30].encode() in harness.seen()[-1].raw)
            assert (
                await harness.request("DELETE", f"/sessions/{harness.session_id}")
            ).status == 409
            await harness.cancel()
            await harness.until_idle()
        runs = await harness.runs(session=ann.session_id)
        assert [run.outcome for run in runs if run.kind == "summary"] == ["canceled"]


@contract("EXC-22")
@pytest.mark.parametrize("who", ["@lead", "@ann"])
async def test_empty_summary_is_charged(tmp_path: Path, who: str) -> None:
    empty = Reply(text="", usage=ScriptedUsage(input=90_000, output=100))
    step = Reply(calls=LISTS, usage=FULL)
    first = step if who == "@lead" else start("@ann: go")
    async with open_agents(
        tmp_path,
        summaries(empty),
        talk("@lead", first, then="Over."),
        talk("@ann", step),
        window=100_000,
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        others = 0 if who == "@lead" else 2 * COST
        assert run.tree_cost == pytest.approx(0.0951 + 0.091 + others)


@pytest.mark.parametrize("who", ["@lead", "@ann"])
async def test_disabled_auto_summarize_applies_to_agents(tmp_path: Path, who: str) -> None:
    step = Reply(calls=LISTS, usage=FULL)
    first = step if who == "@lead" else start("@ann: go")
    async with open_agents(
        tmp_path,
        summaries(Reply(text="A summary.")),
        talk("@lead", first, then="Over."),
        talk("@ann", step),
        window=100_000,
        config={"options": {"disable_auto_summarize": True}},
    ) as harness:
        assert (await harness.received.complete(await harness.prompt("@lead: go"))).text == "Over."
        assert not [seen for seen in harness.seen() if SUMMARY_SYSTEM[:30].encode() in seen.raw]


async def test_message_to_a_running_agent_joins_its_turn_despite_other_rights(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), then="Over."),
        talk("@ann", held("", calls=LISTS)),
    ) as harness:
        await harness.received.complete(await harness.prompt("@lead: go", approve="allow"))
        seen, ann = await harness.until_asked_by("@ann"), await harness.agent("@ann")
        send = calls("agent_send", agent=ann.agent_id, message="and look below")
        harness.play(talk("@lead", send, then="Sent."), talk("@ann"))
        await harness.received.complete(await harness.prompt("@lead: go on"))
        harness.release(seen)
        await harness.until_idle()
        assert [message.content for message in harness.sent_by("@ann", 1)][-1] == "and look below"
        assert len(harness.requests_by("@ann")) == 2


async def test_ended_agent_with_new_work_counts_against_the_children_limit(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), start("@bob: go", wait=False), then="Over."),
        talk("@ann"),
        talk("@bob", held()),
        settings=Settings(agents_children_max=1),
    ) as harness:
        await harness.received.complete(await harness.prompt("@lead: go"))
        await harness.until_asked_by("@bob")
        ann = await harness.agent("@ann")
        more = calls("agent_send", agent=ann.agent_id, message="more")
        harness.play(talk("@lead", more, then="Over."))
        await harness.received.complete(await harness.prompt("@lead: more"))
        refused = (await harness.results())[-1]
        assert refused.content == "Not done: an agent may have 1 others at work; 0 more can be."
        harness.model.release()
        await harness.until_idle()


async def test_truncated_answer_of_an_agent_is_reported_as_truncated(tmp_path: Path) -> None:
    cut = Reply(text="The three bugs are: 1. the", finish="max_tokens")
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", cut)
    ) as harness:
        await harness.received.complete(await harness.prompt("@lead: go"))
        (result,) = await harness.results()
        assert "completed: its answer reached the most tokens" in result.content
        assert (await harness.agent("@ann")).tokens == TOKENS
