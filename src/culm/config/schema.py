"""The schema of configuration files: culm's own, and those of Crush projects.

It extends the types that are sent to clients (`wire/config.py`) with fields that are never sent:
keys, headers, commands. The published JSON schema is generated from these types.
"""

import re
from typing import Annotated, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from culm.settings import Settings
from culm.wire.asks import RULES_MAX, Rule
from culm.wire.codec import Json
from culm.wire.config import (
    LspConfig,
    McpConfig,
    ModelType,
    Options,
    Permissions,
    ProviderConfig,
    SelectedModel,
)
from culm.wire.runs import CrashPolicy, Limits

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"
HOOKS_MAX = 64  # For one event; each starts a process before every call.
ROLES_MAX = 64  # Each is a line in the description of the tool that starts agents.
OWN_TOOLS_MAX = 64  # Models choose worse among more tools.

Texts = dict[str, str]
# An error in such a part drops all of it: half a rule would have another meaning.
WHOLE = Meta(extra={"whole": True})


class ProviderFile(ProviderConfig):
    """A provider in a configuration file. It holds the key, so it is never sent or logged."""

    def __repr__(self) -> str:
        return f"ProviderFile(id={self.id!r}, type={self.type!r}, …)"

    api_key: Annotated[
        str, Meta(description="The key, or a reference to it: `$NAME` or `$(command)`.")
    ] = ""
    extra_headers: Annotated[Texts, Meta(description="Sent with every request.")] = field(
        default_factory=Texts
    )
    extra_body: Annotated[
        dict[str, Json], Meta(description="Merged into the body of every request.")
    ] = field(default_factory=dict[str, Json])
    provider_options: Annotated[
        dict[str, Json],
        Meta(description="Like extra_body; options of a selected model take precedence."),
    ] = field(default_factory=dict[str, Json])
    system_prompt_prefix: Annotated[
        str, Meta(description="Text before the system prompt of its models.")
    ] = ""
    oauth: Annotated[dict[str, Json], Meta(description="A token of a Crush client; not used.")] = (
        field(default_factory=dict[str, Json])
    )
    aws_auth_refresh: Annotated[str, Meta(description="Accepted and not used.")] = ""


class McpFile(McpConfig):
    command: str = ""
    args: list[str] = field(default_factory=list[str])
    env: Texts = field(default_factory=Texts)
    url: str = ""
    headers: Texts = field(default_factory=Texts)
    oauth: bool = False
    oauth_client_id: str = ""
    oauth_client_secret: str = ""
    oauth_callback_port: int = 0
    oauth_token: dict[str, Json] = field(default_factory=dict[str, Json])


class LspFile(LspConfig):
    args: list[str] = field(default_factory=list[str])
    env: Texts = field(default_factory=Texts)
    init_options: dict[str, Json] = field(default_factory=dict[str, Json])
    options: dict[str, Json] = field(default_factory=dict[str, Json])


class LsLimits(Struct):
    max_depth: int = 0
    max_items: int = 0


class SearchLimits(Struct):
    timeout: int = 0  # Nanoseconds, as in Go.


class ToolLimits(Struct):
    ls: LsLimits = field(default_factory=LsLimits)
    grep: SearchLimits = field(default_factory=SearchLimits)
    glob: SearchLimits = field(default_factory=SearchLimits)


