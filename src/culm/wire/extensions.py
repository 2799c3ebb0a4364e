"""Skills, language servers and MCP servers, as sent to clients.

In MCP types a `client_id` is the name of the MCP server.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct, field

LspState = Literal[0, 1, 2, 3, 4, 5]  # Unstarted, starting, ready, error, stopped, disabled.
# A Crush client refuses the whole object if the state is any other string.
McpState = Literal["disabled", "starting", "connected", "error", "needs auth"]


class SkillState(Struct):
    name: str
    path: str
    state: Literal[0, 1] = 0  # Ok, error.
    error: str = ""


class SkillInfo(Struct):
    id: str
    name: str
    description: str
    label: str
    source: Literal["system", "user", "project"]
    user_invocable: bool


class ReadSkill(Struct):
    skill_id: str = ""


class SkillResult(Struct):
    name: str
    description: str
    source: str
    builtin: bool


class SkillContent(Struct):
    content: bytes
    result: SkillResult


class LspInfo(Struct):
    name: str
    state: LspState
    connected_at: datetime
    error: str = ""
    diagnostic_count: int = 0


class Position(Struct):
    line: int
    character: int


class Range(Struct):
    start: Position
    end: Position


class Diagnostic(Struct):
    range: Range
    severity: int
    message: str
    source: str = ""


class StartLsp(Struct):
    path: str = ""


class LspEvent(Struct):
    type: Literal["state_changed", "diagnostics_changed"]
    name: str
    state: LspState
    error: str = ""
    diagnostic_count: int = 0


class McpInfo(Struct):
    name: str
    state: McpState
    connected_at: datetime
    error: str = ""
    tool_count: int = 0
    prompt_count: int = 0
    resource_count: int = 0


class McpName(Struct):
    name: str = ""


class ReadResource(Struct):
    name: str = ""
    uri: str = ""


class Resource(Struct, omit_defaults=True):
    uri: str
    mime_type: str = ""
    text: str = ""
    blob: bytes = b""


class McpArgument(Struct):
    id: str
    title: str
    description: str = ""
    required: bool = False


class McpPrompt(Struct):
    id: str
    prompt_id: str
    client_id: str
    title: str = ""
    description: str = ""
    arguments: list[McpArgument] = field(default_factory=list[McpArgument])


class GetPrompt(Struct):
    client_id: str = ""
    prompt_id: str = ""
    args: dict[str, str] = field(default_factory=dict[str, str])


class PromptText(Struct):
    prompt: str


class PendingAuth(Struct):
    name: str
    url: str


class AuthUrl(Struct, omit_defaults=True):
    auth_url: str = ""


class McpEvent(Struct):
    type: Literal[
        "state_changed", "tools_list_changed", "prompts_list_changed", "resources_list_changed"
    ]
    name: str
    state: McpState
    error: str = ""
    tool_count: int = 0
