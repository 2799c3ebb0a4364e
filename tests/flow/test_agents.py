"""The agent tools: starting, waiting for, messaging and stopping sub-agents."""

from pathlib import Path

import pytest

from culm.settings import Settings
from culm.testing.script import Reply, ScriptedCall
from culm.wire.agents import Agent
from culm.wire.codec import Json
from culm.wire.runs import Limits
from tests.flow.agents_harness import (
    COST,
    TOKENS,
    AgentHarness,
    calls,
    held,
    open_agents,
    start,
    talk,
)
from tests.flow.reading import assert_answered, calls_of
from tests.support import contract


async def run_lead(harness: AgentHarness, prompt: str = "@lead: go") -> None:
    """Send a prompt to the top session and wait for its end."""
    assert (await harness.received.complete(await harness.prompt(prompt))).error == ""


def result_line(agent: Agent, *more: str, tokens: int = TOKENS, cost: float = COST) -> str:
    """The last line of a result, which describes the outcome of an agent."""
    details = " · ".join(("completed", *more, f"{tokens} tokens, ${cost:.4f}"))
    return f"[agent {agent.agent_id} · {details}]"


@contract("INV-79", "EXC-22")
async def test_two_agents_of_one_call_run_in_parallel_and_report_to_it(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: write", "@bob: look"), then="All done."),
        talk("@ann", calls("write", file_path="a.txt", content="A"), then="I wrote it."),
        talk("@bob", held("I looked.")),
        config={"permissions": {"allowed_tools": ["write"]}},
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        seen = await harness.until_asked_by("@bob")  # It runs until ...
        ann = await harness.until_agent("@ann", lambda one: one.state == "ended")
        harness.release(seen)  # ... now, after the other has ended.
        await harness.received.complete(run_id)
        bob = await harness.agent("@bob")
        (call,), (result,) = calls_of(await harness.messages()), await harness.results()
        asked_in = (await harness.messages())[1].id
        titles = [seen for seen in harness.model.requests if b"Write a title" in seen.raw]
        assert [ann.session_id, bob.session_id] == [
            f"{asked_in}$${call.id}",
            f"{asked_in}$${call.id}.2",
        ]
        assert result.content == (
            f"## @ann: write\nI wrote it.\n"
            f"{result_line(ann, 'files changed: a.txt', tokens=2 * TOKENS, cost=2 * COST)}\n\n"
            f"## @bob: look\nI looked.\n{result_line(bob)}"
        )
        assert not result.is_error
        assert (harness.flow.directory() / "a.txt").read_text() == "A"
        assert await harness.rows_of("@ann") == [
            ("user", "@ann: write", "stop"),
            ("assistant", "", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "I wrote it.", "end_turn"),
        ]
        assert_answered(await harness.messages_of("@ann"))
        assert [one.id for one in await harness.remote.sessions()] == [harness.session_id]
        assert len(titles) == 1, "a child gets no title"


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
async def test_failed_agent_is_an_error_result_and_the_turn_continues(
    tmp_path: Path, reply: Reply, shown: str
) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: try"), then="Without her."), talk("@ann", reply)
    ) as harness:
        await run_lead(harness)
        (result,) = await harness.results()
        assert shown in result.content
        assert result.is_error == (reply.finish != "max_tokens")
        assert (await harness.rows())[-1] == ("assistant", "Without her.", "end_turn")


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
async def test_invalid_agent_call_is_refused_with_valid_values_and_starts_none(
    tmp_path: Path,
) -> None:
    wanted = [calls("agent", **{"prompt": "@ann: do", **given}) for given, _ in BAD]
    async with open_agents(
        tmp_path,
        talk("@lead", *wanted),
        config={"roles": {"scribe": {"tools": ["quill"]}}},
    ) as harness:
        await run_lead(harness)
        results = await harness.results()
        assert len(results) == len(BAD)
        for (_, text), result in zip(BAD, results, strict=True):
            assert text in result.content, result
            assert result.is_error
        assert await harness.agents() == []
        assert harness.launcher.workers == []
        assert [one.id for one in await harness.remote.sessions()] == [harness.session_id]


