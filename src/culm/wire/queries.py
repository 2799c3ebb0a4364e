"""Query parameters. An instance is always valid: parsing refuses everything else."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from culm.errors import InvalidRequest
from culm.ids import ClientId, find_client_id
from culm.wire.asks import AskState
from culm.wire.codec import doc
from culm.wire.runs import State

NAMES_MAX = 256  # In one list.
MESSAGES_MAX = 1000  # On one page.
DAYS_MAX = 36_600  # A century.
OFFSET_S_MAX = 18 * 3600  # No time zone is farther from UTC.

# `minLength` is for the OpenAPI document only. A missing value is refused below, with the message
# that Crush clients expect.
ClientIdText = Annotated[
    str,
    Meta(
        description="The UUID that the client generated for itself.",
        extra_json_schema={"minLength": 1, "format": "uuid"},
    ),
]
Names = Annotated[str, doc("Comma-separated; empty means all.")]


class ClientQuery(Struct, kw_only=True):
    client_id: ClientIdText = ""

    def __post_init__(self) -> None:
        if not self.client_id:
            raise InvalidRequest("client_id is required")
        if find_client_id(self.client_id) is None:
            raise InvalidRequest("client_id is not a valid UUID")

    @property
    def client(self) -> ClientId:
        """The id in its canonical spelling."""
        return find_client_id(self.client_id) or ClientId(self.client_id)


class EventsQuery(ClientQuery, kw_only=True):
    view: Annotated[
        Literal["crush", "delta"],
        doc(
            "`crush` for the events that Crush clients know, `delta` for all events,"
            " with text as deltas."
        ),
    ] = "crush"
    cursor: Annotated[
        str, doc("Start after this event; takes precedence over `Last-Event-ID`.")
    ] = ""
    types: Names = ""
    sessions: Names = ""
    interactive: Annotated[
        int, doc("1 if a person at this client can answer permission requests.")
    ] = 0


class SnapshotQuery(Struct):
    sessions: Annotated[
        str, doc("Sessions to include messages of: comma-separated ids, or `*` for all.")
    ] = ""


class MessagesQuery(Struct):
    limit: Annotated[
        Annotated[int, Meta(ge=1, le=MESSAGES_MAX)] | None,
        doc("Only the last so many messages; fewer are returned if there are no earlier ones."),
    ] = None
    before: Annotated[str, doc("Only messages before the one with this id.")] = ""


class RunsQuery(Struct):
    session: Annotated[str, doc("Only runs of this session.")] = ""
    state: Annotated[State | Literal[""], doc("Only runs in this state.")] = ""


class StatsQuery(Struct):
    days: Annotated[
        int,
        Meta(ge=0, le=DAYS_MAX, description="Number of days, including today; 0 for no limit."),
    ] = 0
    utc_offset_s: Annotated[
        int,
        Meta(
            ge=-OFFSET_S_MAX,
            le=OFFSET_S_MAX,
            description="Offset from UTC, in seconds, of the time zone that days are counted in.",
        ),
    ] = 0


class AnswerQuery(Struct):
    client_id: Annotated[str, doc("The client that answers, for the record.")] = ""

    @property
    def by(self) -> str:
        return find_client_id(self.client_id) or ""


class AsksQuery(Struct):
    session: Annotated[str, doc("Only requests of this session.")] = ""
    state: Annotated[AskState | Literal["all"], doc("Only requests in this state.")] = "open"


class SkipQuery(Struct):
    session_id: Annotated[str, doc("The setting of this session instead of the workspace's.")] = ""


class LastReadQuery(Struct):
    session_id: str = ""
    path: str = ""


class ProviderQuery(Struct):
    provider_id: str = ""


class McpNameQuery(Struct):
    name: Annotated[str, Meta(extra_json_schema={"minLength": 1})] = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequest("name is required")


def split_names(text: str, parameter: str) -> frozenset[str]:
    """The names in a comma-separated parameter; raises `InvalidRequest` if they are too many."""
    names = frozenset(name for name in text.split(",") if name)
    if len(names) > NAMES_MAX:
        raise InvalidRequest(f"too many names in {parameter}: at most {NAMES_MAX}")
    return names


class AgentsQuery(Struct, kw_only=True):
    below: Annotated[
        str, doc("Only agents below this one. A session's own agent has the session's id.")
    ] = ""


class MailQuery(Struct, kw_only=True):
    agent: Annotated[str, doc("Only letters to or from this agent.")] = ""
