"""MCP servers: their state, prompts and resources. Here a `client_id` is the server's name."""

from datetime import datetime
from typing import Literal

from msgspec import Struct, field

# A Crush client refuses the whole object on any other word.
McpState = Literal["disabled", "starting", "connected", "error", "needs auth"]


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
