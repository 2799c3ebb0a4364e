"""The tool settings of a configuration: own tools, permissions, rules, hooks, roles, variables.

They are read from the merged document (`layers.py`), which contains no such settings from a file
that is not trusted.
"""

from dataclasses import dataclass, field
from typing import cast

import msgspec

from culm.config.checking import Document
from culm.config.layers import spelled
from culm.config.schema import HOOKS_MAX, AgentRole, Hook, OwnTool, ToolName
from culm.errors import InvalidRequest
from culm.wire.asks import Rule, parse_rules
from culm.wire.codec import Json, fit
from culm.wire.config import Options, Permissions

PRE_TOOL_USE = "PreToolUse"  # The only event that hooks run for.


@dataclass(frozen=True, slots=True, repr=False)
class ToolConfig:
    allowed_tools: tuple[str, ...] = ()
    disabled_tools: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()
    hooks: tuple[Hook, ...] = ()  # Run before a call, in this order.
    own_tools: dict[str, OwnTool] = field(default_factory=dict[str, OwnTool])
    roles: dict[str, AgentRole] = field(default_factory=dict[str, AgentRole])
    env: dict[str, str] = field(default_factory=dict[str, str])  # Without references.


class _Config(msgspec.Struct):
    options: Options = msgspec.field(default_factory=Options)
    permissions: Permissions = msgspec.field(default_factory=Permissions)
    own_tools: dict[ToolName, OwnTool] = msgspec.field(default_factory=dict[ToolName, OwnTool])
    roles: dict[ToolName, AgentRole] = msgspec.field(default_factory=dict[ToolName, AgentRole])
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def read_tooling(document: Document) -> ToolConfig:
    """Read the tool settings of a document; raises `InvalidRequest` if one is invalid."""
    config = fit(cast("Json", dict(document)), _Config)
    hooks = [hook for events in spelled(document, "hooks") for hook in _hooks(events)]
    if len(hooks) > HOOKS_MAX:
        raise InvalidRequest(f"too many hooks: at most {HOOKS_MAX}")
    return ToolConfig(
        allowed_tools=tuple(config.permissions.allowed_tools),
        disabled_tools=frozenset(config.options.disabled_tools or ()),
        # In any spelling of the key: no rule may be lost because of it.
        rules=tuple(
            rule for rules in spelled(document, "permission_rules") for rule in parse_rules(rules)
        ),
        hooks=tuple(hooks),
        own_tools=dict(config.own_tools),
        roles=dict(config.roles),
        # A value with a reference may be a key, which is for providers and not for every tool.
        env={name: value for name, value in config.env.items() if "$" not in value},
    )


def _hooks(events: Json) -> list[Hook]:
    return fit(events, dict[str, list[Hook]]).get(PRE_TOOL_USE, [])