async def test_unknown_model_is_refused_with_the_known_models(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go", model="demo/none")), talk("@ann")
    ) as harness:
        await run_lead(harness)
        (result,) = await harness.results()
        assert (result.is_error, "demo/demo-1" in result.content) == (True, True)
        assert await harness.agents() == []


async def test_child_agent_gets_at_most_its_parents_tools_and_rights(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: look", role="scout")),
        # It passes on a tool that it lacks, then one that it has, and does not set read_only.
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
    ) as harness:
        await run_lead(harness)
        ann, bob = await harness.agent("@ann"), await harness.agent("@bob")
        assert (ann.role, ann.is_read_only, ann.budget) == ("scout", True, Limits(steps=7))
        assert (bob.role, bob.is_read_only, bob.depth) == ("worker", True, 2)
        offered = [
            sorted(tool["function"]["name"] for tool in harness.requests_by(who)[0].body["tools"])
            for who in ("@ann", "@bob")
        ]
        assert offered == [["agent", "grep", "view"], ["view"]]
        assert b"You are a scout." in harness.requests_by("@ann")[0].raw
        first, _ = await harness.results("@ann")
        assert "there is no tool 'write' to give it; tools are agent, grep, view" in first.content
        (refused,) = await harness.results("@bob")
        assert refused.is_error
        assert not (harness.flow.directory() / "x").exists()


@contract("FLEET-100")
async def test_agent_depth_and_number_of_children_are_limited(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@a1: x", "@a2: x", "@a3: x"), start("@ann: go")),
        talk("@ann", start("@bob: go")),
        talk("@bob", start("@cat: go")),
        settings=Settings(agents_depth_max=2, agents_children_max=2),
    ) as harness:
        await run_lead(harness)
        many, one = await harness.results()
        assert "an agent may have 2 others at work; 2 more can be" in many.content
        assert not one.is_error
        bob = await harness.agent("@bob")
        assert (bob.depth, bob.outcome) == (2, "completed")
        offered = [
            tool["function"]["name"] for tool in harness.requests_by("@bob")[0].body["tools"]
        ]
        assert "agent" not in offered
        (refused,) = await harness.results("@bob")  # The model calls it anyway.
        assert (refused.is_error, refused.content) == (
            True,
            "agent: agents nest at most 2 deep, and this one is at 2; do it yourself",
        )
        assert len(await harness.agents()) == 2


async def test_detached_agents_can_be_waited_for_later(tmp_path: Path) -> None:
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
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        ann, bob = await harness.until_asked_by("@ann"), await harness.until_asked_by("@bob")
        await harness.until_asked_by("@lead", 2)
        harness.release(ann)
        await harness.until_asked_by("@lead", 3)
        harness.release(bob)
        await harness.received.complete(run_id)
        one, two = await harness.agent("@ann"), await harness.agent("@bob")
        begun, any_, error, listed = await harness.results()
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


