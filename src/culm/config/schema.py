"""What may stand in a configuration file: culm's own and a Crush project's.

The names are those that clients are shown (`wire/config.py`), and beside them what is never
shown: keys, headers, commands. The published schema is made from these types.
"""

import re
from typing import Annotated, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from culm.settings import Settings
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
from culm.wire.rules import RULES_MAX, Rule
from culm.wire.runs import CrashPolicy, Limits

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"
HOOKS_MAX = 64  # For one event; each is a process before every call.
ROLES_MAX = 64  # Each is a line in what a model reads of the tool that starts agents.
OWN_TOOLS_MAX = 64  # A model that is offered more chooses worse.

Texts = dict[str, str]
# Whatever is wrong in such a part, all of it is left out: half a rule would say something else.
WHOLE = Meta(extra={"whole": True})


class ProviderFile(ProviderConfig):
    """A provider as people write it down. Holds its key: never shown, stored or logged."""

    def __repr__(self) -> str:
        return f"ProviderFile(id={self.id!r}, type={self.type!r}, …)"

    api_key: Annotated[
        str, Meta(description="The key, or a reference to it: `$NAME` or `$(command)`.")
    ] = ""
    extra_headers: Annotated[Texts, Meta(description="Sent with every request.")] = field(
        default_factory=Texts
    )
    extra_body: Annotated[
        dict[str, Json], Meta(description="Laid over the body of every request.")
    ] = field(default_factory=dict[str, Json])
    provider_options: Annotated[
        dict[str, Json], Meta(description="As extra_body, below what a selected model says.")
    ] = field(default_factory=dict[str, Json])
    system_prompt_prefix: Annotated[
        str, Meta(description="Put before the system prompt of its models.")
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
    timeout: int = 0  # Nanoseconds, as Go counts.


class ToolLimits(Struct):
    ls: LsLimits = field(default_factory=LsLimits)
    grep: SearchLimits = field(default_factory=SearchLimits)
    glob: SearchLimits = field(default_factory=SearchLimits)


def why_no_regex(text: str) -> str:
    """Why a text is no regular expression; empty if it is one."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        return f"it is no regular expression: {exc}"
    return ""


class Hook(Struct):
    command: Annotated[
        str, Meta(description="Run by `sh` in the workspace.", min_length=1, max_length=32_000)
    ]
    name: Annotated[str, Meta(description="What people call it.", max_length=200)] = ""
    matcher: Annotated[
        str,
        Meta(
            description="A regular expression for names of tools; empty means all.",
            max_length=1000,
            extra={"check": why_no_regex},
        ),
    ] = ""
    timeout: Annotated[int, Meta(description="Seconds; 30 if none are given.", ge=0, le=600)] = 0


class OwnTool(Struct):
    command: Annotated[
        str | list[str], Meta(description="Run by `sh` in the workspace, or a list: as it is.")
    ]
    description: Annotated[
        str, Meta(description="What the model is told of it.", min_length=1, max_length=4000)
    ]
    parameters: Annotated[
        dict[str, Json], Meta(description="A JSON schema of its arguments, an object.")
    ] = field(default_factory=dict[str, Json])
    timeout_s: Annotated[float, Meta(description="Then it is ended.", gt=0, le=3600)] = 60.0
    crash: Annotated[
        CrashPolicy,
        Meta(
            description="After a crash in a call: `again` is safe, `ask` has it checked first, "
            "`never` is not repeated."
        ),
    ] = "ask"
    parallel: Annotated[bool, Meta(description="Whether it may run beside other calls.")] = False
    is_free: Annotated[bool, Meta(description="Nobody is asked before it runs.")] = False


class RoleLimits(Limits):
    wall_s: Annotated[float, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0
    tokens: Annotated[int, Meta(ge=0)] = 0
    cost: Annotated[float, Meta(ge=0)] = 0


class AgentRole(Struct):
    """What an agent is started as: words it works by, and what narrows it."""

    description: Annotated[
        str, Meta(description="When to use it; shown to models.", max_length=500)
    ] = ""
    prompt: Annotated[str, Meta(description="Put behind the system prompt.", max_length=32_000)] = (
        ""
    )
    model: Annotated[
        str, Meta(description="`provider/model`, or `large` or `small`.", max_length=256)
    ] = ""
    tools: Annotated[
        list[str] | None, Meta(description="The only tools it may use; else those above it.")
    ] = None
    read_only: Annotated[bool, Meta(description="It may only look.")] = False
    limits: Annotated[
        RoleLimits, Meta(description="What it may use up: wall_s, steps, tokens, cost (USD).")
    ] = field(default_factory=RoleLimits)


# `$` alone would let a line end pass, and `\\Z` is not known to editors.
ToolName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$(?!\n)")]


class ProjectFile(Struct):
    """A project's configuration file, and all of the user's that is about agents."""

    schema: Annotated[str, Meta(description="For editors.")] = field(default="", name="$schema")
    models: Annotated[
        dict[ModelType, SelectedModel],
        Meta(description="Which model does large and which does small work."),
    ] = field(default_factory=dict[ModelType, SelectedModel])
    fallbacks: Annotated[
        dict[ModelType, list[SelectedModel]],
        Meta(description="Who is asked, in this order, when the selected model fails."),
    ] = field(default_factory=dict[ModelType, list[SelectedModel]])
    recent_models: dict[ModelType, list[SelectedModel]] = field(
        default_factory=dict[ModelType, list[SelectedModel]]
    )
    providers: Annotated[
        dict[str, ProviderFile], Meta(description="Who has models, and how to reach them.")
    ] = field(default_factory=dict[str, ProviderFile])
    options: Annotated[Options, Meta(description="How the agent and its clients behave.")] = field(
        default_factory=Options
    )
    permissions: Annotated[Permissions, Meta(description="Tools that need not ask.")] = field(
        default_factory=Permissions
    )
    mcp: dict[str, McpFile] = field(default_factory=dict[str, McpFile])
    lsp: dict[str, LspFile] = field(default_factory=dict[str, LspFile])
    tools: ToolLimits = field(default_factory=ToolLimits)
    permission_rules: Annotated[
        list[Annotated[Rule, WHOLE]],
        Meta(description="What is allowed, asked or denied.", max_length=RULES_MAX),
    ] = field(default_factory=list[Annotated[Rule, WHOLE]])
    hooks: Annotated[
        dict[str, Annotated[list[Annotated[Hook, WHOLE]], Meta(max_length=HOOKS_MAX)]],
        Meta(description="Commands that are asked before a tool is called: `PreToolUse`."),
    ] = field(default_factory=dict[str, list[Annotated[Hook, WHOLE]]])
    own_tools: Annotated[
        dict[ToolName, Annotated[OwnTool, WHOLE]],
        Meta(description="Commands that are tools.", max_length=OWN_TOOLS_MAX),
    ] = field(default_factory=dict[ToolName, Annotated[OwnTool, WHOLE]])
    roles: Annotated[
        dict[ToolName, Annotated[AgentRole, WHOLE]],
        Meta(description="What agents may be started as.", max_length=ROLES_MAX),
    ] = field(default_factory=dict[ToolName, Annotated[AgentRole, WHOLE]])
    env: Annotated[
        Texts, Meta(description="Variables for references and tools, over the environment.")
    ] = field(default_factory=Texts)


# The user's own file may also hold the settings of the server, beside all of the above.
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
    """The published schema of culm.json: what an editor checks and completes with."""
    schema = msgspec.json.schema(UserFile)
    for kind in schema["$defs"].values():
        kind["additionalProperties"] = False  # So that an editor marks what nobody knows.
    properties = schema["$defs"]["UserFile"]["properties"]
    for name in ("models", "fallbacks", "recent_models"):
        properties[name]["propertyNames"] = {"enum": list(get_args(ModelType))}
    return {"$schema": SCHEMA_URL, "title": "culm.json", **schema}
