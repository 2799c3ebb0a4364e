"""The settings that a culm host sends for the loop (`culm` in the provision), parsed once."""

from collections.abc import Sequence
from typing import Annotated, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from culm.config.schema import HOOKS_MAX, OWN_TOOLS_MAX, Hook, OwnTool, ProviderFile, ToolName
from culm.errors import InvalidRequest, ModelFailed
from culm.fleet.protocol.frames import Effort
from culm.fleet.provision import BadProvision, CulmExtension, ModelName, Provision
from culm.model.catalog import find_dialect
from culm.model.choice import ChosenModel, chosen_of, why_unreachable
from culm.model.local_servers import OFFLINE
from culm.redaction import RedactedStruct
from culm.run.loop import ActiveModel
from culm.run.project_context import ContextPaths
from culm.wire.asks import Approve, Rule, parse_approve, parse_rules
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel


class RuntimeSettings(RedactedStruct, frozen=True):
    """The parsed settings. They contain the key of the chosen model."""

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


EFFORTS: Sequence[str] = get_args(Effort)  # The least first.


class SingleModel:
    """A model without a fallback: the host may retry the assignment with another model."""

    def __init__(self, active: ActiveModel) -> None:
        self.current = active

    async def fall_back(self, failure: ModelFailed) -> bool:
        return False


def choose(provision: Provision, chosen: ChosenModel | None, effort: str | None) -> ChosenModel:
    """Check the chosen model, or find the one named in the provision.

    Raises `ModelFailed`; its message never contains a key.
    """
    if effort is not None and effort not in EFFORTS:
        raise _unusable(f"reasoning_effort must be one of {', '.join(EFFORTS)}")
    chosen = _find_named(provision) if chosen is None else chosen
    if find_dialect(chosen.access.type) is None:
        raise _unusable(f"unknown provider type {chosen.access.type!r}")
    if effort is None:
        return chosen
    fitting = fitting_effort(effort, chosen.info) or UNSET
    return chosen._replace(settings=replace(chosen.settings, reasoning_effort=fitting))


def _find_named(provision: Provision) -> ChosenModel:
    named = provision.model or ModelName(OFFLINE, OFFLINE)
    provider = _provider(provision, named.provider)
    if reason := why_unreachable(named.provider, provider):
        raise _unusable(reason)
    if not named.model:
        raise _unusable(f"the provision does not name a model of provider {named.provider!r}")
    settings = SelectedModel(model=named.model, provider=named.provider)
    return chosen_of(named.provider, provider, settings)


def _provider(provision: Provision, name: str) -> ProviderFile:
    if name == OFFLINE:
        return ProviderFile(type=OFFLINE)
    for credential in provision.secrets.provider_credentials:
        if credential.provider == name:
            return ProviderFile(
                type=credential.provider_type or "",
                base_url=credential.base_url or "",
                api_key=credential.api_key,
            )
    raise _unusable(f"the provision has no credential for provider {name!r}")


def _unusable(reason: str) -> ModelFailed:
    return ModelFailed("Model not available", reason)


def fitting_effort(effort: str, info: ModelInfo) -> str:
    """Return the greatest effort of the model up to `effort`; empty if it does not reason.

    Hosts send the same value for every model. For a model unknown here the value is kept.
    """
    if info.context_window and not info.can_reason:
        return ""
    if info.reasoning_levels is UNSET or effort in info.reasoning_levels:
        return effort
    allowed = EFFORTS[: EFFORTS.index(effort) + 1]
    known = [one for one in EFFORTS if one in info.reasoning_levels]
    return next((one for one in reversed(known) if one in allowed), known[0] if known else "")
