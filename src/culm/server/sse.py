"""The event stream over HTTP: parse the query, register the stream, hand over the transport."""

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from culm.errors import InvalidRequest
from culm.events.cursor import Cursor, parse_cursor
from culm.events.stream import feed
from culm.events.views import Filter
from culm.wire.events import CURSOR_HEADER, PAYLOADS
from culm.wire.queries import EventsQuery, split_names
from culm.workspace.workspace import LiveWorkspace


class EventResponse(web.StreamResponse):
    """A response that ends with its connection: no length, no chunks.

    A truncated chunked body makes Crush clients hang for ever; a closed connection makes them
    reconnect. aiohttp has no public option for that, so this class uses two of its private names.
    The dependency is pinned, and tests/server/test_sse.py checks them.
    """

    _length_check = False

    def __init__(self, start: Cursor | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        if start is not None:  # The client has a cursor even if no event follows.
            self.headers[CURSOR_HEADER] = str(start)
        self.content_type = "text/event-stream"
        self.force_close()

    async def drained(self) -> None:
        """Wait until the socket can take more data."""
        writer: AbstractStreamWriter | None = self._payload_writer
        if writer is not None:
            await writer.drain()


async def stream_events(
    request: web.BaseRequest, workspace: LiveWorkspace, query: EventsQuery
) -> EventResponse:
    """Stream the events of a workspace, from now on or from a cursor."""
    filter_ = _filter(query)
    text = query.cursor or request.headers.get("Last-Event-ID", "")
    cursor = parse_cursor(text) if text else None
    hub, transport = workspace.hub, request.transport
    if request.method == "HEAD" or transport is None:
        return EventResponse(hub.cursor if cursor is None else None)
    request.protocol.close()  # No request can follow a stream, so stop reading.
    # Subscribe before the stream is registered, so that no event is missed in between.
    subscriber = hub.join(transport, query.view, filter_)
    response = EventResponse(hub.cursor if cursor is None else None)
    try:
        interactive = query.interactive == 1
        claim_number = workspace.open_stream(query.client, interactive=interactive)
        try:
            await response.prepare(request)
            await feed(hub, workspace.store, subscriber, cursor, response.drained)
        finally:
            workspace.close_stream(query.client, claim_number, interactive=interactive)
    finally:
        hub.leave(subscriber)
    return response


def _filter(query: EventsQuery) -> Filter:
    types = split_names(query.types, "types")
    if unknown := types - PAYLOADS.keys():
        raise InvalidRequest(f"unknown event type in types: {min(unknown)}")
    return Filter(types, split_names(query.sessions, "sessions"))
