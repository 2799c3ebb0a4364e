"""One connection: who is at its other end, and how much of our time and memory it may take.

aiohttp bounds no head as a whole, and until the first one is there nobody is authenticated: this
is all that stands between a stranger and our descriptors and memory. Bodies are bounded by
`problems.read_body`.
"""

import asyncio
import logging
import math
import os
import socket
import struct
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from culm.errors import AppError, HeadTooLarge, InvalidRequest
from culm.server.problems import problem

log = logging.getLogger(__name__)

HEAD_S = 10.0
HEAD_BYTES_MAX = 32 << 10
CONNECTIONS_MAX = 4096
TURN_AWAY_S = 0.1  # Accepted now, its transport is there some loop turns later.
STALL_S = 60.0  # A client that takes nothing of its answer for this long is let go.
ANSWER_BYTES_WATCHED = 64 << 10  # What a transport takes without waiting for its reader.


class Connection(web.RequestHandler):
    """Made by `Connections`."""

    __slots__ = ("_head_timer", "_idle_bytes", "_seen_bytes", "is_unix", "peer_uid")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # First what is ours: the base class may begin to serve at once.
        sock: socket.socket = transport.get_extra_info("socket")
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer_uid = peer_uid(sock) if self.is_unix else None
        self._idle_bytes = 0  # Came while no request was served: a head that is not whole.
        self._seen_bytes = 0  # Came since a request was last handed out: no head is larger.
        loop = asyncio.get_running_loop()
        self._head_timer: asyncio.TimerHandle | None = loop.call_later(HEAD_S, self.force_close)
        super().connection_made(transport)
        if isinstance(self._manager, Connections) and self._manager.is_full(self):
            loop.call_later(TURN_AWAY_S, self.force_close)  # Whatever it says meanwhile.

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._seen_bytes += len(data)
        if self._waiter is None or self._waiter.done():
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > HEAD_BYTES_MAX:
                self._turn_away()

    def check_head(self, request: web.BaseRequest) -> None:
        """Called with each request as it is handed out; raises `HeadTooLarge`."""
        self._stop_clock()
        seen = self._seen_bytes
        if not self._messages:  # Otherwise some of it was the next one's.
            self._seen_bytes = 0
        if seen > HEAD_BYTES_MAX and _head_size(request) > HEAD_BYTES_MAX:
            raise HeadTooLarge(HEAD_BYTES_MAX)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _turn_away(self) -> None:
        if self.transport is not None:
            answer = problem(HeadTooLarge(HEAD_BYTES_MAX))
            assert isinstance(answer.body, bytes), "a problem is encoded when it is made"
            head = (
                f"HTTP/1.1 {answer.status} {answer.reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + answer.body)
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.transport is not None and (resp.content_length or 0) > ANSWER_BYTES_WATCHED:
            asyncio.get_running_loop().call_later(STALL_S, _let_go, self.transport, math.inf)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not be read as HTTP gets an answer in JSON, and no stack in the log."""
        if status != HTTPStatus.BAD_REQUEST:
            return super().handle_error(request, status, exc, message)
        log.debug("not HTTP: %s", message or exc)
        error: AppError = InvalidRequest("the request is not valid HTTP/1.1")
        # More than 128 fields are told apart by their words only.
        if isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
            error = HeadTooLarge(HEAD_BYTES_MAX)
        response = problem(error)
        response.force_close()
        return response


class Connections(web.Server):
    """Makes a `Connection` for everybody who connects."""

    def __call__(self) -> Connection:
        return Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)

    def is_full(self, newcomer: Connection) -> bool:
        """Whether it is one too many. Strangers on TCP take no room from our own user's socket."""
        if len(self._connections) <= CONNECTIONS_MAX:
            return False
        alike = [c for c in self.connections if getattr(c, "is_unix", None) == newcomer.is_unix]
        return len(alike) > CONNECTIONS_MAX


def _head_size(request: web.BaseRequest) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    return fields + len(request.method) + len(request.raw_path) + len(" HTTP/1.1\r\n\r\n")


def _let_go(transport: asyncio.Transport, unread_before: float) -> None:
    """Let go of a client that has taken nothing of a large answer for a while."""
    unread = 0 if transport.is_closing() else transport.get_write_buffer_size()
    if unread >= unread_before:
        transport.abort()
    elif unread:
        asyncio.get_running_loop().call_later(STALL_S, _let_go, transport, unread)


def peer_uid(sock: socket.socket) -> int | None:
    """The uid at the other end, or None where the platform does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        # Elsewhere the socket's mode (0600, in a directory of 0700) is what keeps others out.
        return os.getuid()
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
