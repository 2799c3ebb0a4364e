"""Agent results for the model: answers, changed files and costs."""

import pytest

from culm.ids import AgentId, SessionId
from culm.subagents.delegation import (
    ANSWER_CHARS_MAX,
    FILES_SHOWN,
    LIST_MAX,
    AgentReport,
    listing_of,
    result_of,
)
from culm.wire.agents import Agent, AgentOutcome, AgentState
from culm.wire.codec import Json, decode


def agent(
    name: str = "a",
    outcome: AgentOutcome | None = "completed",
    *,
    state: AgentState = "ended",
    parent: str = "top",
    depth: int = 1,
    reason: str = "",
) -> Agent:
    return Agent(
        AgentId(name), parent, SessionId(f"m$${name}"), depth=depth,
        name=name, role="worker", provider="p", model="m",
        state=state, outcome=outcome, reason=reason, cost=0.25, tokens=70,
    )  # fmt: skip


def test_result_shows_answer_and_facts_of_each_agent() -> None:
    one = AgentReport(agent(), "It is done.\n", ["/w/x"], "branch b")
    facts = "[agent a · completed · files changed: /w/x · branch b · 70 tokens, $0.2500]"
    assert result_of([one]).content == f"It is done.\n{facts}"
    failed = AgentReport(agent("b", "error", reason="No model"))
    both = result_of([one, failed], "And so on.")
    assert both.content == (
        f"## a\nIt is done.\n{facts}\n\n## b\n[agent b · error: No model · 70 tokens, $0.2500]"
        "\n\nAnd so on."
    )
    metadata: Json = decode(both.metadata, object)
    assert [entry["outcome"] for entry in metadata["agents"]] == ["completed", "error"]
    assert metadata["agents"][0]["files"] == ["/w/x"]


@pytest.mark.parametrize(
    ("reports", "is_error"),
    [
        ([], False),
        ([AgentReport(agent(), "Well.")], False),
        ([AgentReport(agent(), " ")], True),
        ([AgentReport(agent(outcome="budget"), "Half.")], True),
        ([AgentReport(agent(outcome="canceled")), AgentReport(agent(), "Well.")], False),
        ([AgentReport(agent(outcome="canceled")), AgentReport(agent(outcome="interrupted"))], True),
        ([AgentReport(agent(outcome=None, state="running"))], False),
    ],
)
def test_result_is_an_error_if_no_agent_succeeded(
    reports: list[AgentReport], *, is_error: bool
) -> None:
    assert result_of(reports).is_error is is_error


def test_long_result_is_cut_with_a_note() -> None:
    files = [f"/{n}" for n in range(FILES_SHOWN + 5)]
    content = result_of([AgentReport(agent(), "x" * (ANSWER_CHARS_MAX + 1), files)]).content
    assert "[The rest was cut off; its session has it.]" in content
    assert f"/{FILES_SHOWN - 1} and 5 more" in content
    many = [agent(f"a{n}") for n in range(LIST_MAX + 3)]
    lines = listing_of(many, 0).content.splitlines()
    assert (len(lines), lines[-1]) == (LIST_MAX + 1, "[3 more are not shown.]")


def test_agents_are_listed_below_their_parent() -> None:
    waits = agent("c", None, state="running", parent="a", depth=2)
    waits.waiting_for = "ask"
    tree = [agent("a"), agent("b", "error", reason="Why"), waits]
    assert listing_of(tree, 0).content == (
        "- a a (worker, m): completed; 70 tokens, $0.2500\n"
        "  - c c (worker, m): running, waits for ask; 70 tokens, $0.2500\n"
        "- b b (worker, m): error: Why; 70 tokens, $0.2500"
    )
    assert listing_of([], 0).content == "No agent was started."
