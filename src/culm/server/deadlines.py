"""How long a client may take to say what it wants: our own timers, as aiohttp has none for this.

A connection must bring its first request's head in time. Later heads on the same connection are
bounded by the keep-alive, bodies by `problems.read_body`. Until then nobody is authenticated, so
this is all that stands between a stranger and our descriptors.
"""

import asyncio

from aiohttp import web

from culm.server.problems import Handler

HEAD_S = 10.0
CONNECTIONS_MAX = 4096
TURN_AWAY_S = 0.1  # Accepted now, its transport is there some loop turns later.


class Deadlines:
    """Watches the connections that have not yet said anything complete."""

    def __init__(self) -> None:
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def accept(self, server: web.Server) -> web.RequestHandler:
        """Make the handler of a new connection; one too many is turned away."""
        handler = server()
        loop = asyncio.get_running_loop()
        if len(server.connections) < CONNECTIONS_MAX:
            self._waiting[handler] = loop.call_later(HEAD_S, self._expire, handler)
        else:
            loop.call_later(TURN_AWAY_S, handler.force_close)  # Whatever it says meanwhile.
        return handler

    def head_arrived(self, handler: web.RequestHandler) -> None:
        if timer := self._waiting.pop(handler, None):
            timer.cancel()

    def _expire(self, handler: web.RequestHandler) -> None:
        del self._waiting[handler]
        handler.force_close()


DEADLINES = web.AppKey("deadlines", Deadlines)


@web.middleware
async def note_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[DEADLINES].head_arrived(request.protocol)
    return await handler(request)
