"""The types of the Crush wire as its client declares them, and the response type of each route.

Written from crush-wire §5, 7, 8, 9, 10, not from `culm.wire`. The assignment of values is in
`golang.py`; the routes and events that use the types are at the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tests.crush_client.config_types import (
    ANY,
    ANY_MAP,
    BOOL,
    BYTES,
    CONFIG,
    FLOAT,
    INT,
    MODEL,
    OAUTH_TOKEN,
    SELECTED_MODEL,
    STR,
    TEXT_MAP,
    TEXTS,
    TIME,
    UINT32,
)
from tests.crush_client.config_types import Panic as Panic
from tests.crush_client.config_types import check_config as check_config
from tests.crush_client.config_types import is_configured as is_configured
from tests.crush_client.golang import (
    Decoded,
    Faults,
    GoType,
    Map,
    Ptr,
    Raw,
    RawValue,
    Record,
    Slice,
    Struct,
    fill,
    record,
    records,
)
from tests.crush_client.syntax import DecodeError, Node, Text

# --- the other shared types (§5, 6)

SKILL_STATE = Struct("SkillState", {"name": STR, "path": STR, "state": INT, "error?": STR})
WORKSPACE = Struct(
    "proto.Workspace",
    {"id": STR, "path": STR, "yolo?": BOOL, "debug?": BOOL, "data_dir?": STR, "version?": STR}
    | {"client_id?": STR, "config?": Ptr(CONFIG), "env?": TEXTS, "channels?": TEXTS}
    | {"skills?": Slice(SKILL_STATE)},
)
VERSION_INFO = Struct(
    "VersionInfo",
    {"version": STR, "commit": STR, "build_id": STR, "go_version": STR, "platform": STR},
)
ERROR = Struct("proto.Error", {"message": STR})
TODO = Struct("Todo", {"content": STR, "status": STR, "active_form": STR})
_SESSION = {
    "id": STR,
    "parent_session_id": STR,
    "title": STR,
    "message_count": INT,
    "prompt_tokens": INT,
    "completion_tokens": INT,
    "summary_message_id": STR,
    "cost": FLOAT,
    "todos?": Slice(TODO),
    "created_at": INT,
    "updated_at": INT,
    "is_busy": BOOL,
    "attached_clients": INT,
}
SESSION = Struct("proto.Session", _SESSION)
AGENT_SESSION = Struct("proto.AgentSession", _SESSION)
AGENT_INFO = Struct(
    "AgentInfo", {"is_busy": BOOL, "is_ready": BOOL, "model": MODEL, "model_cfg": SELECTED_MODEL}
)
FILE = Struct(
    "proto.File",
    {"id": STR, "session_id": STR, "path": STR, "content": STR, "version": INT}
    | {"created_at": INT, "updated_at": INT},
)
SHELL_RESPONSE = Struct("ShellCommandResponse", {"output": STR, "exit_code": INT})
LSP_CLIENT_INFO = Struct(
    "LSPClientInfo",
    {"name": STR, "state": INT, "error?": STR, "diagnostic_count?": INT, "connected_at": TIME},
)
_POSITION = Struct("Position", {"line": UINT32, "character": UINT32})
_RANGE = Struct("Range", {"start": _POSITION, "end": _POSITION})
DIAGNOSTIC = Struct(
    "Diagnostic",
    {"range": _RANGE, "severity?": UINT32, "code?": ANY, "source?": STR, "message": STR},
)
SKILL_INFO = Struct(
    "SkillInfo",
    {"id": STR, "name": STR, "description": STR, "label": STR, "source": STR}
    | {"user_invocable": BOOL},
)
PROVIDER = Struct(
    "catwalk.Provider",
    {"name": STR, "id": STR, "api_key?": STR, "api_endpoint?": STR, "type?": STR}
    | {"default_large_model_id?": STR, "default_small_model_id?": STR, "models?": Slice(MODEL)}
    | {"default_headers?": TEXT_MAP},
)
MCP_STATES = ("disabled", "starting", "connected", "error", "needs auth")


@dataclass(frozen=True, slots=True)
class McpState:
    """An enum with its own UnmarshalText: an unknown word ends the decode."""

    def zero(self) -> object:
        return MCP_STATES[0]

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if isinstance(node, Text):
            if node.text in MCP_STATES:
                return node.text
            faults.abort(DecodeError("custom", f"unknown mcp state: {node.text}"))
        elif node is not None:
            faults.mismatch(node, "mcp.State")
        return old


MCP_CLIENT_INFO = Struct(
    "MCPClientInfo",
    {"name": STR, "state": McpState(), "error?": STR, "tool_count?": INT, "prompt_count?": INT}
    | {"resource_count?": INT, "connected_at": TIME},
)
_ARGUMENT = Struct("MCPArgument", {"id": STR, "title": STR, "description?": STR, "required?": BOOL})
MCP_PROMPT = Struct(
    "MCPPrompt",
    {"id": STR, "title?": STR, "description?": STR, "prompt_id": STR, "client_id": STR}
    | {"arguments?": Slice(_ARGUMENT)},
)
RESOURCE = Struct("ResourceContents", {"uri": STR, "mime_type?": STR, "text?": STR, "blob?": BYTES})
PENDING_AUTH = Struct("MCPPendingAuth", {"name": STR, "url": STR})
SKILL_CONTENT = Struct(
    "ReadSkillResponse",
    {
        "content": BYTES,
        "result": Struct(
            "SkillReadResult", {"name": STR, "description": STR, "source": STR, "builtin": BOOL}
        ),
    },
)
COPILOT = Struct("ImportCopilotResponse", {"token": Ptr(OAUTH_TOKEN), "success": BOOL})
RESOLVED = Struct("Resolved", {"resolved": BOOL})
SKIP = Struct("Skip", {"skip": BOOL})
EMPTY = Struct("Empty", {})

# --- messages (§8)

PARTS = {
    "text": Struct("TextContent", {"text": STR}),
    "reasoning": Struct(
        "ReasoningContent",
        {"thinking": STR, "signature": STR, "started_at?": INT, "finished_at?": INT},
    ),
    "image_url": Struct("ImageURLContent", {"url": STR, "detail?": STR}),
    "binary": Struct("BinaryContent", {"Path": STR, "MIMEType": STR, "Data": BYTES}),
    "tool_call": Struct(
        "ToolCall", {"id": STR, "name": STR, "input": STR, "type?": STR, "finished?": BOOL}
    ),
    "tool_result": Struct(
        "ToolResult",
        {"tool_call_id": STR, "name": STR, "content": STR, "data?": STR, "mime_type?": STR}
        | {"metadata": STR, "is_error": BOOL},
    ),
    "finish": Struct("Finish", {"reason": STR, "time": INT, "message?": STR, "details?": STR}),
    "shell_command": Struct("ShellCommand", {"command": STR, "output": STR, "exit_code": INT}),
}
_PART = Struct("partWrapper", {"type": STR, "data": Raw()})
_MESSAGE = Struct(
    "proto.Message",
    {"id": STR, "role": STR, "session_id": STR, "parts": Raw(), "model": STR, "provider": STR}
    | {"created_at": INT, "updated_at": INT, "is_summary_message?": BOOL},
)


@dataclass(frozen=True, slots=True)
class Message:
    """Decodes itself: without `parts`, or with one of unknown type, it fails and has no parts."""

    def zero(self) -> object:
        return _MESSAGE.zero()

    def load(self, node: Node, old: object, faults: Faults) -> object:
        mine = Faults()
        message = record(_MESSAGE.load(node, old, mine))
        raw = _take(message, "parts")
        if mine.error is None:
            parts = _parts(raw)
            mine.error, message.values["parts"] = parts.error, parts.value
        if mine.error is not None:
            faults.abort(mine.error)
        return message


def _take(message: Record, name: str) -> object:
    value, message.values[name] = message.values[name], None
    return value


def _parts(raw: object) -> Decoded:
    if not isinstance(raw, RawValue):
        return Decoded(None, DecodeError("custom", "unexpected end of JSON input"))
    wrappers = fill(raw.node, Slice(_PART))
    if wrappers.error is not None or wrappers.value is None:
        return Decoded(None, wrappers.error)
    parts: list[object] = []
    for wrapper in records(wrappers.value):
        kind, data = PARTS.get(wrapper.text("type")), wrapper.values["data"]
        if kind is None:
            text = f"unknown part type: {wrapper.text('type')}"
            return Decoded(None, DecodeError("custom", text))
        if not isinstance(data, RawValue):
            return Decoded(None, DecodeError("custom", "unexpected end of JSON input"))
        part = fill(data.node, kind)
        if part.error is not None:
            return Decoded(None, part.error)
        parts.append(part.value)
    return Decoded(parts, None)


MESSAGE = Message()


def part_type(part: Record) -> str:
    """The type discriminator of a part."""
    return next(name for name, kind in PARTS.items() if kind is part.kind)


# --- permissions and questions (§9, 10)

_WRITE = {"file_path": STR, "old_content?": STR, "new_content?": STR}
PERMISSION_PARAMS: dict[str, Struct] = {
    "bash": Struct(
        "BashPermissionsParams",
        {"description": STR, "command": STR, "working_dir": STR, "run_in_background": BOOL}
        | {"auto_background_after": INT},
    ),
    "edit": Struct("EditPermissionsParams", _WRITE),
    "write": Struct("WritePermissionsParams", _WRITE),
    "multiedit": Struct("MultiEditPermissionsParams", _WRITE),
    "view": Struct("ViewPermissionsParams", {"file_path": STR, "offset": INT, "limit": INT}),
    "ls": Struct("LSPermissionsParams", {"path": STR, "ignore": TEXTS, "depth": INT}),
    "download": Struct(
        "DownloadPermissionsParams", {"url": STR, "file_path": STR, "timeout?": INT}
    ),
    "fetch": Struct("FetchPermissionsParams", {"url": STR, "format": STR, "timeout?": INT}),
    "agentic_fetch": Struct("AgenticFetchPermissionsParams", {"url?": STR, "prompt": STR}),
}
_PERMISSION = Struct(
    "proto.PermissionRequest",
    {"id": STR, "session_id": STR, "tool_call_id": STR, "tool_name": STR, "description": STR}
    | {"action": STR, "params": Raw(), "path": STR},
)


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """Decodes itself: `params` go into the struct of the tool, else into a map."""

    def zero(self) -> object:
        return _PERMISSION.zero()

    def load(self, node: Node, old: object, faults: Faults) -> object:
        mine = Faults()
        request = record(_PERMISSION.load(node, old, mine))
        raw = _take(request, "params")
        if mine.error is None and isinstance(raw, RawValue) and raw.node is not None:
            params = fill(raw.node, PERMISSION_PARAMS.get(request.text("tool_name"), ANY_MAP))
            mine.error = params.error
            if params.error is None:
                request.values["params"] = params.value
        if mine.error is not None:
            faults.abort(mine.error)
        return request


PERMISSION_REQUEST = PermissionRequest()
PERMISSION_NOTIFICATION = Struct(
    "PermissionNotification", {"tool_call_id": STR, "granted": BOOL, "denied": BOOL}
)
QUESTION_CHOICE = Struct("QuestionChoice", {"id": STR, "label": STR, "description?": STR})
QUESTION_ITEM = Struct(
    "QuestionItem",
    {"id": STR, "type": STR, "label?": STR, "question": STR, "description?": STR}
    | {"choices?": Slice(QUESTION_CHOICE)},
)
QUESTION_REQUEST = Struct(
    "QuestionRequest",
    {"id": STR, "session_id": STR, "tool_call_id": STR, "questions": Slice(QUESTION_ITEM)}
    | {"confirm_title?": STR, "confirm_description?": STR},
)

# --- events (§7)

ENVELOPE = Struct("pubsub.Payload", {"type": STR, "payload": Raw()})
AGENT_EVENT = Struct(
    "AgentEvent",
    {"type": STR, "message": MESSAGE, "error?": STR, "run_id?": STR, "session_id?": STR}
    | {"session_title?": STR, "progress?": STR, "done?": BOOL}
    | {"aws_sso_command?": STR, "aws_sso_url?": STR},
)
EVENT_PAYLOADS: dict[str, GoType] = {
    "message": MESSAGE,
    "session": SESSION,
    "file": FILE,
    "permission_request": PERMISSION_REQUEST,
    "permission_notification": PERMISSION_NOTIFICATION,
    "question_batch_request": QUESTION_REQUEST,
    "question_batch_notification": Struct("QuestionBatchNotification", {"batch_id": STR}),
    "agent_event": AGENT_EVENT,
    "run_complete": Struct(
        "RunComplete",
        {"session_id": STR, "run_id?": STR, "message_id": STR, "text?": STR, "error?": STR}
        | {"cancelled?": BOOL},
    ),
    "config_changed": Struct("ConfigChanged", {"workspace_id": STR}),
    "lsp_event": Struct(
        "LSPEvent",
        {"type": STR, "name": STR, "state": INT, "error?": STR, "diagnostic_count?": INT},
    ),
    "mcp_event": Struct(
        "MCPEvent",
        {"type": STR, "name": STR, "state": McpState(), "error?": STR, "tool_count?": INT}
        | {"prompt_count?": INT, "resource_count?": INT},
    ),
    "skills_event": Struct("SkillsEvent", {"states": Slice(SKILL_STATE)}),
    "update_available": Struct(
        "UpdateAvailable", {"current_version": STR, "latest_version": STR, "is_development": BOOL}
    ),
}


def event_type(payload: str) -> Struct:
    """The inner event of an outer type: operation and payload."""
    return Struct(f"Event[{payload}]", {"type": STR, "payload": EVENT_PAYLOADS[payload]})


# --- routes (§4)


class Route(NamedTuple):
    method: str
    path: str
    answer: GoType | None  # None: an empty body. Route 12 is the stream.


_W = "/v1/workspaces/{id}"
_S = f"{_W}/sessions/{{sid}}"
_A = f"{_W}/agent"
_AS = f"{_A}/sessions/{{sid}}"
_MESSAGES = Slice(MESSAGE)


def _one(name: str, kind: GoType) -> Struct:
    return Struct(name, {name: kind})


def _is_file_uri(key: str) -> bool:
    return key.startswith("file://")


ROUTE_ANSWERS: dict[int, Route] = {
    1: Route("GET", "/v1/health", None),
    2: Route("GET", "/v1/version", VERSION_INFO),
    3: Route("GET", "/v1/config", EMPTY),
    4: Route("POST", "/v1/control", None),
    5: Route("DELETE", "/v1/clients/{client_id}", None),
    6: Route("GET", "/v1/workspaces", Slice(WORKSPACE)),
    7: Route("POST", "/v1/workspaces", WORKSPACE),
    8: Route("DELETE", _W, None),
    9: Route("GET", _W, WORKSPACE),
    10: Route("POST", f"{_W}/current-session", None),
    11: Route("GET", f"{_W}/config", CONFIG),
    12: Route("GET", f"{_W}/events", None),
    13: Route("GET", f"{_W}/providers", Slice(PROVIDER)),
    14: Route("GET", f"{_W}/sessions", Slice(SESSION)),
    15: Route("POST", f"{_W}/sessions", SESSION),
    16: Route("GET", _S, SESSION),
    17: Route("PUT", _S, SESSION),
    18: Route("DELETE", _S, None),
    19: Route("GET", f"{_S}/history", Slice(FILE)),
    20: Route("GET", f"{_S}/messages", _MESSAGES),
    21: Route("GET", f"{_S}/messages/user", _MESSAGES),
    22: Route("GET", f"{_W}/messages/user", _MESSAGES),
    23: Route("GET", f"{_S}/filetracker/files", TEXTS),
    24: Route("POST", f"{_W}/filetracker/read", None),
    25: Route("GET", f"{_W}/filetracker/lastread", TIME),
    26: Route("GET", f"{_W}/lsps", Map(LSP_CLIENT_INFO)),
    27: Route("GET", f"{_W}/lsps/{{lsp}}/diagnostics", Map(Slice(DIAGNOSTIC), _is_file_uri)),
    28: Route("POST", f"{_W}/lsps/start", None),
    29: Route("POST", f"{_W}/lsps/stop", None),
    30: Route("GET", f"{_W}/permissions/skip", SKIP),
    31: Route("POST", f"{_W}/permissions/skip", None),
    32: Route("POST", f"{_W}/permissions/grant", RESOLVED),
    33: Route("POST", f"{_W}/questions/answer", RESOLVED),
    34: Route("POST", f"{_W}/questions/cancel", RESOLVED),
    35: Route("GET", _A, AGENT_INFO),
    36: Route("POST", _A, None),
    37: Route("POST", f"{_A}/init", None),
    38: Route("POST", f"{_A}/update", None),
    39: Route("GET", _AS, AGENT_SESSION),
    40: Route("POST", f"{_AS}/cancel", None),
    41: Route("GET", f"{_AS}/prompts/queued", INT),
    42: Route("GET", f"{_AS}/prompts/list", TEXTS),
    43: Route("POST", f"{_AS}/prompts/clear", None),
    44: Route("POST", f"{_AS}/summarize", None),
    45: Route("POST", f"{_AS}/shell", SHELL_RESPONSE),
    46: Route("GET", f"{_A}/default-small-model", SELECTED_MODEL),
    47: Route("POST", f"{_W}/config/set", None),
    48: Route("POST", f"{_W}/config/remove", None),
    49: Route("POST", f"{_W}/config/model", None),
    50: Route("POST", f"{_W}/config/compact", None),
    51: Route("POST", f"{_W}/config/provider-key", None),
    52: Route("POST", f"{_W}/config/import-copilot", COPILOT),
    53: Route("POST", f"{_W}/config/refresh-oauth", None),
    54: Route("GET", f"{_W}/project/needs-init", _one("needs_init", BOOL)),
    55: Route("POST", f"{_W}/project/init", None),
    56: Route("GET", f"{_W}/project/init-prompt", _one("prompt", STR)),
    57: Route("GET", f"{_W}/skills", Slice(SKILL_INFO)),
    58: Route("POST", f"{_W}/skills/read", SKILL_CONTENT),
    59: Route("POST", f"{_W}/mcp/refresh-tools", None),
    60: Route("POST", f"{_W}/mcp/read-resource", Slice(RESOURCE)),
    61: Route("GET", f"{_W}/mcp/prompts", Slice(MCP_PROMPT)),
    62: Route("POST", f"{_W}/mcp/get-prompt", _one("prompt", STR)),
    63: Route("GET", f"{_W}/mcp/states", Map(MCP_CLIENT_INFO)),
    64: Route("GET", f"{_W}/mcp/pending-auth", Slice(PENDING_AUTH)),
    65: Route("GET", f"{_W}/mcp/auth-url", _one("auth_url", STR)),
    66: Route("POST", f"{_W}/mcp/auth", EMPTY),
    67: Route("POST", f"{_W}/mcp/refresh-prompts", None),
    68: Route("POST", f"{_W}/mcp/refresh-resources", None),
    69: Route("POST", f"{_W}/mcp/docker/enable", None),
    70: Route("POST", f"{_W}/mcp/docker/disable", None),
}
