"""Agents that an agent starts: what it may ask for, what it gets, and what everybody sees of it."""

from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.script import Reply, ScriptedCall
from culm.wire.agents import Agent
from culm.wire.codec import Json
from culm.wire.runs import Limits
from tests.flow.agents_stage import (
    COST,
    TOKENS,
    AgentStage,
    calls,
    held,
    open_agents,
    start,
    talk,
)
from tests.flow.reading import assert_answered, calls_of
from tests.support import contract


async def led(stage: AgentStage, prompt: str = "@lead: go") -> None:
    """Have the top do what its script says, to its end."""
    assert (await stage.heard.complete(await stage.prompt(prompt))).error == ""


def facts(agent: Agent, *more: str, tokens: int = TOKENS, cost: float = COST) -> str:
    """The line by which a result says how an agent ended."""
    said = " · ".join(("completed", *more, f"{tokens} tokens, ${cost:.4f}"))
    return f"[agent {agent.agent_id} · {said}]"


@contract("INV-79", "EXC-22")
async def test_two_agents_of_one_call_work_side_by_side_and_report_to_it(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: write", "@bob: look"), then="All done."),
        talk("@ann", calls("write", file_path="a.txt", content="A"), then="I wrote it."),
        talk("@bob", held("I looked.")),
        config={"permissions": {"allowed_tools": ["write"]}},
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        seen = await stage.asked_by("@bob")  # It is at work until ...
        ann = await stage.when("@ann", lambda one: one.state == "ended")
        stage.release(seen)  # ... now, when the other has ended.
        await stage.heard.complete(run_id)
        bob = await stage.agent("@bob")
        (call,), (result,) = calls_of(await stage.messages()), await stage.results()
        asked_in = (await stage.messages())[1].id
        titles = [seen for seen in stage.model.requests if b"Write a title" in seen.raw]
        assert [ann.session_id, bob.session_id] == [
            f"{asked_in}$${call.id}",
            f"{asked_in}$${call.id}.2",
        ]
        assert result.content == (
            f"## @ann: write\nI wrote it.\n"
            f"{facts(ann, 'files changed: a.txt', tokens=2 * TOKENS, cost=2 * COST)}\n\n"
            f"## @bob: look\nI looked.\n{facts(bob)}"
        )
        assert not result.is_error
        assert (stage.flow.directory() / "a.txt").read_text() == "A"
        assert await stage.rows_of("@ann") == [
            ("user", "@ann: write", "stop"),
            ("assistant", "", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "I wrote it.", "end_turn"),
        ]
        assert_answered(await stage.messages_of("@ann"))
        assert [one.id for one in await stage.remote.sessions()] == [stage.session_id]
        assert len(titles) == 1, "a child has no title made for it"


@contract("INV-79")
@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (Reply(status=401), "error: "),
        (Reply(text=" "), "It said nothing."),
        (Reply(text="Half of", finish="max_tokens"), "Half of"),
    ],
    ids=["fails", "says-nothing", "is-cut-off"],
)
async def test_an_agent_that_fails_is_an_error_result_and_the_turn_goes_on(
    tmp_path: Path, reply: Reply, shown: str
) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: try"), then="Without her."), talk("@ann", reply)
    ) as stage:
        await led(stage)
        (result,) = await stage.results()
        assert shown in result.content
        assert result.is_error == (reply.finish != "max_tokens")
        assert (await stage.rows())[-1] == ("assistant", "Without her.", "end_turn")


BAD: list[tuple[dict[str, Json], str]] = [
    ({"role": "boss"}, "there is no role 'boss'; roles are explorer, reviewer, scribe, worker"),
    ({"model": "nobody/x"}, "there are demo/demo-1"),
    ({"tools": ["view", "fly"]}, "there is no tool 'fly' to give it; tools are agent, agent_list"),
    ({"limits": {"tokens": -1}}, "limits must be numbers of at least 0"),
    ({"worktree": True}, "git"),
    ({"prompt": " "}, "give a prompt"),
    ({"assignments": [{"prompt": "@a: x", "role": "boss"}, {"prompt": "@b: y"}], "prompt": ""}, ""),
    ({"role": "scribe"}, "there is no tool 'quill' to give it"),
]


@contract("FLEET-100")
async def test_what_cannot_be_started_is_told_with_what_would_be_right_and_nothing_is_spawned(
    tmp_path: Path,
) -> None:
    wanted = [calls("agent", **{"prompt": "@ann: do", **given}) for given, _ in BAD]
    async with open_agents(
        tmp_path,
        talk("@lead", *wanted),
        config={"roles": {"scribe": {"tools": ["quill"]}}},
    ) as stage:
        await led(stage)
        results = await stage.results()
        assert len(results) == len(BAD)
        for (_, said), result in zip(BAD, results, strict=True):
            assert said in result.content, result
            assert result.is_error
        assert await stage.agents() == []
        assert stage.launcher.workers == []
        assert [one.id for one in await stage.remote.sessions()] == [stage.session_id]


