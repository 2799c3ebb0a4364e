"""What an agent is started with, decided from what was asked for and from who asks. Pure.

What is given down can only narrow: whoever may only read starts none that writes or has a branch
made for it, and nobody hands on a tool that it does not have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from culm.config.schema import AgentRole
from culm.errors import InvalidRequest
from culm.run.limits import check_limits
from culm.subagents.roles import DEFAULT
from culm.tools.agent_requests import AgentAssignment
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

NAME_CHARS = 60  # Of a name that is made of an assignment's first line.


class StartRefused(Exception):
    """An agent cannot be started so. Says why, and what would be right."""


class KeptWorktree(Struct, frozen=True):
    """A worktree (`worktrees.py`), as an agent's row keeps it."""

    path: str
    workspace: str
    branch: str
    base: str
    entry: str


class AgentTerms(Struct, frozen=True, omit_defaults=True):
    """What its row keeps of it; each further assignment is done by the same."""

    prompt: str = ""  # Its role's words.
    tools: list[str] | None = None  # The only ones it may use; None are all there are.
    worktree: KeptWorktree | None = None  # Its own.
    # Where all above it work, if not in the workspace itself; the last is its own without one.
    places: list[str] = []


@dataclass(frozen=True, slots=True)
class ParentAgent:
    """What whoever starts an agent has itself."""

    depth: int
    tools: Collection[str]  # The names of all that it may use ...
    is_narrowed: bool  # ... which are not all there are.
    places: Sequence[str]  # Where all above it and, last, it itself work, if not in the workspace.
    is_read_only: bool
    model: SelectedModel


def top(tools: Collection[str], model: SelectedModel) -> ParentAgent:
    """Whoever people talk to has all there is."""
    return ParentAgent(0, tools, is_narrowed=False, places=(), is_read_only=False, model=model)


@dataclass(frozen=True, slots=True)
class PlannedAgent:
    """An agent that can be started."""

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
    """Raises `Unfit`. `choose` finds a model by its name, beside the one above, or raises it."""
    if above.depth >= depth_max:
        raise StartRefused(
            f"agents nest at most {depth_max} deep, and this one is at {above.depth}"
        )
    name = assignment.role or DEFAULT
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
    """Those that everybody above lets it have; what was named and is not there is an error."""
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
    """The lower of each; 0 is none."""
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
    """Where an agent and all above it work, if not in the workspace itself; its own is the last."""
    return [*terms.places, worktree] if worktree else terms.places


def allowed_tools(names: Collection[str], terms: AgentTerms) -> list[str]:
    """Of the tools there are now, those that an agent of these terms may use."""
    return sorted(name for name in names if terms.tools is None or name in terms.tools)
