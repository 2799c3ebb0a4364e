"""What agents are started as: the roles that are built in, and those a configuration adds."""

from collections.abc import Mapping
from typing import Final

from culm.config.schema import AgentRole

DEFAULT: Final = "worker"

BUILT_IN: Final[Mapping[str, AgentRole]] = {
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


def roles_with(configured: Mapping[str, AgentRole]) -> dict[str, AgentRole]:
    """All there are; one that is configured replaces the one of its name."""
    return {**BUILT_IN, **configured}


def role_text(roles: Mapping[str, AgentRole]) -> str:
    """What a model is told of them."""
    return "; ".join(
        f"{name}: {role.description or 'as configured'}" for name, role in roles.items()
    )