def regex_problem(text: str) -> str:
    """The reason why a regular expression is invalid, or an empty string."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        return f"invalid regular expression: {exc}"
    return ""


class Hook(Struct):
    command: Annotated[
        str, Meta(description="Run by `sh` in the workspace.", min_length=1, max_length=32_000)
    ]
    name: Annotated[str, Meta(description="The name shown to people.", max_length=200)] = ""
    matcher: Annotated[
        str,
        Meta(
            description="A regular expression for tool names; empty means all tools.",
            max_length=1000,
            extra={"check": regex_problem},
        ),
    ] = ""
    timeout: Annotated[int, Meta(description="Seconds; 0 means 30.", ge=0, le=600)] = 0


class OwnTool(Struct):
    command: Annotated[
        str | list[str],
        Meta(description="Run in the workspace: a string by `sh`, a list as program arguments."),
    ]
    description: Annotated[
        str, Meta(description="The description for the model.", min_length=1, max_length=4000)
    ]
    parameters: Annotated[
        dict[str, Json], Meta(description="The JSON schema of its arguments, an object.")
    ] = field(default_factory=dict[str, Json])
    timeout_s: Annotated[
        float, Meta(description="The time after which it is stopped.", gt=0, le=3600)
    ] = 60.0
    crash: Annotated[
        CrashPolicy,
        Meta(
            description="After a server crash during a call: `again` to repeat it, `ask` to check "
            "first if it took effect, `never` not to repeat it."
        ),
    ] = "ask"
    parallel: Annotated[bool, Meta(description="Allow it to run in parallel with other calls.")] = (
        False
    )
    is_free: Annotated[bool, Meta(description="Run it without a permission request.")] = False


class RoleLimits(Limits):
    wall_s: Annotated[float, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0
    tokens: Annotated[int, Meta(ge=0)] = 0
    cost: Annotated[float, Meta(ge=0)] = 0


class AgentRole(Struct):
    """A role for sub-agents: additional instructions and restrictions."""

    description: Annotated[
        str, Meta(description="When to use it; shown to models.", max_length=500)
    ] = ""
    prompt: Annotated[str, Meta(description="Text after the system prompt.", max_length=32_000)] = (
        ""
    )
    model: Annotated[
        str, Meta(description="`provider/model`, or `large` or `small`.", max_length=256)
    ] = ""
    tools: Annotated[
        list[str] | None,
        Meta(description="The only tools it may use; by default those of the agent above it."),
    ] = None
    read_only: Annotated[bool, Meta(description="Allow only tools that change nothing.")] = False
    limits: Annotated[
        RoleLimits, Meta(description="Limits: wall_s, steps, tokens, cost (USD).")
    ] = field(default_factory=RoleLimits)


# `$` alone would accept a final line break, and editors do not know `\\Z`.
ToolName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$(?!\n)")]


class ProjectFile(Struct):
    """The configuration file of a project, and the part of the user's file that is not settings."""

    schema: Annotated[str, Meta(description="For editors.")] = field(default="", name="$schema")
    models: Annotated[
        dict[ModelType, SelectedModel],
        Meta(description="The models for large and for small tasks."),
    ] = field(default_factory=dict[ModelType, SelectedModel])
    fallbacks: Annotated[
        dict[ModelType, list[SelectedModel]],
        Meta(description="Models to try, in this order, when the selected model fails."),
    ] = field(default_factory=dict[ModelType, list[SelectedModel]])
    recent_models: dict[ModelType, list[SelectedModel]] = field(
        default_factory=dict[ModelType, list[SelectedModel]]
    )
    providers: Annotated[
        dict[str, ProviderFile], Meta(description="Providers of models, and their addresses.")
    ] = field(default_factory=dict[str, ProviderFile])
    options: Annotated[Options, Meta(description="Options of the agent and its clients.")] = field(
        default_factory=Options
    )
    permissions: Annotated[
        Permissions, Meta(description="Tools that run without a permission request.")
    ] = field(default_factory=Permissions)
    mcp: dict[str, McpFile] = field(default_factory=dict[str, McpFile])
    lsp: dict[str, LspFile] = field(default_factory=dict[str, LspFile])
    tools: ToolLimits = field(default_factory=ToolLimits)
    permission_rules: Annotated[
        list[Annotated[Rule, WHOLE]],
        Meta(description="Rules that allow, ask about or deny calls.", max_length=RULES_MAX),
    ] = field(default_factory=list[Annotated[Rule, WHOLE]])
    hooks: Annotated[
        dict[str, Annotated[list[Annotated[Hook, WHOLE]], Meta(max_length=HOOKS_MAX)]],
        Meta(description="Commands that run before a tool call: `PreToolUse`."),
    ] = field(default_factory=dict[str, list[Annotated[Hook, WHOLE]]])
    own_tools: Annotated[
        dict[ToolName, Annotated[OwnTool, WHOLE]],
        Meta(description="Commands that agents can call as tools.", max_length=OWN_TOOLS_MAX),
    ] = field(default_factory=dict[ToolName, Annotated[OwnTool, WHOLE]])
    roles: Annotated[
        dict[ToolName, Annotated[AgentRole, WHOLE]],
        Meta(description="Roles for sub-agents.", max_length=ROLES_MAX),
    ] = field(default_factory=dict[ToolName, Annotated[AgentRole, WHOLE]])
    env: Annotated[
        Texts,
        Meta(description="Variables for references and tools, in addition to the environment."),
    ] = field(default_factory=Texts)


# The user's own file may also contain the settings of the server.
UserFile = msgspec.defstruct(
    "UserFile",
    [
        (name, hint, getattr(Settings(), name))
        for name, hint in get_type_hints(Settings, include_extras=True).items()
    ],
    bases=(ProjectFile,),
    kw_only=True,
)


def json_schema() -> dict[str, Json]:
    """The published JSON schema of culm.json, for checks and completion in editors."""
    schema = msgspec.json.schema(UserFile)
    for kind in schema["$defs"].values():
        kind["additionalProperties"] = False  # So that editors mark unknown keys.
    properties = schema["$defs"]["UserFile"]["properties"]
    for name in ("models", "fallbacks", "recent_models"):
        properties[name]["propertyNames"] = {"enum": list(get_args(ModelType))}
    return {"$schema": SCHEMA_URL, "title": "culm.json", **schema}