async def test_wait_ends_at_first_error_or_timeout_and_reports_each_result_once(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk(
            "@lead",
            start("@ann: go", "@bob: go", wait=False),
            calls("agent_wait", until="first_error"),  # It may have ended already.
            calls("agent_wait", timeout_s=90),
            calls("agent_wait", timeout_s=0),
        ),
        talk("@ann", held("Ann is done.")),
        talk("@bob", Reply(status=401)),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        ann = await harness.until_asked_by("@ann")
        await harness.clock.pass_pause(90)
        await harness.received.complete(run_id)
        _, error, late, now = await harness.results()
        assert ("running" in error.content, "error: " in error.content) == (True, True)
        assert "Time is up after 90 s; running agents continue." in late.content
        assert "Time is up after 0 s" in now.content
        assert "error: " not in late.content + now.content
        harness.release(ann)
        await harness.until_agent("@ann", lambda one: one.outcome == "completed")
        harness.play(talk("@lead", calls("agent_wait"), calls("agent_wait")))
        await run_lead(harness, "@lead: and?")
        last, none = (await harness.results())[-2:]
        assert "Ann is done." in last.content
        assert none.content == "There are none."


async def test_message_joins_the_turn_of_a_running_agent_or_starts_another_run(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", held("", calls=[ScriptedCall(name="agent_list")]), Reply(text="Both.")),
    ) as harness:
        await run_lead(harness)
        working, ann = await harness.until_asked_by("@ann"), await harness.agent("@ann")
        harness.play(
            talk(
                "@lead",
                calls("agent_send", agent=ann.agent_id, message="also this"),
                calls("agent_wait"),
                calls("agent_send", agent=ann.agent_id, message="and more", wait=True),
            ),
            talk("@ann", Reply(text="Both."), Reply(text="More.")),
        )
        run_id = await harness.prompt("@lead: more")
        await harness.until_asked_by("@lead", 4)
        harness.release(working)
        await harness.received.complete(run_id)
        _, sent, waited, more = await harness.results()
        assert "Sent: it reads it before its next step." in sent.content
        assert "Both." in waited.content
        assert more.content == f"More.\n{result_line(ann, tokens=3 * TOKENS, cost=3 * COST)}"
        assert [row for row in await harness.rows_of("@ann") if row[0] != "tool"] == [
            ("user", "@ann: go", "stop"),
            ("assistant", "", "tool_use"),
            ("user", "also this", "stop"),
            ("assistant", "Both.", "end_turn"),
            ("user", "and more", "stop"),
            ("assistant", "More.", "end_turn"),
        ]
        assert [m.content for m in harness.sent_by("@ann") if m.role in ("user", "assistant")] == [
            "@ann: go", None, "also this", "Both.", "and more",
        ]  # fmt: skip
        mine = [run for run in await harness.runs() if run.agent_id]
        assert [(run.prompt, run.outcome, bool(run.host_run_id)) for run in reversed(mine)] == [
            ("@ann: go", "end_turn", False),
            ("also this", "end_turn", True),
            ("and more", "end_turn", False),
        ]


async def test_message_to_an_agent_that_is_not_a_child_is_refused_with_its_state(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@eve"), talk("@lead")) as harness:
        eve = await harness.start_agent("@eve: of nobody")
        await harness.until_agent("@eve", lambda one: one.state == "ended")
        asked_for = (eve.agent_id, harness.session_id, "../x", "")
        harness.play(
            talk(
                "@lead",
                *(calls("agent_send", agent=name, message="hi") for name in asked_for),
                calls("agent_stop", agents=[eve.agent_id]),
                calls("agent_wait", agents=[eve.agent_id]),
                calls("agent_list", agent=eve.agent_id),
            )
        )
        await run_lead(harness)
        results = await harness.results()
        assert [result.is_error for result in results] == [True] * 7
        assert "completed" in results[0].content
        assert "there is no agent '../x' in this project" in results[2].content
        assert await harness.rows_of("@eve") == [
            ("user", "@eve: of nobody", "stop"),
            ("assistant", "Done.", "end_turn"),
        ]


async def test_stopped_agent_ends_with_all_its_children(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", start("@bob: go")),
        talk("@bob", held()),
    ) as harness:
        await run_lead(harness)
        await harness.until_asked_by("@bob")
        ann = await harness.until_agent("@ann", lambda one: one.waiting_for == "agents")
        assert ann.state == "running"
        harness.play(talk("@lead", calls("agent_stop", agents=[ann.agent_id])))
        await run_lead(harness, "@lead: stop")
        assert await harness.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        _, stopped = await harness.results()
        assert (stopped.is_error, "canceled" in stopped.content) == (False, True)
        for who in ("@ann", "@bob"):
            rows = await harness.rows_of(who)
            assert [row for row in rows if row[0] == "assistant"][-1][2] == "canceled"
            assert_answered(await harness.messages_of(who))
        assert harness.launcher.alive == []
