"""Roles, and the policy for starting an agent: role, model, tools and limits. Pure.

Rights can only narrow: a read-only agent cannot start one that writes or has a branch of its own,
and no agent can pass on a tool that it does not have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct

from culm.config.schema import AgentRole
from culm.errors import InvalidRequest
from culm.run.limits import check_limits
from culm.tools.agent_tools import AgentAssignment
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

NAME_CHARS = 60  # Length of a name that is derived from an assignment's first line.
DEFAULT_ROLE: Final = "worker"

BUILT_IN_ROLES: Final[Mapping[str, AgentRole]] = {
    "explorer": AgentRole(
        description="Looks for something and reports; it may only read.",
        prompt="You are an explorer: find out what you were asked, and change nothing. Say where "
        "each thing is, by file and line, and what you could not find.",
        read_only=True,
    ),
    "worker": AgentRole(
        description="Does a task on its own, from beginning to end.",
        prompt="You work on a part of a larger task, for another agent. Do your part, check it, "
        "and report briefly what you did, what you found and what is left.",
    ),
    "reviewer": AgentRole(
        description="Judges work that was done; it may only read.",
        prompt="You review the work of others, and change nothing. Look for what is wrong, missing "
        "or risky. Say each finding with its place and why it matters, the worst first.",
        read_only=True,
    ),
}


class StartRefused(Exception):
    """The agent cannot be started like this; the message gives the reason and the valid values."""


class KeptWorktree(Struct, frozen=True):
    """A `Worktree` as stored in an agent's row."""

    path: str
    workspace: str
    branch: str
    base: str
    entry: str


class AgentTerms(Struct, frozen=True, omit_defaults=True):
    """The part of an agent's plan that is stored in its row and applies to all its assignments."""

    prompt: str = ""  # The prompt of its role.
    tools: list[str] | None = None  # The only tools it may use; None for all.
    worktree: KeptWorktree | None = None  # Its own.
    # The worktrees of its ancestors, from the top; without one of its own it works in the last.
    places: list[str] = []


def roles_with(configured: Mapping[str, AgentRole]) -> dict[str, AgentRole]:
    """Merge the built-in roles with the configured ones, which win."""
    return {**BUILT_IN_ROLES, **configured}


def role_text(roles: Mapping[str, AgentRole]) -> str:
    """Describe the roles for a model."""
    return "; ".join(
        f"{name}: {role.description or 'as configured'}" for name, role in roles.items()
    )


class ParentAgent(Struct, frozen=True):
    """The rights and settings of the agent that starts another one."""

    depth: int
    tools: Collection[str]  # The names of all tools that it may use.
    is_narrowed: bool  # True if these are not all tools.
    places: Sequence[str]  # The worktrees of its ancestors and its own, if any, from the top.
    is_read_only: bool
    model: SelectedModel


def top_agent(tools: Collection[str], model: SelectedModel) -> ParentAgent:
    """Return the top of a tree, which has all rights."""
    return ParentAgent(0, tools, is_narrowed=False, places=(), is_read_only=False, model=model)


class PlannedAgent(Struct, frozen=True):
    """An agent that passed the policy and can be started."""

    assignment: AgentAssignment
    name: str
    role: str
    model: SelectedModel
    terms: AgentTerms
    is_read_only: bool
    limits: Limits

    @property
    def worktree(self) -> bool:
        return self.assignment.worktree


def plan_agent(
    assignment: AgentAssignment,
    above: ParentAgent,
    roles: Mapping[str, AgentRole],
    choose: Callable[[str, SelectedModel], SelectedModel],
    *,
    depth_max: int,
) -> PlannedAgent:
    """Apply the policy; raises `StartRefused`.

    `choose` finds a model by name, given the parent's model, or raises `StartRefused`.
    """
    if above.depth >= depth_max:
        raise StartRefused(
            f"agents nest at most {depth_max} deep, and this one is at {above.depth}"
        )
    name = assignment.role or DEFAULT_ROLE
    role = roles.get(name)
    if role is None:
        raise StartRefused(f"there is no role {name!r}; roles are {', '.join(sorted(roles))}")
    if not assignment.prompt.strip():
        raise StartRefused("an assignment needs a prompt")
    is_read_only = assignment.read_only or role.read_only or above.is_read_only
    if is_read_only and assignment.worktree:
        raise StartRefused("an agent that may only read gets no worktree: leave out `worktree`")
    return PlannedAgent(
        assignment,
        assignment.name.strip() or _name_of(assignment.prompt),
        name,
        choose(assignment.model or role.model, above.model),
        AgentTerms(role.prompt, _tools(assignment, role, above), places=list(above.places)),
        is_read_only,
        _limits(assignment.limits, role.limits),
    )


def _name_of(prompt: str) -> str:
    line = prompt.strip().partition("\n")[0].strip()
    return line if len(line) <= NAME_CHARS else f"{line[: NAME_CHARS - 1]}…"


def _tools(assignment: AgentAssignment, role: AgentRole, above: ParentAgent) -> list[str] | None:
    """Intersect the tools of the parent, the role and the assignment; an unknown name raises."""
    for named in (assignment.tools, role.tools):
        unknown = sorted(set(named or ()) - set(above.tools))
        if unknown:
            known = ", ".join(sorted(above.tools)) or "none"
            raise StartRefused(f"there is no tool {unknown[0]!r} to give it; tools are {known}")
    narrowed = [named for named in (assignment.tools, role.tools) if named is not None]
    if not narrowed and not above.is_narrowed:
        return None
    return sorted(name for name in above.tools if all(name in named for named in narrowed))


def _limits(asked: Limits, of_role: Limits) -> Limits:
    """Combine two sets of limits, the lower of each; 0 means no limit."""
    try:
        check_limits(asked)
    except InvalidRequest as exc:
        raise StartRefused(exc.message) from exc

    def lower(one: float, other: float) -> float:
        return min(one, other) if one and other else one or other

    return Limits(
        wall_s=lower(asked.wall_s, of_role.wall_s),
        steps=int(lower(asked.steps, of_role.steps)),
        tokens=int(lower(asked.tokens, of_role.tokens)),
        cost=lower(asked.cost, of_role.cost),
    )


def places_of(worktree: str, terms: AgentTerms) -> list[str]:
    """List the worktrees of an agent's ancestors and its own, if any, from the top."""
    return [*terms.places, worktree] if worktree else terms.places


def allowed_tools(names: Collection[str], terms: AgentTerms) -> list[str]:
    """Filter the available tools down to those that an agent with these terms may use."""
    return sorted(name for name in names if terms.tools is None or name in terms.tools)
