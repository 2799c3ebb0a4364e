"""What may stand after the question mark; a query that exists is valid."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from culm.errors import InvalidRequest
from culm.ids import ClientId, find_client_id
from culm.wire.asks import AskState
from culm.wire.runs import State

NAMES_MAX = 256  # In one list.
DAYS_MAX = 36_600  # A century.
OFFSET_S_MAX = 18 * 3600  # No clock on Earth is farther from UTC.

# `minLength` is for the OpenAPI document; what is missing is refused in the words of the wire.
ClientIdText = Annotated[
    str,
    Meta(
        description="The client, by the UUID it made for itself.",
        extra_json_schema={"minLength": 1, "format": "uuid"},
    ),
]
Names = Annotated[str, Meta(description="Comma-separated; none means all.")]


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
        Meta(description="What a Crush client knows, or everything, with text as deltas."),
    ] = "crush"
    cursor: Annotated[
        str, Meta(description="Begin after this event; outweighs `Last-Event-ID`.")
    ] = ""
    types: Names = ""
    sessions: Names = ""
    interactive: Annotated[
        int, Meta(description="1 if a person sits there who can be asked for permission.")
    ] = 0


class SnapshotQuery(Struct):
    sessions: Annotated[
        str, Meta(description="Whose messages to include: ids, comma-separated, or `*`.")
    ] = ""


class RunsQuery(Struct):
    session: Annotated[str, Meta(description="Only runs of this session.")] = ""
    state: Annotated[State | Literal[""], Meta(description="Only runs in this state.")] = ""


class StatsQuery(Struct):
    days: Annotated[
        int,
        Meta(ge=0, le=DAYS_MAX, description="Of so many days, today included; 0 is all there is."),
    ] = 0
    utc_offset_s: Annotated[
        int,
        Meta(
            ge=-OFFSET_S_MAX,
            le=OFFSET_S_MAX,
            description="How far the clock that days are counted by is ahead of UTC.",
        ),
    ] = 0


class AnswerQuery(Struct):
    client_id: Annotated[str, Meta(description="Who answers, for the record.")] = ""

    @property
    def by(self) -> str:
        return find_client_id(self.client_id) or ""


class AsksQuery(Struct):
    session: Annotated[str, Meta(description="Only those of this session.")] = ""
    state: Annotated[AskState | Literal["all"], Meta(description="Only those in this state.")] = (
        "open"
    )


class SkipQuery(Struct):
    session_id: Annotated[str, Meta(description="Of this session, instead of all.")] = ""


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
    """A comma-separated parameter; raises `InvalidRequest` if it is too long."""
    names = frozenset(name for name in text.split(",") if name)
    if len(names) > NAMES_MAX:
        raise InvalidRequest(f"{parameter} may name at most {NAMES_MAX}")
    return names


class AgentsQuery(Struct, kw_only=True):
    below: Annotated[
        str, Meta(description="Only those below this agent; a session's own has its id.")
    ] = ""


class MailQuery(Struct, kw_only=True):
    agent: Annotated[str, Meta(description="Only letters to or from this agent.")] = ""
