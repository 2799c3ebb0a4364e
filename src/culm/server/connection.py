"""One connection: who is at its other end, how long and how large a head may be.

aiohttp bounds neither as a whole, and until the first head is there nobody is authenticated: this
is all that stands between a stranger and our descriptors and memory. Later heads are bounded in
time by the keep-alive; bodies by `problems.read_body`.
"""

import asyncio
import logging
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
_HEAD_END = b"\r\n\r\n"


class Connection(web.RequestHandler):
    """Made by `Connections`."""

    __slots__ = ("_head_bytes", "_head_tail", "_head_timer", "is_unix", "peer_uid")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # First what is ours: the base class may begin to serve at once.
        sock: socket.socket = transport.get_extra_info("socket")
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer_uid = peer_uid(sock) if self.is_unix else None
        self._begin_head()
        loop = asyncio.get_running_loop()
        self._head_timer: asyncio.TimerHandle | None = loop.call_later(HEAD_S, self.force_close)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None and self._is_too_much(data, self._head_bytes):
            self._turn_away()
        else:
            super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished = await super().finish_response(request, resp, start_time)
        # What comes next is a head, unless a body was left unread or the next is here already.
        if request.content.is_eof() and not self._messages:
            self._begin_head()
        return finished

    def head_arrived(self) -> None:
        """Stop counting: the head is whole, or it no longer matters."""
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _begin_head(self) -> None:
        self._head_bytes: int | None = 0  # None: not in a head.
        self._head_tail = b""

    def _is_too_much(self, data: bytes, before: int) -> bool:
        """Whether the head, of which `data` is the next piece, is beyond its bound."""
        known = len(self._head_tail)
        joined = self._head_tail + data  # Its end may be cut anywhere.
        found = joined.find(_HEAD_END)
        size = before + (found if found >= 0 else len(joined)) - known
        if found >= 0:
            self.head_arrived()
        else:
            self._head_bytes, self._head_tail = size, joined[-3:]
        return size > HEAD_BYTES_MAX

    def _turn_away(self) -> None:
        self.head_arrived()
        if self.transport is not None:
            answer = problem(HeadTooLarge(HEAD_BYTES_MAX))
            assert isinstance(answer.body, bytes), "a problem is encoded when it is made"
            head = (
                f"HTTP/1.1 {answer.status} {answer.reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + answer.body)
        self.force_close()

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
    """Makes a `Connection` for everybody who connects; one too many is turned away."""

    def __call__(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self, loop=loop, **self._kwargs)
        if len(self._connections) >= CONNECTIONS_MAX:
            loop.call_later(TURN_AWAY_S, connection.force_close)  # Whatever it says meanwhile.
        return connection


def peer_uid(sock: socket.socket) -> int | None:
    """The uid at the other end, or None where the platform does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        # Elsewhere the socket's mode (0600, in a directory of 0700) is what keeps others out.
        return os.getuid()
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