async def test_a_model_that_nobody_knows_is_refused_with_those_there_are(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go", model="demo/none")), talk("@ann")
    ) as stage:
        await led(stage)
        (result,) = await stage.results()
        assert (result.is_error, "demo/demo-1" in result.content) == (True, True)
        assert await stage.agents() == []


async def test_what_is_given_down_can_only_narrow(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: look", role="scout")),
        # It gives down a tool that it has, one that it has not, and no ban on writing.
        talk("@ann", start("@bob: look", tools=["write"]), start("@bob: look", tools=["view"])),
        talk("@bob", calls("write", file_path="x", content="x")),
        config={
            "roles": {
                "scout": {
                    "prompt": "You are a scout.",
                    "tools": ["view", "grep", "agent"],
                    "read_only": True,
                    "limits": {"steps": 7},
                }
            }
        },
    ) as stage:
        await led(stage)
        ann, bob = await stage.agent("@ann"), await stage.agent("@bob")
        assert (ann.role, ann.is_read_only, ann.budget) == ("scout", True, Limits(steps=7))
        assert (bob.role, bob.is_read_only, bob.depth) == ("worker", True, 2)
        offered = [
            sorted(tool["function"]["name"] for tool in stage.heard_by(who)[0].body["tools"])
            for who in ("@ann", "@bob")
        ]
        assert offered == [["agent", "grep", "view"], ["view"]]
        assert b"You are a scout." in stage.heard_by("@ann")[0].raw
        first, _ = await stage.results("@ann")
        assert "there is no tool 'write' to give it; tools are agent, grep, view" in first.content
        (refused,) = await stage.results("@bob")
        assert refused.is_error
        assert not (stage.flow.directory() / "x").exists()


@contract("FLEET-100")
async def test_an_agent_at_the_cap_starts_no_others_and_children_are_bounded(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@a1: x", "@a2: x", "@a3: x"), start("@ann: go")),
        talk("@ann", start("@bob: go")),
        talk("@bob", start("@cat: go")),
        settings=Settings(agents_depth_max=2, agents_children_max=2),
    ) as stage:
        await led(stage)
        many, one = await stage.results()
        assert "an agent may have 2 others at work; 2 more can be" in many.content
        assert not one.is_error
        bob = await stage.agent("@bob")
        assert (bob.depth, bob.outcome) == (2, "completed")
        offered = [tool["function"]["name"] for tool in stage.heard_by("@bob")[0].body["tools"]]
        assert "agent" not in offered
        (refused,) = await stage.results("@bob")  # The model calls it all the same.
        assert (refused.is_error, refused.content) == (
            True,
            "agent: agents nest at most 2 deep, and this one is at 2; do it yourself",
        )
        assert len(await stage.agents()) == 2


