"""Events as they travel: the envelope, the payloads that are not entities, and the type sets."""

import msgspec
from msgspec import Struct

from culm.ids import MessageId, SessionId
from culm.wire.messages import Growing

# What a Crush client knows. Anything else is dropped at that view, never mapped.
CRUSH_TYPES = frozenset(
    {
        "message",
        "session",
        "file",
        "agent_event",
        "run_complete",
        "permission_request",
        "permission_notification",
        "question_batch_request",
        "question_batch_notification",
        "config_changed",
        "skills_event",
        "lsp_event",
        "mcp_event",
        "update_available",
    }
)
OUR_TYPES = frozenset(
    {"message_delta", "message_snapshot", "presence_changed", "store_health", "resync"}
)
TYPES = CRUSH_TYPES | OUR_TYPES
CURSOR_HEADER = "Culm-Cursor"  # On the head of a stream: where it begins.


class MessageDelta(Struct):
    """Text appended to one part, at an offset in Unicode code points."""

    message_id: MessageId
    session_id: SessionId
    rev: int
    part: int
    kind: Growing
    offset: int
    text: str


class Resync(Struct):
    """The stream cannot continue from the cursor it was given: read the snapshot again."""

    cursor: str
    reason: str


class Inner(Struct):
    type: str
    payload: msgspec.Raw


class Envelope(Struct):
    type: str
    payload: Inner
    cursor: str = ""
