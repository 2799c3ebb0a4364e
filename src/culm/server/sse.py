"""The event stream over HTTP: parse what is wanted, count the claim, hand over the transport."""

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from culm.errors import InvalidRequest
from culm.events.cursor import Cursor, parse_cursor
from culm.events.stream import feed
from culm.events.views import Filter, View
from culm.server.problems import query_client_id, query_names
from culm.server.routes.base import workspace_of
from culm.wire.events import CURSOR_HEADER, TYPES


class EventResponse(web.StreamResponse):
    """A response that ends when the connection does: no length, no chunks.

    A truncated chunked body hangs the Crush client for ever; a closed one makes it reconnect.
    aiohttp has no public switch for that, so this class touches two of its non-public names; the
    dependency is pinned and tests/server/test_sse.py guards them.
    """

    _length_check = False

    def __init__(self) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        self.content_type = "text/event-stream"
        self.force_close()

    async def drained(self) -> None:
        """Return when the socket has room again."""
        writer: AbstractStreamWriter | None = self._payload_writer
        if writer is not None:
            await writer.drain()


async def stream_events(request: web.Request) -> web.StreamResponse:
    """`GET …/events`: subscribe first, count the claim second, so that nothing falls between."""
    client_id = query_client_id(request)
    workspace = workspace_of(request)
    view, filter_, cursor = _parse_wishes(request)
    response = EventResponse()
    transport = request.transport
    if request.method == "HEAD" or transport is None:
        return response
    hub = workspace.hub
    subscriber = hub.join(transport, view, filter_)
    if cursor is None:  # Then it has one from the first byte, even if nothing happens.
        response.headers[CURSOR_HEADER] = str(hub.cursor)
    try:
        birth = workspace.open_stream(client_id)
        try:
            await response.prepare(request)
            await feed(hub, workspace.store, subscriber, cursor, response.drained)
        finally:
            workspace.close_stream(client_id, birth)
    finally:
        hub.leave(subscriber)
    return response


def _parse_wishes(request: web.Request) -> tuple[View, Filter, Cursor | None]:
    query = request.query
    view = query.get("view", "crush")
    if view not in ("crush", "delta"):
        raise InvalidRequest("view must be crush or delta")
    types, sessions = query_names(request, "types"), query_names(request, "sessions")
    if unknown := types - TYPES:
        raise InvalidRequest(f"unknown event type in types: {min(unknown)}")
    text = query.get("cursor") or request.headers.get("Last-Event-ID", "")
    return view, Filter(types, sessions), parse_cursor(text) if text else None
