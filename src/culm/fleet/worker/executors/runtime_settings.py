"""The settings that a culm host sends for the loop (`culm` in the provision), parsed once."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from culm.config.schema import HOOKS_MAX, OWN_TOOLS_MAX, Hook, OwnTool, ToolName
from culm.errors import InvalidRequest
from culm.fleet.provision import BadProvision, CulmExtension
from culm.model.choice import ChosenModel
from culm.run.project_context import ContextPaths
from culm.wire.asks import Approve, Rule, parse_approve, parse_rules
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True, repr=False)
class RuntimeSettings:
    """The parsed settings. Without a repr, because they contain the key of the chosen model."""

    rules: tuple[Rule, ...] = ()
    rules_also_from: tuple[str, ...] = ()
    allowed_tools: tuple[str, ...] = ()
    approve: Approve | None = None
    hooks: tuple[Hook, ...] = ()
    own_tools: dict[str, OwnTool] = field(default_factory=dict[str, OwnTool])
    chosen: ChosenModel | None = None
    context_paths: ContextPaths = field(default_factory=ContextPaths)


class _Parts(Struct):
    """The fields that are decoded without further checks."""

    hooks: Annotated[tuple[Hook, ...], Meta(max_length=HOOKS_MAX)] = ()
    own_tools: Annotated[dict[ToolName, OwnTool], Meta(max_length=OWN_TOOLS_MAX)] = {}
    chosen: ChosenModel | None = None


def read_settings(extension: CulmExtension) -> RuntimeSettings:
    """Parse the settings; raises `BadProvision`, whose message repeats no value."""
    named = {
        "hooks": extension.hooks,
        "own_tools": extension.own_tools,
        "chosen": extension.chosen,
    }
    try:
        parts = msgspec.convert({k: v for k, v in named.items() if _known(v) is not None}, _Parts)
    except msgspec.ValidationError as exc:
        raise BadProvision(f"culm: {exc}") from exc
    try:
        rules = parse_rules(_known(extension.rules))
        approve = parse_approve(_known(extension.approve))
    except InvalidRequest as exc:
        raise BadProvision(f"culm: {exc.message}") from exc
    sent = extension.context_paths
    default = ContextPaths()
    paths = default if sent is None else ContextPaths(tuple(sent.project), tuple(sent.user))
    tools = tuple(extension.allowed_tools)
    return RuntimeSettings(
        rules,
        tuple(extension.rules_also_from),
        tools,
        approve,
        parts.hooks,
        dict(parts.own_tools),
        parts.chosen,
        paths,
    )


def _known(value: Json | UnsetType) -> Json:
    return None if value is UNSET else value
