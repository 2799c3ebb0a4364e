"""What our own parent said to a worker that runs the loop (`culm` in its provision), read once."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from culm.config.schema import HOOKS_MAX, OWN_TOOLS_MAX, Hook, OwnTool, ToolName
from culm.errors import InvalidRequest
from culm.fleet.provision import BadProvision, CulmExtension
from culm.model.choice import ChosenModel
from culm.run.project_context import ContextPaths
from culm.wire.codec import Json
from culm.wire.rules import Approve, Rule, parse_approve, parse_rules


@dataclass(frozen=True, slots=True, repr=False)
class RuntimeSettings:
    """It holds the key of the chosen model."""

    rules: tuple[Rule, ...] = ()
    rules_also_from: tuple[str, ...] = ()
    allowed_tools: tuple[str, ...] = ()
    approve: Approve | None = None
    hooks: tuple[Hook, ...] = ()
    own_tools: dict[str, OwnTool] = field(default_factory=dict[str, OwnTool])
    chosen: ChosenModel | None = None
    context_paths: ContextPaths = field(default_factory=ContextPaths)


class _Parts(Struct):
    """What of it is read as it stands."""

    hooks: Annotated[tuple[Hook, ...], Meta(max_length=HOOKS_MAX)] = ()
    own_tools: Annotated[dict[ToolName, OwnTool], Meta(max_length=OWN_TOOLS_MAX)] = {}
    chosen: ChosenModel | None = None


def read_settings(said: CulmExtension) -> RuntimeSettings:
    """Raises `BadProvision`, which says what is wrong and repeats no value."""
    named = {"hooks": said.hooks, "own_tools": said.own_tools, "chosen": said.chosen}
    try:
        parts = msgspec.convert({k: v for k, v in named.items() if _known(v) is not None}, _Parts)
    except msgspec.ValidationError as exc:
        raise BadProvision(f"culm: {exc}") from exc
    try:
        rules = parse_rules(_known(said.rules))
        approve = parse_approve(_known(said.approve))
    except InvalidRequest as exc:
        raise BadProvision(f"culm: {exc.message}") from exc
    places = said.context_paths
    usual = ContextPaths()
    paths = usual if places is None else ContextPaths(tuple(places.project), tuple(places.user))
    tools = tuple(said.allowed_tools)
    return RuntimeSettings(
        rules,
        tuple(said.rules_also_from),
        tools,
        approve,
        parts.hooks,
        dict(parts.own_tools),
        parts.chosen,
        paths,
    )


def _known(value: Json | UnsetType) -> Json:
    return None if value is UNSET else value
