"""The configuration as sent to clients, and the request bodies that change it.

These types have no field for a provider's key or token, for headers or for environment variables,
so secrets cannot be sent by mistake. Crush clients dereference `options`, `options.tui` and
`providers` without a check, so these are always objects.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType, field

from culm.wire.codec import Json, doc

ModelType = Literal["large", "small"]
ReservedList = Annotated[list[str] | UnsetType, doc("Reserved; has no effect.")]
ReservedFlag = Annotated[bool | UnsetType, doc("Reserved; has no effect.")]
ProviderFloat = Annotated[float | UnsetType, doc("As the provider defines it.")]


class Completions(Struct, omit_defaults=True):
    max_depth: Annotated[int, doc("Maximum directory depth for completions.")] = 0
    max_items: Annotated[int, doc("Maximum number of completions.")] = 0


class TuiOptions(Struct, omit_defaults=True):
    compact_mode: Annotated[bool, doc("Use a compact display.")] = False
    diff_mode: Annotated[str, doc("`unified` or `split`.")] = ""
    completions: Annotated[Completions, doc("Limits of completions.")] = field(
        default_factory=Completions
    )
    transparent: Annotated[bool, doc("Use a transparent background.")] = False
    scrollbar: Annotated[str, doc("`default`, `always` or `never`.")] = ""


class Attribution(Struct, omit_defaults=True):
    trailer_style: Annotated[str, doc("`none`, `co-authored-by` or `assisted-by`.")] = ""
    co_authored_by: Annotated[bool, doc("The older form of `trailer_style: co-authored-by`.")] = (
        False
    )
    generated_with: Annotated[bool, doc("Add a line to commit messages that names the tool.")] = (
        False
    )


class Options(Struct):
    data_directory: Annotated[str, doc("The server's data directory. Set by the server.")] = ""
    debug: Annotated[bool, doc("True if the client asked for debug output.")] = False
    tui: Annotated[TuiOptions, doc("Display options.")] = field(default_factory=TuiOptions)
    disable_metrics: Annotated[bool, doc("Always true: culm sends no metrics.")] = True
    disable_provider_auto_update: Annotated[bool, doc("Always true.")] = True
    disable_default_providers: Annotated[
        bool, doc("Always true: the listed providers are all that exist.")
    ] = True
    initialize_as: Annotated[str, doc("The file in which an agent describes a project.")] = (
        "AGENTS.md"
    )
    context_paths: Annotated[
        list[str] | UnsetType,
        doc("More files, or directories of files, that agents read as instructions."),
    ] = UNSET
    global_context_paths: Annotated[
        list[str] | UnsetType, doc("The same, anywhere on disk. Ignored in a project's file.")
    ] = UNSET
    skills_paths: ReservedList = UNSET
    disabled_skills: ReservedList = UNSET
    disabled_tools: Annotated[
        list[str] | UnsetType, doc("Tools that are not offered to any agent.")
    ] = UNSET
    disable_auto_summarize: Annotated[
        bool | UnsetType, doc("Do not summarize long conversations automatically.")
    ] = UNSET
    attribution: Annotated[Attribution | UnsetType, doc("Attribution in commit messages.")] = UNSET
    debug_lsp: ReservedFlag = UNSET
    auto_lsp: ReservedFlag = UNSET
    progress: Annotated[bool | UnsetType, doc("Show progress in a terminal.")] = UNSET
    notifications: Annotated[
        str | UnsetType, doc("`auto`, `native`, `osc`, `bell` or `disabled`.")
    ] = UNSET


class SelectedModel(Struct):
    """A model of a provider, with request parameters."""

    model: Annotated[str, doc("The id of the model.")] = ""
    provider: Annotated[str, doc("The id of its provider.")] = ""
    reasoning_effort: Annotated[
        str | UnsetType, doc("Reasoning effort, as the provider names it.")
    ] = UNSET
    think: Annotated[bool | UnsetType, doc("Let the model reason before it answers.")] = UNSET
    max_tokens: Annotated[int | UnsetType, doc("Maximum tokens of one answer.")] = UNSET
    temperature: ProviderFloat = UNSET
    top_p: ProviderFloat = UNSET
    top_k: Annotated[int | UnsetType, doc("As the provider defines it.")] = UNSET
    frequency_penalty: ProviderFloat = UNSET
    presence_penalty: ProviderFloat = UNSET
    provider_options: Annotated[
        dict[str, Json] | UnsetType, doc("Merged into the body of each request.")
    ] = UNSET


class Model(Struct):
    """One model of a catalog."""

    id: Annotated[str, doc("The provider's id of the model.")] = ""
    name: Annotated[str, doc("The name shown to people.")] = ""
    cost_per_1m_in: Annotated[float, doc("USD per million input tokens.")] = 0.0
    cost_per_1m_out: Annotated[float, doc("USD per million output tokens.")] = 0.0
    cost_per_1m_in_cached: Annotated[float, doc("USD per million tokens written to a cache.")] = 0.0
    cost_per_1m_out_cached: Annotated[float, doc("USD per million tokens read from a cache.")] = 0.0
    context_window: Annotated[
        int, doc("Context size in tokens; if 0, automatic summaries are off.")
    ] = 0
    default_max_tokens: Annotated[
        int, doc("Maximum tokens of one answer, unless configured otherwise.")
    ] = 0
    can_reason: Annotated[bool, doc("True if the model can reason.")] = False
    reasoning_levels: Annotated[
        list[str] | UnsetType, doc("The reasoning efforts that the model supports.")
    ] = UNSET
    default_reasoning_effort: Annotated[
        str | UnsetType, doc("The reasoning effort if none is configured.")
    ] = UNSET
    supports_attachments: Annotated[bool, doc("True if the model accepts images.")] = False


class ProviderConfig(Struct, omit_defaults=True):
    id: Annotated[str, doc("The provider's key in `providers`.")] = ""
    name: Annotated[str, doc("The name shown to people.")] = ""
    type: Annotated[str, doc("The API dialect; see docs/models.md.")] = ""
    base_url: Annotated[
        str, doc("The URL of the API, without the path that the dialect appends.")
    ] = ""
    disable: Annotated[bool, doc("Ignore this provider.")] = False
    flat_rate: Annotated[bool, doc("Requests have no cost of their own.")] = False
    discover_models: Annotated[bool, doc("Reserved; has no effect.")] = False
    models: Annotated[
        list[Model], doc("Model entries; these take precedence over the catalog.")
    ] = field(default_factory=list[Model])


class Provider(Struct, omit_defaults=True):
    """A provider as listed in a catalog."""

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
    allowed_tools: Annotated[list[str], doc("`tool` or `tool:action`.")] = field(
        default_factory=list[str]
    )


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


# --- request bodies


class ConfigChange(Struct):
    scope: int = 0  # 0 for the user's configuration, 1 for the workspace's.


class SetConfig(ConfigChange):
    """A value to set. `key` is a dotted path; a dot inside a name is written `\\.`."""

    key: str = ""
    value: Json = None


class RemoveConfig(ConfigChange):
    key: str = ""


class SetModel(ConfigChange):
    model_type: str = ""
    model: SelectedModel = field(default_factory=SelectedModel)


class SetCompact(ConfigChange):
    enabled: bool = False


class OAuthToken(Struct):
    access_token: str = ""
    refresh_token: str = ""
    expires_in: int = 0
    expires_at: int = 0  # Unix seconds.


class SetProviderKey(ConfigChange):
    """A provider's credentials. `kind` is the type of `api_key`: "string" or "oauth"."""

    provider_id: str = ""
    kind: str = ""
    api_key: Json = None


class RefreshOAuth(ConfigChange):
    provider_id: str = ""


class ImportedToken(Struct):
    token: None = None
    success: bool = False
