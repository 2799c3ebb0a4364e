"""The configuration as every client reads it, and the bodies that change it.

What is shown has no field for a provider's key or token, for headers or for an environment, so
they cannot be sent by mistake. A Crush client dereferences `options`, `options.tui` and
`providers` without looking, so they are always objects.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from culm.wire.codec import Json

ModelType = Literal["large", "small"]


class Completions(Struct, omit_defaults=True):
    max_depth: Annotated[int, Meta(description="How deep completions of paths look.")] = 0
    max_items: Annotated[int, Meta(description="How many there are at most.")] = 0


class TuiOptions(Struct, omit_defaults=True):
    compact_mode: Annotated[bool, Meta(description="A compact display.")] = False
    diff_mode: Annotated[str, Meta(description="`unified` or `split`.")] = ""
    completions: Annotated[Completions, Meta(description="Bounds of completions.")] = field(
        default_factory=Completions
    )
    transparent: Annotated[bool, Meta(description="A background that shows through.")] = False
    scrollbar: Annotated[str, Meta(description="`default`, `always` or `never`.")] = ""


class Attribution(Struct, omit_defaults=True):
    trailer_style: Annotated[
        str, Meta(description="`none`, `co-authored-by` or `assisted-by`.")
    ] = ""
    co_authored_by: Annotated[bool, Meta(description="The older way to say that.")] = False
    generated_with: Annotated[
        bool, Meta(description="Whether commits say what they were made with.")
    ] = False


class Options(Struct):
    data_directory: Annotated[str, Meta(description="Where the data is; the server says so.")] = ""
    debug: Annotated[bool, Meta(description="Whether the client asked for details.")] = False
    tui: Annotated[TuiOptions, Meta(description="The display.")] = field(default_factory=TuiOptions)
    disable_metrics: Annotated[
        bool, Meta(description="Always true: no client of ours reports elsewhere.")
    ] = True
    disable_provider_auto_update: Annotated[bool, Meta(description="Always true.")] = True
    disable_default_providers: Annotated[
        bool, Meta(description="Always true: what there is, is what is shown.")
    ] = True
    initialize_as: Annotated[
        str, Meta(description="The file that an agent writes about a project.")
    ] = "AGENTS.md"
    context_paths: Annotated[
        list[str] | UnsetType,
        Meta(description="Files, or folders of them, that agents read beside the usual ones."),
    ] = UNSET
    global_context_paths: Annotated[
        list[str] | UnsetType,
        Meta(description="The same, wherever they are; not in a project's file."),
    ] = UNSET
    skills_paths: Annotated[list[str] | UnsetType, Meta(description="Kept for later.")] = UNSET
    disabled_skills: Annotated[list[str] | UnsetType, Meta(description="Kept for later.")] = UNSET
    disabled_tools: Annotated[
        list[str] | UnsetType, Meta(description="Tools that no agent is offered.")
    ] = UNSET
    disable_auto_summarize: Annotated[
        bool | UnsetType, Meta(description="Long conversations are not summarized by themselves.")
    ] = UNSET
    attribution: Annotated[Attribution | UnsetType, Meta(description="What commits say.")] = UNSET
    debug_lsp: Annotated[bool | UnsetType, Meta(description="Kept for later.")] = UNSET
    auto_lsp: Annotated[bool | UnsetType, Meta(description="Kept for later.")] = UNSET
    progress: Annotated[
        bool | UnsetType, Meta(description="Whether a terminal shows progress.")
    ] = UNSET
    notifications: Annotated[
        str | UnsetType, Meta(description="`auto`, `native`, `osc`, `bell` or `disabled`.")
    ] = UNSET


class SelectedModel(Struct):
    """Which model of which provider, and how it is to be asked."""

    model: Annotated[str, Meta(description="Its id.")] = ""
    provider: Annotated[str, Meta(description="The id of its provider.")] = ""
    reasoning_effort: Annotated[
        str | UnsetType, Meta(description="How hard it thinks, in the provider's words.")
    ] = UNSET
    think: Annotated[
        bool | UnsetType, Meta(description="Whether it thinks aloud before it answers.")
    ] = UNSET
    max_tokens: Annotated[int | UnsetType, Meta(description="Of one answer.")] = UNSET
    temperature: Annotated[float | UnsetType, Meta(description="As the provider has it.")] = UNSET
    top_p: Annotated[float | UnsetType, Meta(description="As the provider has it.")] = UNSET
    top_k: Annotated[int | UnsetType, Meta(description="As the provider has it.")] = UNSET
    frequency_penalty: Annotated[float | UnsetType, Meta(description="As the provider has it.")] = (
        UNSET
    )
    presence_penalty: Annotated[float | UnsetType, Meta(description="As the provider has it.")] = (
        UNSET
    )
    provider_options: Annotated[
        dict[str, Json] | UnsetType, Meta(description="Laid over the body of its requests.")
    ] = UNSET


class Model(Struct):
    """One entry of a catalogue."""

    id: Annotated[str, Meta(description="What the provider calls it.")] = ""
    name: Annotated[str, Meta(description="What people call it.")] = ""
    cost_per_1m_in: Annotated[float, Meta(description="USD for a million tokens read.")] = 0.0
    cost_per_1m_out: Annotated[float, Meta(description="USD for a million tokens written.")] = 0.0
    cost_per_1m_in_cached: Annotated[
        float, Meta(description="USD for a million tokens put into a cache.")
    ] = 0.0
    cost_per_1m_out_cached: Annotated[
        float, Meta(description="USD for a million tokens read from a cache.")
    ] = 0.0
    context_window: Annotated[
        int,
        Meta(description="Tokens it can read at once; without it nothing is summarized by itself."),
    ] = 0
    default_max_tokens: Annotated[
        int, Meta(description="Of one answer, where nobody says otherwise.")
    ] = 0
    can_reason: Annotated[bool, Meta(description="Whether it can think aloud.")] = False
    reasoning_levels: Annotated[
        list[str] | UnsetType, Meta(description="The efforts it knows.")
    ] = UNSET
    default_reasoning_effort: Annotated[
        str | UnsetType, Meta(description="The one it has by itself.")
    ] = UNSET
    supports_attachments: Annotated[bool, Meta(description="Whether it sees images.")] = False


class ProviderConfig(Struct, omit_defaults=True):
    id: Annotated[str, Meta(description="As it is named here; repeated for clients.")] = ""
    name: Annotated[str, Meta(description="What people call it.")] = ""
    type: Annotated[str, Meta(description="The dialect it speaks; see docs/models.md.")] = ""
    base_url: Annotated[str, Meta(description="Where it is, up to what the dialect adds.")] = ""
    disable: Annotated[bool, Meta(description="As if it were not there.")] = False
    flat_rate: Annotated[bool, Meta(description="Its answers cost nothing extra.")] = False
    discover_models: Annotated[bool, Meta(description="Kept for later.")] = False
    models: Annotated[
        list[Model], Meta(description="What is known of its models, over the catalogue.")
    ] = field(default_factory=list[Model])


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
