"""Sessions as every client reads them."""

from typing import Literal

import msgspec
from msgspec import Struct

from culm.ids import SessionId


class Todo(Struct):
    content: str = ""
    status: Literal["pending", "in_progress", "completed"] = "pending"
    active_form: str = ""


class Session(Struct):
    id: SessionId
    parent_session_id: str = ""
    title: str = ""
    message_count: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    summary_message_id: str = ""
    cost: float = 0.0
    todos: list[Todo] = msgspec.field(default_factory=list[Todo])
    created_at: int = 0
    updated_at: int = 0
    # Computed in REST answers; false and 0 in events, as they are nobody's stored fact.
    is_busy: bool = False
    attached_clients: int = 0


class SaveSession(Struct):
    """Of a whole session, only what a client may set."""

    title: str = ""
