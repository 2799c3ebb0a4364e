"""The start policy of agents: the request, limited by what its parents have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from culm.config.schema import AgentRole
from culm.subagents.start_policy import (
    BUILT_IN_ROLES,
    AgentTerms,
    StartRefused,
    allowed_tools,
    places_of,
    plan_agent,
    role_text,
    roles_with,
    top_agent,
)
from culm.tools.agent_tools import AgentAssignment
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

TOOLS = ("agent", "bash", "view", "write")
MODEL = SelectedModel(model="m", provider="p")
TOP = top_agent(TOOLS, MODEL)
NO_WORKTREE = "an agent that may only read gets no worktree: leave out `worktree`"

names = st.none() | st.lists(st.sampled_from(TOOLS), unique=True)
limits = st.builds(
    Limits,
    wall_s=st.sampled_from((0.0, 10.0, 60.0)),
    steps=st.integers(0, 5),
    tokens=st.integers(0, 500),
    cost=st.sampled_from((0.0, 0.5, 2.0)),
)


def choose(wanted: str, above: SelectedModel) -> SelectedModel:
    return SelectedModel(model=wanted, provider="p") if wanted else above


@given(
    asked=st.builds(
        AgentAssignment, st.just("do"), tools=names, read_only=st.booleans(), limits=limits
    ),
    role=st.builds(AgentRole, tools=names, read_only=st.booleans(), limits=limits),
    has=st.lists(st.sampled_from(TOOLS), unique=True),
    is_read_only=st.booleans(),
    is_narrowed=st.booleans(),
)
def test_child_never_gets_more_than_its_parent_has(
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
    """The lower of two limits; 0 means no limit."""
    return min([limit for limit in (one, other) if limit], default=0)


def test_agent_combines_its_role_and_its_assignment() -> None:
    role = AgentRole(prompt="You weave.", model="small", tools=["view", "bash"])
    asked = AgentAssignment("Weave a net.\nA large one.", role="weaver", tools=["bash"])
    planned = plan_agent(asked, TOP, roles_with({"weaver": role}), choose, depth_max=1)
    assert (planned.name, planned.role, planned.model.model) == ("Weave a net.", "weaver", "small")
    assert planned.terms == AgentTerms("You weave.", ["bash"])
    plain = plan_agent(AgentAssignment("x" * 100), TOP, BUILT_IN_ROLES, choose, depth_max=1)
    assert (len(plain.name), plain.role, plain.model) == (60, "worker", MODEL)
    assert plain.terms.tools is None, "also those there will be later"


@pytest.mark.parametrize(
    ("asked", "depth", "message"),
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
def test_refused_start_names_the_valid_options(
    asked: AgentAssignment, depth: int, message: str
) -> None:
    with pytest.raises(StartRefused, match=message.replace("'", ".")):
        plan_agent(asked, replace(TOP, depth=depth), BUILT_IN_ROLES, choose, depth_max=4)


def test_read_only_agent_cannot_start_a_worktree_agent() -> None:
    above = replace(TOP, depth=1, is_read_only=True)
    with pytest.raises(StartRefused, match=NO_WORKTREE):
        plan_agent(AgentAssignment("x", worktree=True), above, BUILT_IN_ROLES, choose, depth_max=4)
    assert plan_agent(
        AgentAssignment("x", worktree=True), TOP, BUILT_IN_ROLES, choose, depth_max=4
    ).worktree


def test_configured_role_replaces_a_built_in_and_is_described() -> None:
    roles = roles_with({"worker": AgentRole(description="Works."), "smith": AgentRole()})
    assert list(roles) == ["explorer", "worker", "reviewer", "smith"]
    assert role_text(roles).endswith("; smith: as configured")
    assert "worker: Works." in role_text(roles)
