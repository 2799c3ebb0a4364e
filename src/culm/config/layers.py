"""Merging of configuration documents, later ones over earlier ones, and their tool settings.

Pure. The merged document contains no tool settings from a file that is not trusted.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
from msgspec import field

from culm.config.checking import Document
from culm.config.references import names_in
from culm.config.schema import HOOKS_MAX, AgentRole, Hook, OwnTool, ToolName
from culm.errors import InvalidRequest
from culm.redaction import RedactedStruct
from culm.wire.asks import Rule, parse_rules
from culm.wire.codec import Json, fit, folded
from culm.wire.config import Options, Permissions

PRE_TOOL_USE = "PreToolUse"  # The only event that hooks run for.

_SECRETS = ("api_key", "oauth")
_SECRET_MAPS = ("extra_headers", "extra_body", "provider_options")
# Lists that are concatenated instead of replaced, by depth and top-level name: a layer with rules
# or hooks must not remove those of another layer.
_JOINED = frozenset({(0, "permission_rules"), (1, "hooks")})


def merged(documents: Iterable[Document]) -> Document:
    """Merge documents into one; later ones take precedence."""
    result: Document = {}
    for document in documents:
        result = _merged(result, document, 0)
    return result


def _merged(under: Document, over: Document, depth: int, inside: str = "") -> Document:
    """Merge one level. `inside` is the top-level name of this part of the documents."""
    result = dict(under)
    for name, value in over.items():
        known, top = result.get(name), inside or folded(name)
        if value is None:
            continue  # Null counts as absent, as in Go.
        if isinstance(value, dict):
            below = cast("Document", known) if isinstance(known, dict) else {}
            fields = cast("Document", value)
            if depth == 1 and inside == "models":
                below = _inherited_selection(below, fields)
            elif depth == 1 and inside in ("own_tools", "roles"):
                below = {}  # A tool or role is replaced as a whole.
            result[name] = _merged(below, fields, depth + 1, top)
        elif isinstance(value, list) and isinstance(known, list) and (depth, top) in _JOINED:
            result[name] = [*cast("list[Json]", known), *cast("list[Json]", value)]
        else:
            result[name] = value
    return result


def _inherited_selection(below: Document, over: Document) -> Document:
    """The part of a lower model selection that stays valid under a higher one.

    Request parameters are for one model: if the higher layer selects another, they are dropped.
    """
    for name in ("provider", "model"):
        selected = spelled(over, name)
        if selected and selected[-1:] != spelled(below, name)[-1:]:
            source = {} if spelled(over, "provider") else below
            return {field: value for field, value in source.items() if folded(field) == "provider"}
    return below


def provider_ids(document: Document) -> list[str]:
    """The ids of the providers in a document, in its order."""
    return [
        name
        for providers in spelled(document, "providers")
        if isinstance(providers, dict)
        for name in cast("Document", providers)
    ]


def without_strayed_keys(layers: Sequence[Document], *, own: int = 1) -> Document:
    """The merged layers, without secrets that a lower layer set for another provider address.

    Otherwise a layer that may set an address could have a secret sent there which no route shows.
    The lowest `own` layers belong to one person, so an address in one and a key in another match.
    """
    ranked = [merged(layers[:own]), *layers[own:]]
    whole = merged(ranked)
    return {
        key: _without_strayed(ranked, cast("Document", value), _env(whole))
        if folded(key) == "providers" and isinstance(value, dict)
        else value
        for key, value in whole.items()
    }


def _without_strayed(
    layers: Sequence[Document], providers: Document, variables: Document
) -> Document:
    kept: Document = {}
    for name, provider in providers.items():
        address = _address_layer(layers, name, variables)
        if isinstance(provider, dict):
            fields = cast("Document", provider)
            provider = {
                field: _entries_since(layers, name, field, value, address)
                for field, value in fields.items()
                if folded(field) not in _SECRETS or _last_layer(layers, name, field)[0] >= address
            }
        kept[name] = provider
    return kept


def _entries_since(
    layers: Sequence[Document], provider: str, field: str, value: Json, address: int
) -> Json:
    """The entries of headers and similar maps that were set in the address's layer or above."""
    if folded(field) not in _SECRET_MAPS or not isinstance(value, dict):
        return value
    set_in: dict[str, int] = {}
    for n, layer in enumerate(layers):
        entries = _last_layer([layer], provider, field)[1]
        set_in |= dict.fromkeys(cast("Document", entries), n) if isinstance(entries, dict) else {}
    entries = cast("Document", value)
    return {name: inner for name, inner in entries.items() if set_in.get(name, -1) >= address}


def _address_layer(layers: Sequence[Document], provider: str, variables: Document) -> int:
    """The highest layer that influences the address of a provider, or -1."""
    layer, address = _last_layer(layers, provider, "base_url")
    if layer < 0:  # The type determines the address.
        return _last_layer(layers, provider, "type")[0]
    names = _names_behind(address, variables) if isinstance(address, str) else ()
    setting = [n for n, one in enumerate(layers) if any(name in _env(one) for name in names)]
    return max(layer, *setting) if setting else layer


def _names_behind(text: str, variables: Document) -> set[str]:
    """The variables that a text refers to, directly or through other variables."""
    names = names_in(text)
    while more := {n for name in names for n in names_in(str(variables.get(name, "")))} - names:
        names |= more
    return names


def _env(layer: Document) -> Document:
    """The variables that a layer sets."""
    return {
        name: value
        for env in spelled(layer, "env")
        if isinstance(env, dict)
        for name, value in cast("Document", env).items()
    }


def _last_layer(layers: Sequence[Document], provider: str, field: str) -> tuple[int, Json]:
    """The highest layer that sets a field of a provider, or -1, and the value."""
    found: tuple[int, Json] = (-1, None)
    for n, layer in enumerate(layers):
        for providers in spelled(layer, "providers"):
            known = cast("Document", providers) if isinstance(providers, dict) else {}
            fields = known.get(provider)
            for value in spelled(cast("Document", fields), folded(field)) if fields else ():
                found = (n, value)
    return found


def spelled(document: Document, name: str) -> list[Json]:
    """All values under a name in any spelling; null counts as absent."""
    return [value for key, value in document.items() if folded(key) == name and value is not None]


# --- tool settings: own tools, permissions, rules, hooks, roles, variables


class ToolConfig(RedactedStruct, frozen=True):
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
    hooks = [
        hook
        for events in spelled(document, "hooks")
        for hook in fit(events, dict[str, list[Hook]]).get(PRE_TOOL_USE, [])
    ]
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
