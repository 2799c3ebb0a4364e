"""The configuration as every client reads it, and the bodies that change it.

What is shown has no field for a provider's key or token, for headers or for an environment, so
they cannot be sent by mistake. A Crush client dereferences `options`, `options.tui` and
`providers` without looking, so they are always objects.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from culm.wire.codec import Json

ModelType = Literal["large", "small"]


class Completions(Struct, omit_defaults=True):
    max_depth: int = 0
    max_items: int = 0


class TuiOptions(Struct, omit_defaults=True):
    compact_mode: bool = False
    diff_mode: str = ""
    completions: Completions = field(default_factory=Completions)
    transparent: bool = False
    scrollbar: str = ""


class Attribution(Struct, omit_defaults=True):
    trailer_style: str = ""
    co_authored_by: bool = False
    generated_with: bool = False


class Options(Struct):
    data_directory: str = ""
    debug: bool = False
    tui: TuiOptions = field(default_factory=TuiOptions)
    disable_metrics: bool = True
    disable_provider_auto_update: bool = True
    disable_default_providers: bool = True
    initialize_as: str = "AGENTS.md"
    context_paths: list[str] | UnsetType = UNSET
    global_context_paths: list[str] | UnsetType = UNSET
    skills_paths: list[str] | UnsetType = UNSET
    disabled_skills: list[str] | UnsetType = UNSET
    disabled_tools: list[str] | UnsetType = UNSET
    disable_auto_summarize: bool | UnsetType = UNSET
    attribution: Attribution | UnsetType = UNSET
    debug_lsp: bool | UnsetType = UNSET
    auto_lsp: bool | UnsetType = UNSET
    progress: bool | UnsetType = UNSET
    notifications: str | UnsetType = UNSET


class SelectedModel(Struct):
    """Which model of which provider, and how it is to be asked."""

    model: str = ""
    provider: str = ""
    reasoning_effort: str | UnsetType = UNSET
    think: bool | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    provider_options: dict[str, Json] | UnsetType = UNSET


class Model(Struct):
    """One entry of a catalogue."""

    id: str = ""
    name: str = ""
    cost_per_1m_in: float = 0.0
    cost_per_1m_out: float = 0.0
    cost_per_1m_in_cached: float = 0.0
    cost_per_1m_out_cached: float = 0.0
    context_window: int = 0
    default_max_tokens: int = 0
    can_reason: bool = False
    reasoning_levels: list[str] | UnsetType = UNSET
    default_reasoning_effort: str | UnsetType = UNSET
    supports_attachments: bool = False


class ProviderConfig(Struct, omit_defaults=True):
    id: str = ""
    name: str = ""
    type: str = ""
    base_url: str = ""
    disable: bool = False
    flat_rate: bool = False
    discover_models: bool = False
    models: list[Model] = field(default_factory=list[Model])


class Provider(Struct, omit_defaults=True):
    """A provider as a catalogue lists it."""

    id: str
    name: str
    type: str = ""
    api_endpoint: str = ""
    default_large_model_id: str = ""
    default_small_model_id: str = ""
    models: list[Model] = field(default_factory=list[Model])


class McpConfig(Struct):
    type: str = ""
    disabled: bool = False
    timeout: int = 0  # Seconds.
    disabled_tools: list[str] = field(default_factory=list[str])
    enabled_tools: list[str] = field(default_factory=list[str])


class LspConfig(Struct, omit_defaults=True):
    disabled: bool = False
    command: str = ""
    filetypes: list[str] = field(default_factory=list[str])
    root_markers: list[str] = field(default_factory=list[str])
    timeout: int = 0  # Seconds.


class Permissions(Struct, omit_defaults=True):
    allowed_tools: list[str] = field(default_factory=list[str])


class Config(Struct):
    options: Options = field(default_factory=Options)
    models: dict[str, SelectedModel] = field(default_factory=dict[str, SelectedModel])
    recent_models: dict[str, list[SelectedModel]] = field(
        default_factory=dict[str, list[SelectedModel]]
    )
    providers: dict[str, ProviderConfig] = field(default_factory=dict[str, ProviderConfig])
    mcp: dict[str, McpConfig] = field(default_factory=dict[str, McpConfig])
    lsp: dict[str, LspConfig] = field(default_factory=dict[str, LspConfig])
    permissions: Permissions = field(default_factory=Permissions)


# --- bodies. `scope` is 0 for the user's configuration, 1 for the workspace's.


class SetConfig(Struct):
    """`key` is a dotted path; a dot that belongs to a name is written `\\.`."""

    scope: int = 0
    key: str = ""
    value: Json = None


class RemoveConfig(Struct):
    scope: int = 0
    key: str = ""


class SetModel(Struct):
    scope: int = 0
    model_type: str = ""
    model: SelectedModel = field(default_factory=SelectedModel)


class SetCompact(Struct):
    scope: int = 0
    enabled: bool = False


class OAuthToken(Struct):
    access_token: str = ""
    refresh_token: str = ""
    expires_in: int = 0
    expires_at: int = 0  # Unix seconds.


class SetProviderKey(Struct):
    """`kind` says what `api_key` is: a "string", or an "oauth" token."""

    scope: int = 0
    provider_id: str = ""
    kind: str = ""
    api_key: Json = None


class RefreshOAuth(Struct):
    scope: int = 0
    provider_id: str = ""


class ImportedToken(Struct):
    token: None = None
    success: bool = False
