"""Trees in odd circumstances: no room in the workspace, sessions that go, summaries, words."""

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from culm.run.context import SUMMARY_SYSTEM
from culm.settings import Settings
from culm.testing.script import Reply, Rule, ScriptedCall, ScriptedUsage
from tests.flow.agents_stage import COST, TOKENS, calls, held, open_agents, start, talk
from tests.flow.drive import until
from tests.support import contract

LISTS = [ScriptedCall(name="agent_list")]
FULL = ScriptedUsage(input=95_000, output=10)  # Of a window of 100,000.


def summaries(reply: Reply) -> list[Rule]:
    return [Rule(when=SUMMARY_SYSTEM[:30], reply=reply)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(runs_max=3), "too many live runs in this workspace: at most 3"),
        (Settings(sessions_max=3), "too many sessions in this workspace: at most 3"),
    ],
    ids=["runs", "sessions"],
)
async def test_of_agents_for_which_the_workspace_has_no_room_none_is_started(
    tmp_path: Path, settings: Settings, words: str
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go", "@cat: go"), then="Over."),
        settings=settings,
    ) as stage:
        assert (await stage.heard.complete(await stage.prompt("@lead: go"))).text == "Over."
        (result,) = await stage.results()
        assert (result.is_error, result.content) == (True, f"Not done: {words}.")
        assert (await stage.agents(), stage.launcher.workers) == ([], [])


@contract("INV-79")
async def test_an_agent_whose_session_was_deleted_does_not_take_the_others_reports_along(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go"), then="Over."),
        talk("@ann", then="Ann is done."),
        talk("@bob", held("Bob is done.")),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        seen = await stage.asked_by("@bob")
        ann = await stage.when("@ann", lambda one: one.state == "ended")
        gone = await stage.request("DELETE", f"/sessions/{quote(ann.session_id, safe='')}")
        assert gone.status == 200
        stage.release(seen)
        await stage.heard.complete(run_id)
        (result,) = await stage.results()
        assert not result.is_error
        assert "Its session was deleted" in result.content
        assert "Bob is done." in result.content


async def test_a_summary_of_an_agents_session_ends_with_the_session_above(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann")
    ) as stage:
        await stage.heard.complete(await stage.prompt("@lead: go"))
        ann = await stage.agent("@ann")
        stage.play(summaries(held("A summary.")))
        path = f"/agent/sessions/{quote(ann.session_id, safe='')}/summarize"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.request("POST", path))
            await until(lambda: SUMMARY_SYSTEM[:30].encode() in stage.seen()[-1].raw)
            assert (await stage.request("DELETE", f"/sessions/{stage.session_id}")).status == 409
            await stage.cancel()
            await stage.until_idle()
        runs = await stage.runs(session_id=ann.session_id)
        assert [run.outcome for run in runs if run.kind == "summary"] == ["canceled"]


@contract("EXC-22")
@pytest.mark.parametrize("who", ["@lead", "@ann"])
async def test_a_summary_that_says_nothing_is_paid_all_the_same(tmp_path: Path, who: str) -> None:
    empty = Reply(text="", usage=ScriptedUsage(input=90_000, output=100))
    step = Reply(calls=LISTS, usage=FULL)
    first = step if who == "@lead" else start("@ann: go")
    async with open_agents(
        tmp_path,
        summaries(empty),
        talk("@lead", first, then="Over."),
        talk("@ann", step),
        window=100_000,
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        others = 0 if who == "@lead" else 2 * COST
        assert run.tree_cost == pytest.approx(0.0951 + 0.091 + others)


@pytest.mark.parametrize("who", ["@lead", "@ann"])
async def test_where_summaries_are_switched_off_no_agent_makes_one(
    tmp_path: Path, who: str
) -> None:
    step = Reply(calls=LISTS, usage=FULL)
    first = step if who == "@lead" else start("@ann: go")
    async with open_agents(
        tmp_path,
        summaries(Reply(text="A summary.")),
        talk("@lead", first, then="Over."),
        talk("@ann", step),
        window=100_000,
        config={"options": {"disable_auto_summarize": True}},
    ) as stage:
        assert (await stage.heard.complete(await stage.prompt("@lead: go"))).text == "Over."
        assert not [seen for seen in stage.seen() if SUMMARY_SYSTEM[:30].encode() in seen.raw]


async def test_a_word_to_an_agent_at_work_joins_its_turn_whatever_its_sender_may_do(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), then="Over."),
        talk("@ann", held("", calls=LISTS)),
    ) as stage:
        await stage.heard.complete(await stage.prompt("@lead: go", approve="allow"))
        seen, ann = await stage.asked_by("@ann"), await stage.agent("@ann")
        said = calls("agent_send", agent=ann.agent_id, message="and look below")
        stage.play(talk("@lead", said, then="Sent."), talk("@ann"))
        await stage.heard.complete(await stage.prompt("@lead: go on"))
        stage.release(seen)
        await stage.until_idle()
        assert [message.content for message in stage.read_by("@ann", 1)][-1] == "and look below"
        assert len(stage.heard_by("@ann")) == 2


async def test_whoever_is_given_more_work_counts_as_one_at_work(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), start("@bob: go", wait=False), then="Over."),
        talk("@ann"),
        talk("@bob", held()),
        settings=Settings(agents_children_max=1),
    ) as stage:
        await stage.heard.complete(await stage.prompt("@lead: go"))
        await stage.asked_by("@bob")
        ann = await stage.agent("@ann")
        more = calls("agent_send", agent=ann.agent_id, message="more")
        stage.play(talk("@lead", more, then="Over."))
        await stage.heard.complete(await stage.prompt("@lead: more"))
        refused = (await stage.results())[-1]
        assert refused.content == "Not done: an agent may have 1 others at work; 0 more can be."
        stage.model.release()
        await stage.until_idle()


async def test_an_answer_that_its_model_cut_short_is_told_to_be(tmp_path: Path) -> None:
    cut = Reply(text="The three bugs are: 1. the", finish="max_tokens")
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", cut)
    ) as stage:
        await stage.heard.complete(await stage.prompt("@lead: go"))
        (result,) = await stage.results()
        assert "completed: its answer reached the most tokens" in result.content
        assert (await stage.agent("@ann")).tokens == TOKENS
