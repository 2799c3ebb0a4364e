"""Files of a session: the versions that were written, and what was read when."""

from msgspec import Struct

from culm.ids import FileId, SessionId


class File(Struct):
    """One version of a file; a session's first version of a path is what it found there."""

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
