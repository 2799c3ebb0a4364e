"""Bodies that clients send. Absent fields are zero values, as Go reads them."""

from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from culm.wire.messages import Message, RawMessage
from culm.wire.sessions import Session

M = TypeVar("M", Message, RawMessage)  # As a client reads it, as the server passes it on.


class CreateWorkspace(Struct):
    path: str = ""
    client_id: str = ""
    data_dir: str = ""
    debug: bool = False
    yolo: bool = False
    version: str = ""
    env: list[str] = msgspec.field(default_factory=list[str])
    channels: list[str] = msgspec.field(default_factory=list[str])


class Control(Struct):
    """`server` must be ours by name: a Crush client asks any other server to leave."""

    command: str = ""
    server: str = ""


class CurrentSession(Struct):
    session_id: str = ""


class SaveSession(Struct):
    """Of a whole session, only what a client may set."""

    title: str = ""


class PermissionRef(Struct):
    id: str = ""


class PermissionGrant(Struct):
    permission: PermissionRef = msgspec.field(default_factory=PermissionRef)
    action: str = ""


class Resolved(Struct):
    resolved: bool


class Skip(Struct):
    skip: bool = False


class NeedsInit(Struct):
    needs_init: bool = False


class Problem(Struct):
    message: str
    code: str = ""
    hint: str = ""


class Present(Struct):
    """A client with a live stream, and the session it looks at."""

    client_id: str
    session_id: str
    attached: bool = True


class StoreHealth(Struct):
    state: Literal["ok", "failing", "replaced"]
    reason: str = ""


class Snapshot(Struct, Generic[M]):
    """The stored state at `cursor`; later events bring it up to now."""

    cursor: str
    sessions: list[Session]
    messages: list[M]
    presence: list[Present]
    store: StoreHealth
