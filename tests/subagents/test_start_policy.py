"""What an agent is started with: what was asked for, within what everybody above it has."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from culm.config.schema import AgentRole
from culm.subagents.roles import BUILT_IN, role_text, roles_with
from culm.subagents.start_policy import (
    AgentTerms,
    StartRefused,
    allowed_tools,
    places_of,
    plan_agent,
    top,
)
from culm.tools.agent_requests import AgentAssignment
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

TOOLS = ("agent", "bash", "view", "write")
MODEL = SelectedModel(model="m", provider="p")
TOP = top(TOOLS, MODEL)
NO_WORKTREE = "an agent that may only read gets no worktree: leave out `worktree`"

names = some.none() | some.lists(some.sampled_from(TOOLS), unique=True)
limits = some.builds(
    Limits,
    wall_s=some.sampled_from((0.0, 10.0, 60.0)),
    steps=some.integers(0, 5),
    tokens=some.integers(0, 500),
    cost=some.sampled_from((0.0, 0.5, 2.0)),
)


def choose(wanted: str, above: SelectedModel) -> SelectedModel:
    return SelectedModel(model=wanted, provider="p") if wanted else above


@given(
    asked=some.builds(
        AgentAssignment, some.just("do"), tools=names, read_only=some.booleans(), limits=limits
    ),
    role=some.builds(AgentRole, tools=names, read_only=some.booleans(), limits=limits),
    has=some.lists(some.sampled_from(TOOLS), unique=True),
    is_read_only=some.booleans(),
    is_narrowed=some.booleans(),
)
def test_what_is_given_down_is_never_more_than_anybody_above_has(
    asked: AgentAssignment,
    role: AgentRole,
    has: list[str],
    *,
    is_read_only: bool,
    is_narrowed: bool,
) -> None:
    tools = has if is_narrowed else TOOLS
    above = replace(
        TOP,
        depth=1,
        tools=tools,
        is_narrowed=is_narrowed,
        is_read_only=is_read_only,
        places=("/v", "/w"),
    )
    if not {*(asked.tools or ()), *(role.tools or ())} <= set(tools):
        with pytest.raises(StartRefused, match="to give it; tools are"):
            plan_agent(asked, above, {"worker": role}, choose, depth_max=4)
        return
    planned = plan_agent(asked, above, {"worker": role}, choose, depth_max=4)
    may = set(allowed_tools(TOOLS, planned.terms))
    assert may <= set(tools)
    for named in (asked.tools, role.tools):
        assert named is None or may <= set(named)
    assert places_of("", planned.terms) == planned.terms.places == ["/v", "/w"]
    assert places_of("/x", planned.terms) == ["/v", "/w", "/x"]
    assert planned.is_read_only == (asked.read_only or role.read_only or is_read_only)
    assert planned.limits == Limits(
        wall_s=lower(asked.limits.wall_s, role.limits.wall_s),
        steps=int(lower(asked.limits.steps, role.limits.steps)),
        tokens=int(lower(asked.limits.tokens, role.limits.tokens)),
        cost=lower(asked.limits.cost, role.limits.cost),
    )


def lower(one: float, other: float) -> float:
    """Of two limits; 0 is none."""
    return min([limit for limit in (one, other) if limit], default=0)


def test_an_agent_has_what_its_role_and_whoever_starts_it_say() -> None:
    role = AgentRole(prompt="You weave.", model="small", tools=["view", "bash"])
    asked = AgentAssignment("Weave a net.\nA large one.", role="weaver", tools=["bash"])
    planned = plan_agent(asked, TOP, roles_with({"weaver": role}), choose, depth_max=1)
    assert (planned.name, planned.role, planned.model.model) == ("Weave a net.", "weaver", "small")
    assert planned.terms == AgentTerms("You weave.", ["bash"])
    plain = plan_agent(AgentAssignment("x" * 100), TOP, BUILT_IN, choose, depth_max=1)
    assert (len(plain.name), plain.role, plain.model) == (60, "worker", MODEL)
    assert plain.terms.tools is None, "also those there will be later"


@pytest.mark.parametrize(
    ("asked", "depth", "words"),
    [
        (AgentAssignment("x"), 4, "agents nest at most 4 deep, and this one is at 4"),
        (
            AgentAssignment("x", role="y"),
            0,
            "there is no role 'y'; roles are explorer, reviewer, worker",
        ),
        (AgentAssignment(" \n"), 0, "an assignment needs a prompt"),
        (AgentAssignment("x", limits=Limits(cost=float("nan"))), 0, "limits must be numbers"),
        (AgentAssignment("x", read_only=True, worktree=True), 0, NO_WORKTREE),
        (AgentAssignment("x", role="explorer", worktree=True), 0, NO_WORKTREE),
    ],
)
def test_what_cannot_be_is_told_with_what_would_be_right(
    asked: AgentAssignment, depth: int, words: str
) -> None:
    with pytest.raises(StartRefused, match=words.replace("'", ".")):
        plan_agent(asked, replace(TOP, depth=depth), BUILT_IN, choose, depth_max=4)


def test_whoever_may_only_read_has_no_branch_made_by_starting_another() -> None:
    above = replace(TOP, depth=1, is_read_only=True)
    with pytest.raises(StartRefused, match=NO_WORKTREE):
        plan_agent(AgentAssignment("x", worktree=True), above, BUILT_IN, choose, depth_max=4)
    assert plan_agent(
        AgentAssignment("x", worktree=True), TOP, BUILT_IN, choose, depth_max=4
    ).worktree


def test_a_configured_role_replaces_the_one_of_its_name_and_is_described_to_models() -> None:
    roles = roles_with({"worker": AgentRole(description="Works."), "smith": AgentRole()})
    assert list(roles) == ["explorer", "worker", "reviewer", "smith"]
    assert role_text(roles).endswith("; smith: as configured")
    assert "worker: Works." in role_text(roles)
