"""A workspace, its configuration and its agent, as every client reads them."""

import msgspec
from msgspec import Raw, Struct

from culm.ids import WorkspaceId


class TuiOptions(Struct):
    compact_mode: bool = False


class Options(Struct):
    """A Crush client dereferences `tui` without looking, so it is always an object."""

    data_directory: str
    debug: bool = False
    tui: TuiOptions = msgspec.field(default_factory=TuiOptions)
    # The client must neither report usage elsewhere nor consult a model catalogue of its own.
    disable_metrics: bool = True
    disable_provider_auto_update: bool = True
    disable_default_providers: bool = True
    initialize_as: str = "AGENTS.md"


class SelectedModel(Struct):
    model: str = ""
    provider: str = ""


class Config(Struct):
    """`options` and `providers` must be objects, or a Crush client panics."""

    options: Options
    models: dict[str, SelectedModel] = msgspec.field(default_factory=dict[str, SelectedModel])
    providers: dict[str, Raw] = msgspec.field(default_factory=dict[str, Raw])
    mcp: dict[str, Raw] = msgspec.field(default_factory=dict[str, Raw])
    lsp: dict[str, Raw] = msgspec.field(default_factory=dict[str, Raw])


class Workspace(Struct):
    """`env` is never sent back: it holds the user's secrets."""

    id: WorkspaceId
    path: str
    config: Config
    data_dir: str = ""
    version: str = ""
    yolo: bool = False
    debug: bool = False
    channels: list[str] = msgspec.field(default_factory=list[str])


class Model(Struct):
    id: str = ""
    name: str = ""
    cost_per_1m_in: float = 0.0
    cost_per_1m_out: float = 0.0
    cost_per_1m_in_cached: float = 0.0
    cost_per_1m_out_cached: float = 0.0
    context_window: int = 0
    default_max_tokens: int = 0
    can_reason: bool = False
    supports_attachments: bool = False


class AgentInfo(Struct):
    is_busy: bool = False
    is_ready: bool = False
    model: Model = msgspec.field(default_factory=Model)
    model_cfg: SelectedModel = msgspec.field(default_factory=SelectedModel)


class VersionInfo(Struct):
    """`go_version` is what the client calls the runtime; ours is Python's."""

    version: str
    commit: str
    build_id: str
    go_version: str
    platform: str
