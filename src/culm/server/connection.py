"""The HTTP server: its connections, with limits on the time and memory that each may use.

aiohttp does not limit the total size of request headers, and a client is not authenticated before
its first headers are complete. These limits are all that protects our file descriptors and memory
from unauthenticated clients. `api.read_body` limits bodies.
"""

import asyncio
import logging
import math
import os
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import StreamResponse
from aiohttp.web_server import Server

from culm.errors import AppError, HeadTooLarge, InvalidRequest
from culm.server.listen import BACKLOG, Listener, UnixAddress
from culm.server.problems import problem

log = logging.getLogger(__name__)

HEAD_S = 10.0
HEAD_BYTES_MAX = 32 << 10
CONNECTIONS_MAX = 4096
KEEPALIVE_S = 120.0  # Crush clients keep connections for 90 s and do not retry a lost POST.
SHUTDOWN_TIMEOUT_S = 2.5  # aiohttp waits this long for a handler, and again after its cancel.
LINGER_S = 3.0  # A client that still sends a refused body has this long to read the response.
TURN_AWAY_S = 0.1  # The transport of an accepted connection is ready some loop iterations later.
STALL_S = 60.0  # A client that reads nothing of its response for this long is disconnected.
ANSWER_BYTES_WATCHED = 64 << 10  # A transport buffers so much without waiting for its reader.


class HttpConnection(RequestHandler):
    """A connection, created by `Connections`."""

    __slots__ = ("_head_timer", "_idle_bytes", "_seen_bytes", "is_unix", "peer_uid")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Set our own attributes first, because the base class may start to serve at once.
        sock: socket.socket = transport.get_extra_info("socket")
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer_uid = peer_uid(sock) if self.is_unix else None
        self._idle_bytes = 0  # Received while no request was served: incomplete headers.
        self._seen_bytes = 0  # Received since the last request: an upper bound for its headers.
        loop = asyncio.get_running_loop()
        self._head_timer: asyncio.TimerHandle | None = loop.call_later(HEAD_S, self.force_close)
        super().connection_made(transport)
        if isinstance(self._manager, Connections) and self._manager.is_full(self):
            loop.call_later(TURN_AWAY_S, self.force_close)  # Even if a request arrives before.

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

    def check_head(self, request: BaseRequest) -> None:
        """Check the headers of each request before it is handled; raises `HeadTooLarge`."""
        self._stop_clock()
        seen = self._seen_bytes
        if not self._messages:  # Otherwise some of the bytes belong to the next request.
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
            assert isinstance(answer.body, bytes), "`problem` encodes its response"
            head = (
                f"HTTP/1.1 {answer.status} {answer.reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + answer.body)
        self.force_close()

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        if self.transport is not None and (resp.content_length or 0) > ANSWER_BYTES_WATCHED:
            loop = asyncio.get_running_loop()
            loop.call_later(STALL_S, _abort_stalled, self.transport, math.inf)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Answer invalid HTTP with a JSON error, without a stack trace in the log."""
        if status != HTTPStatus.BAD_REQUEST:
            return super().handle_error(request, status, exc, message)
        log.debug("not HTTP: %s", message or exc)
        error: AppError = InvalidRequest("the request is not valid HTTP/1.1")
        # Only its message distinguishes the error for more than 128 header fields.
        if isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
            error = HeadTooLarge(HEAD_BYTES_MAX)
        response = problem(error)
        response.force_close()
        return response


class Connections(Server):
    """Creates a `HttpConnection` for each client that connects."""

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, loop=asyncio.get_running_loop(), **self._kwargs)

    def is_full(self, newcomer: HttpConnection) -> bool:
        """Return True if a new connection exceeds the limit.

        TCP and unix sockets are counted separately, so strangers cannot lock out our own user.
        """
        if len(self._connections) <= CONNECTIONS_MAX:
            return False
        alike = [c for c in self.connections if getattr(c, "is_unix", None) == newcomer.is_unix]
        return len(alike) > CONNECTIONS_MAX


@asynccontextmanager
async def open_http(
    handler: Callable[[BaseRequest], Awaitable[StreamResponse]],
    listeners: Sequence[Listener],
    tls: ssl.SSLContext | None,
) -> AsyncGenerator[None]:
    """Serve requests on every listener while in the block."""
    connections = Connections(
        handler,
        # A client that disconnects cancels only its own handler. State changes are owned by a
        # workspace or the store, and handlers await them shielded.
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        access_log=None,
        max_line_size=HEAD_BYTES_MAX,
        max_field_size=HEAD_BYTES_MAX,
        lingering_time=LINGER_S,
        auto_decompress=False,  # As in Go. A decompression bomb would also block the event loop.
    )
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    try:
        for listener in listeners:
            if isinstance(listener.address, UnixAddress):
                server = await loop.create_unix_server(
                    connections, sock=listener.sock, backlog=BACKLOG
                )
            else:
                server = await loop.create_server(
                    connections,
                    sock=listener.sock,
                    ssl=tls,
                    ssl_handshake_timeout=HEAD_S if tls else None,
                    backlog=BACKLOG,
                )
            servers.append(server)
        yield
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # Requests that have arrived start before idle connections close.
        connections.pre_shutdown()
        await connections.shutdown(SHUTDOWN_TIMEOUT_S)


def _head_size(request: BaseRequest) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    return fields + len(request.method) + len(request.raw_path) + len(" HTTP/1.1\r\n\r\n")


def _abort_stalled(transport: asyncio.Transport, unread_before: float) -> None:
    """Disconnect a client that has read nothing of a large response since the last check."""
    unread = 0 if transport.is_closing() else transport.get_write_buffer_size()
    if unread >= unread_before:
        transport.abort()
    elif unread:
        asyncio.get_running_loop().call_later(STALL_S, _abort_stalled, transport, unread)


def peer_uid(sock: socket.socket) -> int | None:
    """The uid of the peer of a unix socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        # On other platforms the socket's mode (0600, in a directory of 0700) keeps others out.
        return os.getuid()
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