async def test_agents_that_are_not_waited_for_are_waited_for_later(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk(
            "@lead",
            start("@ann: go", "@bob: go", wait=False),
            calls("agent_wait", until="any"),
            calls("agent_wait", until="first_error"),
            calls("agent_list"),
            then="Enough.",
        ),
        talk("@ann", held("Ann is done.")),
        talk("@bob", held("Bob is done.")),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        ann, bob = await stage.asked_by("@ann"), await stage.asked_by("@bob")
        await stage.asked_by("@lead", 2)
        stage.release(ann)
        await stage.asked_by("@lead", 3)
        stage.release(bob)
        await stage.heard.complete(run_id)
        one, two = await stage.agent("@ann"), await stage.agent("@bob")
        begun, any_, error, listed = await stage.results()
        assert begun.content.endswith("They work now; agent_wait gets what they report.")
        assert "completed" not in begun.content
        assert "Ann is done." in any_.content
        assert "Bob is done." not in any_.content
        assert "Bob is done." in error.content
        assert listed.content == "\n".join(
            f"- {agent.agent_id} {agent.name} (worker, demo-1): completed; 110 tokens, $0.0002"
            for agent in (one, two)
        )
        assert [one.is_detached, two.is_detached] == [True, True]


async def test_a_wait_ends_at_the_first_error_or_in_time_and_what_was_told_is_not_told_again(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk(
            "@lead",
            start("@ann: go", "@bob: go", wait=False),
            calls("agent_wait", until="first_error"),  # Which may have come before.
            calls("agent_wait", timeout_s=90),
            calls("agent_wait", timeout_s=0),
        ),
        talk("@ann", held("Ann is done.")),
        talk("@bob", Reply(status=401)),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        ann = await stage.asked_by("@ann")
        await stage.clock.pass_pause(90)
        await stage.heard.complete(run_id)
        _, error, late, now = await stage.results()
        assert ("running" in error.content, "error: " in error.content) == (True, True)
        assert "Time is up after 90 s; who still works goes on." in late.content
        assert "Time is up after 0 s" in now.content
        assert "error: " not in late.content + now.content
        stage.release(ann)
        await stage.when("@ann", lambda one: one.outcome == "completed")
        stage.play(talk("@lead", calls("agent_wait"), calls("agent_wait")))
        await led(stage, "@lead: and?")
        last, none = (await stage.results())[-2:]
        assert "Ann is done." in last.content
        assert none.content == "There are none."


async def test_a_word_to_an_agent_at_work_joins_its_turn_and_one_to_an_ended_one_is_more_work(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", held("", calls=[ScriptedCall(name="agent_list")]), Reply(text="Both.")),
    ) as stage:
        await led(stage)
        working, ann = await stage.asked_by("@ann"), await stage.agent("@ann")
        stage.play(
            talk(
                "@lead",
                calls("agent_send", agent=ann.agent_id, message="also this"),
                calls("agent_wait"),
                calls("agent_send", agent=ann.agent_id, message="and more", wait=True),
            ),
            talk("@ann", Reply(text="Both."), Reply(text="More.")),
        )
        run_id = await stage.prompt("@lead: more")
        await stage.asked_by("@lead", 4)
        stage.release(working)
        await stage.heard.complete(run_id)
        _, sent, waited, more = await stage.results()
        assert "Sent: it reads it before its next step." in sent.content
        assert "Both." in waited.content
        assert more.content == f"More.\n{facts(ann, tokens=3 * TOKENS, cost=3 * COST)}"
        assert [row for row in await stage.rows_of("@ann") if row[0] != "tool"] == [
            ("user", "@ann: go", "stop"),
            ("assistant", "", "tool_use"),
            ("user", "also this", "stop"),
            ("assistant", "Both.", "end_turn"),
            ("user", "and more", "stop"),
            ("assistant", "More.", "end_turn"),
        ]
        assert [m.content for m in stage.read_by("@ann") if m.role in ("user", "assistant")] == [
            "@ann: go", None, "also this", "Both.", "and more",
        ]  # fmt: skip
        mine = [run for run in await stage.runs() if run.agent_id]
        assert [(run.prompt, run.outcome, bool(run.host_run_id)) for run in reversed(mine)] == [
            ("@ann: go", "end_turn", False),
            ("also this", "end_turn", True),
            ("and more", "end_turn", False),
        ]


async def test_a_word_to_whoever_is_not_ones_own_is_refused_with_how_it_stands(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@eve"), talk("@lead")) as stage:
        eve = await stage.start_agent("@eve: of nobody")
        await stage.when("@eve", lambda one: one.state == "ended")
        asked_for = (eve.agent_id, stage.session_id, "../x", "")
        stage.play(
            talk(
                "@lead",
                *(calls("agent_send", agent=name, message="hi") for name in asked_for),
                calls("agent_stop", agents=[eve.agent_id]),
                calls("agent_wait", agents=[eve.agent_id]),
                calls("agent_list", agent=eve.agent_id),
            )
        )
        await led(stage)
        results = await stage.results()
        assert [result.is_error for result in results] == [True] * 7
        assert "completed" in results[0].content
        assert "there is no agent '../x' in this project" in results[2].content
        assert await stage.rows_of("@eve") == [
            ("user", "@eve: of nobody", "stop"),
            ("assistant", "Done.", "end_turn"),
        ]


async def test_an_agent_that_is_stopped_ends_with_all_below_it_and_says_so(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", start("@bob: go")),
        talk("@bob", held()),
    ) as stage:
        await led(stage)
        await stage.asked_by("@bob")
        ann = await stage.when("@ann", lambda one: one.waiting_for == "agents")
        assert ann.state == "running"
        stage.play(talk("@lead", calls("agent_stop", agents=[ann.agent_id])))
        await led(stage, "@lead: stop")
        assert await stage.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        _, stopped = await stage.results()
        assert (stopped.is_error, "canceled" in stopped.content) == (False, True)
        for who in ("@ann", "@bob"):
            rows = await stage.rows_of(who)
            assert [row for row in rows if row[0] == "assistant"][-1][2] == "canceled"
            assert_answered(await stage.messages_of(who))
        assert stage.launcher.alive == []
