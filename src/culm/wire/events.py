"""Events on the wire: the envelope, the payload type of each event, and payloads of events only."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from culm.ids import MessageId, SessionId, WorkspaceId
from culm.wire.agents import Agent, LetterShown
from culm.wire.asks import (
    AskChanged,
    Grant,
    PermissionNotification,
    PermissionRequest,
    QuestionChanged,
    QuestionNotification,
    QuestionRequest,
    SkipChanged,
)
from culm.wire.extensions import LspEvent, McpEvent, SkillState
from culm.wire.messages import File, Growing, Message, Session
from culm.wire.runs import (
    AgentEvent,
    CancelChanged,
    QueueChanged,
    RunChanged,
    RunComplete,
    RunRetry,
)
from culm.wire.workspaces import Present, StoreHealth

CURSOR_HEADER = "Culm-Cursor"  # In the response to a stream request: the cursor it starts at.


class MessageDelta(Struct):
    """Text appended to one part, at an offset in Unicode code points."""

    message_id: MessageId
    session_id: SessionId
    rev: int
    part: int
    kind: Growing
    offset: int
    text: str


class CallOutput(Struct):
    """Output of a running tool call, at an offset in Unicode code points.

    It is a bounded live view, not a record.
    """

    session_id: SessionId
    tool_call_id: str
    offset: int
    text: str


class Resync(Struct):
    """The stream cannot continue from the requested cursor. Read the snapshot again."""

    cursor: str
    reason: str


class ConfigChanged(Struct):
    """The configuration changed. Read the workspace again."""

    workspace_id: WorkspaceId


class SkillsEvent(Struct):
    states: list[SkillState]


class UpdateAvailable(Struct):
    current_version: str
    latest_version: str
    is_development: bool


class Inner(Struct):
    type: str
    payload: msgspec.Raw


class Envelope(Struct):
    type: str
    payload: Inner
    cursor: str = ""


# The events that Crush clients know, with their payload types. The `crush` view drops all others;
# none is mapped to a Crush event.
CRUSH_PAYLOADS: Mapping[str, type] = {
    "message": Message,
    "session": Session,
    "file": File,
    "agent_event": AgentEvent,
    "run_complete": RunComplete,
    "permission_request": PermissionRequest,
    "permission_notification": PermissionNotification,
    "question_batch_request": QuestionRequest,
    "question_batch_notification": QuestionNotification,
    "config_changed": ConfigChanged,
    "skills_event": SkillsEvent,
    "lsp_event": LspEvent,
    "mcp_event": McpEvent,
    "update_available": UpdateAvailable,
}
OUR_PAYLOADS: Mapping[str, type] = {
    "message_delta": MessageDelta,
    "message_snapshot": Message,
    "presence_changed": Present,
    "store_health": StoreHealth,
    "run_changed": RunChanged,
    "run_retry": RunRetry,
    "queue_changed": QueueChanged,
    "cancel_changed": CancelChanged,
    "ask_changed": AskChanged,
    "question_changed": QuestionChanged,
    "grant_changed": Grant,
    "skip_changed": SkipChanged,
    "call_output": CallOutput,
    "agent_started": Agent,
    "agent_changed": Agent,
    "agent_ended": Agent,
    "letter_changed": LetterShown,
    "resync": Resync,
}
# Events about the progress of one session, which clients that follow it request: a new event is one
# of them unless it is listed here.
SESSION_EVENTS = OUR_PAYLOADS.keys() - {
    "presence_changed",
    "store_health",
    "cancel_changed",
    "grant_changed",
    "skip_changed",
    "letter_changed",
    "resync",
}
PAYLOADS: Mapping[str, type] = {**CRUSH_PAYLOADS, **OUR_PAYLOADS}
