"""Sessions and the files that they read and wrote, as sent to clients."""

from typing import Literal

import msgspec
from msgspec import Struct

from culm.ids import FileId, SessionId


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
    # Computed in REST responses. Events carry false and 0, because these two are not stored.
    is_busy: bool = False
    attached_clients: int = 0


class SaveSession(Struct):
    """The fields of a session that a client may set. Other fields are ignored."""

    title: str = ""


class File(Struct):
    """One version of a file. A session's first version of a path is the content it found there."""

    id: FileId
    session_id: SessionId
    path: str
    content: str
    version: int
    created_at: int
    updated_at: int


class ReadFile(Struct):
    session_id: str = ""
    path: str = ""
