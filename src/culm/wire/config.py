"""The configuration as sent to clients, and the request bodies that change it.

These types have no field for a provider's key or token, for headers or for environment variables,
so secrets cannot be sent by mistake. Crush clients dereference `options`, `options.tui` and
`providers` without a check, so these are always objects.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from culm.wire.codec import Json

ModelType = Literal["large", "small"]


class Completions(Struct, omit_defaults=True):
    max_depth: Annotated[int, Meta(description="Maximum directory depth for completions.")] = 0
    max_items: Annotated[int, Meta(description="Maximum number of completions.")] = 0


class TuiOptions(Struct, omit_defaults=True):
    compact_mode: Annotated[bool, Meta(description="Use a compact display.")] = False
    diff_mode: Annotated[str, Meta(description="`unified` or `split`.")] = ""
    completions: Annotated[Completions, Meta(description="Limits of completions.")] = field(
        default_factory=Completions
    )
    transparent: Annotated[bool, Meta(description="Use a transparent background.")] = False
    scrollbar: Annotated[str, Meta(description="`default`, `always` or `never`.")] = ""


class Attribution(Struct, omit_defaults=True):
    trailer_style: Annotated[
        str, Meta(description="`none`, `co-authored-by` or `assisted-by`.")
    ] = ""
    co_authored_by: Annotated[
        bool, Meta(description="The older form of `trailer_style: co-authored-by`.")
    ] = False
    generated_with: Annotated[
        bool, Meta(description="Add a line to commit messages that names the tool.")
    ] = False


class Options(Struct):
    data_directory: Annotated[
        str, Meta(description="The server's data directory. Set by the server.")
    ] = ""
    debug: Annotated[bool, Meta(description="True if the client asked for debug output.")] = False
    tui: Annotated[TuiOptions, Meta(description="Display options.")] = field(
        default_factory=TuiOptions
    )
    disable_metrics: Annotated[bool, Meta(description="Always true: culm sends no metrics.")] = True
    disable_provider_auto_update: Annotated[bool, Meta(description="Always true.")] = True
    disable_default_providers: Annotated[
        bool, Meta(description="Always true: the listed providers are all that exist.")
    ] = True
    initialize_as: Annotated[
        str, Meta(description="The file in which an agent describes a project.")
    ] = "AGENTS.md"
    context_paths: Annotated[
        list[str] | UnsetType,
        Meta(description="More files, or directories of files, that agents read as instructions."),
    ] = UNSET
    global_context_paths: Annotated[
        list[str] | UnsetType,
        Meta(description="The same, anywhere on disk. Ignored in a project's file."),
    ] = UNSET
    skills_paths: Annotated[list[str] | UnsetType, Meta(description="Reserved; has no effect.")] = (
        UNSET
    )
    disabled_skills: Annotated[
        list[str] | UnsetType, Meta(description="Reserved; has no effect.")
    ] = UNSET
    disabled_tools: Annotated[
        list[str] | UnsetType, Meta(description="Tools that are not offered to any agent.")
    ] = UNSET
    disable_auto_summarize: Annotated[
        bool | UnsetType, Meta(description="Do not summarize long conversations automatically.")
    ] = UNSET
    attribution: Annotated[
        Attribution | UnsetType, Meta(description="Attribution in commit messages.")
    ] = UNSET
    debug_lsp: Annotated[bool | UnsetType, Meta(description="Reserved; has no effect.")] = UNSET
    auto_lsp: Annotated[bool | UnsetType, Meta(description="Reserved; has no effect.")] = UNSET
    progress: Annotated[bool | UnsetType, Meta(description="Show progress in a terminal.")] = UNSET
    notifications: Annotated[
        str | UnsetType, Meta(description="`auto`, `native`, `osc`, `bell` or `disabled`.")
    ] = UNSET


class SelectedModel(Struct):
    """A model of a provider, with request parameters."""

    model: Annotated[str, Meta(description="The id of the model.")] = ""
    provider: Annotated[str, Meta(description="The id of its provider.")] = ""
    reasoning_effort: Annotated[
        str | UnsetType, Meta(description="Reasoning effort, as the provider names it.")
    ] = UNSET
    think: Annotated[
        bool | UnsetType, Meta(description="Let the model reason before it answers.")
    ] = UNSET
    max_tokens: Annotated[int | UnsetType, Meta(description="Maximum tokens of one answer.")] = (
        UNSET
    )
    temperature: Annotated[float | UnsetType, Meta(description="As the provider defines it.")] = (
        UNSET
    )
    top_p: Annotated[float | UnsetType, Meta(description="As the provider defines it.")] = UNSET
    top_k: Annotated[int | UnsetType, Meta(description="As the provider defines it.")] = UNSET
    frequency_penalty: Annotated[
        float | UnsetType, Meta(description="As the provider defines it.")
    ] = UNSET
    presence_penalty: Annotated[
        float | UnsetType, Meta(description="As the provider defines it.")
    ] = UNSET
    provider_options: Annotated[
        dict[str, Json] | UnsetType, Meta(description="Merged into the body of each request.")
    ] = UNSET


class Model(Struct):
    """One model of a catalog."""

    id: Annotated[str, Meta(description="The provider's id of the model.")] = ""
    name: Annotated[str, Meta(description="The name shown to people.")] = ""
    cost_per_1m_in: Annotated[float, Meta(description="USD per million input tokens.")] = 0.0
    cost_per_1m_out: Annotated[float, Meta(description="USD per million output tokens.")] = 0.0
    cost_per_1m_in_cached: Annotated[
        float, Meta(description="USD per million tokens written to a cache.")
    ] = 0.0
    cost_per_1m_out_cached: Annotated[
        float, Meta(description="USD per million tokens read from a cache.")
    ] = 0.0
    context_window: Annotated[
        int,
        Meta(description="Context size in tokens; if 0, automatic summaries are off."),
    ] = 0
    default_max_tokens: Annotated[
        int, Meta(description="Maximum tokens of one answer, unless configured otherwise.")
    ] = 0
    can_reason: Annotated[bool, Meta(description="True if the model can reason.")] = False
    reasoning_levels: Annotated[
        list[str] | UnsetType, Meta(description="The reasoning efforts that the model supports.")
    ] = UNSET
    default_reasoning_effort: Annotated[
        str | UnsetType, Meta(description="The reasoning effort if none is configured.")
    ] = UNSET
    supports_attachments: Annotated[bool, Meta(description="True if the model accepts images.")] = (
        False
    )


class ProviderConfig(Struct, omit_defaults=True):
    id: Annotated[str, Meta(description="The provider's key in `providers`.")] = ""
    name: Annotated[str, Meta(description="The name shown to people.")] = ""
    type: Annotated[str, Meta(description="The API dialect; see docs/models.md.")] = ""
    base_url: Annotated[
        str, Meta(description="The URL of the API, without the path that the dialect appends.")
    ] = ""
    disable: Annotated[bool, Meta(description="Ignore this provider.")] = False
    flat_rate: Annotated[bool, Meta(description="Requests have no cost of their own.")] = False
    discover_models: Annotated[bool, Meta(description="Reserved; has no effect.")] = False
    models: Annotated[
        list[Model], Meta(description="Model entries; these take precedence over the catalog.")
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
    allowed_tools: Annotated[list[str], Meta(description="`tool` or `tool:action`.")] = field(
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


# --- request bodies; `scope` is 0 for the user's configuration, 1 for the workspace's


class SetConfig(Struct):
    """A value to set. `key` is a dotted path; a dot inside a name is written `\\.`."""

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
    """A provider's credentials. `kind` is the type of `api_key`: "string" or "oauth"."""

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
