"""How things stand: the state a client of events begins from, and what went wrong."""

from typing import Generic, Literal, TypeVar

from msgspec import Struct

from culm.wire.agents import Agent
from culm.wire.messages import Message, RawMessage
from culm.wire.runs import Run
from culm.wire.sessions import Session

M = TypeVar("M", Message, RawMessage)  # As a client reads it, as the server passes it on.


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
    # Those that have not ended: by session, those of one in the order in which they wait ...
    runs: list[Run]
    agents: list[Agent]  # ... and the agents that have not.
    presence: list[Present]
    store: StoreHealth
