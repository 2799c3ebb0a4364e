"""Links over WebSocket: a worker listens, a host connects; every frame is one text message.

Owns sockets, the upgrade and its limits; TLS and access control are in `tls.py`. aiohttp parses,
masks and waits. `WebSocketLink` adds what aiohttp lacks: it splits large messages, aborts the link
when a waiting send is canceled, and writes small frames together.
"""

import asyncio
import logging
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientHandlerType,
    ClientRequest,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    DummyCookieJar,
    InvalidURL,
    ServerDisconnectedError,
    TCPConnector,
    WSMsgType,
    WSServerHandshakeError,
)
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server
from aiohttp.web_ws import WebSocketResponse

from culm.errors import InvalidRequest, ListenFailed
from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.transport.base import ConnectFailed, Link, LinkLost
from culm.fleet.transport.tls import (
    ServerTls,
    bearer,
    check_listen_address,
    client_context,
    is_authorized,
    may_send_token,
    server_context,
)

_log = logging.getLogger(__name__)

BACKLOG = 512
CONNECTIONS_MAX = 1024  # Including those that are not authorized yet.
WAITING_MAX = 512  # Authorized but not accepted yet; further ones get a 503.
HANDSHAKE_S = 10.0  # For TLS, and again for the head of the upgrade.
HEAD_FIELDS_MAX = 64
CONNECT_S = 10.0
# aiohttp refuses messages that reach its limit.
_MESSAGE_BOUND = MESSAGE_BYTES_MAX + 1
_NO_ADDRESS = "not a ws:// or wss:// address"
CLOSE_S = 1.0  # For the last bytes and the peer's own close frame.
# The protocol has no heartbeat; a machine that answers no probe for this long is gone.
KEEPALIVE_S = 120
PONG_BYTES_MAX = 8 << 10  # A peer that leaves more than this unread gets no pongs.
# Other implementations accept messages of 64 MiB, but only frames up to 16 MiB.
FRAGMENT_BYTES = 8 << 20
QUICK_BYTES_MAX = 32 << 10  # Frames of at most this much together are written directly ...
# ... while fewer bytes than this wait; otherwise aiohttp waits for the reader.
QUICK_ROOM = 32 << 10
TURN_FRAMES = 64  # After this many frames without a wait, other tasks get a turn.
_MEDIUM_HEAD = struct.Struct(">BBH").pack


# --- one end of a link


class WebSocketLink:
    """Either end of a link."""

    def __init__(
        self,
        ws: WebSocketResponse[bool] | ClientWebSocketResponse[bool],
        transport: asyncio.Transport,
        on_closed: Callable[[], None],
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._on_closed = on_closed
        self._masks = isinstance(ws, ClientWebSocketResponse)  # Frames to a server are masked.
        self._is_closed = False
        self._is_ended = False  # The peer has sent its close frame.
        self._is_sending = False
        self._received = 0
        _enable_keepalive(transport)

    async def receive(self) -> bytes | None:
        while not self._is_ended:
            self._received += 1
            if self._received % TURN_FRAMES == 0:
                # Frames that have arrived are returned without a wait. A flood must not block other
                # tasks.
                await asyncio.sleep(0)
            message = await self._ws.receive()
            kind = message.type
            if kind is WSMsgType.TEXT:
                return message.data
            if kind is WSMsgType.PING:
                await self._pong(message.data)
            elif kind is WSMsgType.ERROR:
                raise LinkLost(reason_of(message.data))
            elif kind in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
                self._is_ended = True
        return None

    @property
    def room(self) -> int:
        has_room = not self._masks and self._transport.get_write_buffer_size() < QUICK_ROOM
        return QUICK_BYTES_MAX if has_room else 0

    async def send(self, *frames: bytes) -> None:
        if sum(map(len, frames)) <= self.room:
            self._send_quickly(frames)
            return
        for frame in frames:
            await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        self._is_sending = True
        try:
            if len(frame) <= FRAGMENT_BYTES:
                await self._ws.send_frame(frame, WSMsgType.TEXT)
            else:
                rest = self._begin_large(frame)
                await self._ws.send_frame(rest, WSMsgType.CONTINUATION)
        except ConnectionError as exc:
            raise LinkLost("the peer is gone") from exc
        except asyncio.CancelledError:
            # It waited for the peer to read, and aiohttp cannot resume such a wait.
            self.abort()
            raise
        self._is_sending = False

    def _send_quickly(self, frames: Sequence[bytes]) -> None:
        """Write small frames at once, as one write costs more than encoding a dozen events."""
        if self._is_closed or self._transport.is_closing():
            raise LinkLost("the peer is gone")
        self._transport.write(b"".join([part for one in frames for part in (_head(one), one)]))

    def _begin_large(self, frame: bytes) -> bytes:
        """Write all fragments but the last, which is returned for aiohttp to send.

        aiohttp can only send final fragments.
        """
        opcode = WSMsgType.TEXT
        # The last is as large as the others, because aiohttp decides by its own writes when to wait
        # for the reader.
        size = -(-len(frame) // -(-len(frame) // FRAGMENT_BYTES))
        at = 0
        while len(frame) - at > size:
            if self._ws.closed or self._transport.is_closing():
                raise ConnectionResetError
            mask = os.urandom(4) if self._masks else b""
            self._transport.write(_fragment(opcode, frame[at : at + size], mask=mask))
            opcode = WSMsgType.CONTINUATION
            at += size
        return frame[at:]

    async def _pong(self, data: bytes) -> None:
        if self._transport.get_write_buffer_size() <= PONG_BYTES_MAX:
            try:
                await self._ws.pong(data)
            except ConnectionError as exc:
                raise LinkLost("the peer is gone") from exc

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # A peer that does not read would not read a close frame either.
            if not self._is_sending:
                async with asyncio.timeout(CLOSE_S):
                    await self._ws.close()
        except TimeoutError:
            _log.debug("a link was closed without a close frame from the peer")
        finally:
            self.abort()

    def abort(self) -> None:
        """Close immediately, without a close frame; unsent data is lost."""
        self._is_closed = True
        self._transport.abort()
        self._on_closed()


def _head(frame: bytes) -> bytes:
    """The head of a message of less than 64 KiB that is not masked."""
    size = len(frame)
    return b"\x81" + bytes((size,)) if size < 126 else _MEDIUM_HEAD(0x81, 126, size)


def _fragment(opcode: WSMsgType, payload: bytes, *, mask: bytes) -> bytes:
    """Encode a WebSocket frame that is not the last of its message."""
    head = struct.pack(">BBQ", opcode, 127 | (0x80 if mask else 0), len(payload)) + mask
    if not mask:
        return head + payload
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    masked = int.from_bytes(payload) ^ int.from_bytes(key)
    return head + masked.to_bytes(len(payload))


def reason_of(exc: object) -> str:
    return str(exc) or type(exc).__name__


def _enable_keepalive(transport: asyncio.Transport) -> None:
    """Enable keepalive, so that the loss of the peer's machine is noticed."""
    sock = cast("socket.socket | None", transport.get_extra_info("socket"))
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 8)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


# --- the listening side


class WebSocketListener:
    """Created by `listen_websocket`."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint
        self._token = token
        self._arrived: asyncio.Queue[WebSocketLink] = asyncio.Queue()
        self._waiting = 0  # In the queue or about to enter it.
        self._links: set[WebSocketLink] = set()

    async def accept(self) -> Link:
        link = await self._arrived.get()
        self._count_out()
        return link

    def _count_out(self) -> None:
        self._waiting -= 1

    async def on_request(self, request: BaseRequest) -> StreamResponse:
        """Upgrade one connection, then wait until the accepting task has closed it."""
        if not is_authorized(request.headers.getall("Authorization", []), self._token):
            return _refusal(401, {"WWW-Authenticate": "Bearer"})
        if self._token is None and "Origin" in request.headers:
            return _refusal(403)  # A web page can reach a loopback port but cannot send a token.
        if self._waiting >= WAITING_MAX:
            return _refusal(503)
        transport = request.transport
        ws = WebSocketResponse[Literal[False]](
            autoping=False, compress=False, max_msg_size=_MESSAGE_BOUND, decode_text=False
        )
        if transport is None or not ws.can_prepare(request):
            return _refusal(400)
        self._waiting += 1
        with ExitStack() as undo:
            undo.callback(self._count_out)
            await ws.prepare(request)
            undo.pop_all()
        closed = asyncio.Event()
        link = WebSocketLink(ws, transport, closed.set)
        self._links.add(link)
        self._arrived.put_nowait(link)
        try:
            await closed.wait()
        finally:
            self._links.discard(link)
        return ws

    async def close(self) -> None:
        """Close all remaining links."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.close(), name="fleet link close")


def _refusal(status: int, headers: dict[str, str] | None = None) -> Response:
    response = Response(status=status, headers=headers)
    response.force_close()
    return response


class _RefusedConnection(asyncio.Protocol):
    """Refuses a connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses but have the same methods.
        cast("asyncio.Transport", transport).abort()


@asynccontextmanager
async def listen_websocket(
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: ServerTls | None = None,
) -> AsyncGenerator[WebSocketListener]:
    """Listen while in the block; raises `ListenFailed`, and `InvalidRequest` for TLS files.

    An address that is not loopback needs a token and TLS, or raises `InvalidRequest`, too. Links
    that are still open when the block ends are closed.
    """
    check_listen_address(host, has_token=token is not None, has_tls=tls is not None)
    context = None if tls is None else server_context(tls)
    sock = await _bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    scheme = "ws" if tls is None else "wss"
    listener = WebSocketListener(f"{scheme}://{shown}:{sock.getsockname()[1]}", token)
    http = Server(
        listener.on_request,
        access_log=None,
        keepalive_timeout=HANDSHAKE_S,  # Also the time limit for the first head.
        max_headers=HEAD_FIELDS_MAX,
        lingering_time=0.0,  # An authorized request has no body.
        auto_decompress=False,
    )

    def make_protocol() -> asyncio.Protocol:
        return http() if len(http.connections) < CONNECTIONS_MAX else _RefusedConnection()

    with ExitStack() as undo:
        undo.callback(sock.close)
        server = await asyncio.get_running_loop().create_server(
            make_protocol,
            sock=sock,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_S if context else None,
            backlog=BACKLOG,
        )
        undo.pop_all()
    try:
        yield listener
    finally:
        server.close()
        try:
            await listener.close()
        finally:
            http.pre_shutdown()
            await http.shutdown(CLOSE_S)


async def _bind(host: str, port: int) -> socket.socket:
    url = f"tcp://{host}:{port}"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # `localhost` resolves to both families; people usually mean IPv4.
        family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError) as exc:
        hint = "choose another host or port"
        raise ListenFailed(url, getattr(exc, "strerror", None) or str(exc), hint=hint) from exc
    return sock


# --- the connecting side


class _ClientSocket(ClientWebSocketResponse):
    """A client's end that exposes its transport."""

    @property
    def transport(self) -> asyncio.Transport | None:
        connection = self._response.connection
        return None if connection is None else connection.transport

    def release(self) -> None:
        self._response.close()


async def connect_websocket(
    endpoint: str, token: str | None = None, ca: Path | None = None
) -> WebSocketLink:
    """Raises `ConnectFailed`, in bounded time. `ca` replaces the usual roots."""
    scheme = _check_endpoint(endpoint, has_token=token is not None)
    try:
        trust = client_context(ca) if scheme == "wss" and ca is not None else True
    except InvalidRequest as exc:
        raise ConnectFailed(exc.message) from exc
    connector = TCPConnector(limit=1, force_close=True, ssl=trust)
    session = ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None),
        ws_response_class=_ClientSocket,
        middlewares=(_refuse_redirect,),
    )
    try:
        async with asyncio.timeout(CONNECT_S):
            ws = await session.ws_connect(
                endpoint,
                headers={} if token is None else {"Authorization": bearer(token)},
                autoping=False,
                max_msg_size=_MESSAGE_BOUND,
                decode_text=False,
            )
        assert isinstance(ws, _ClientSocket), "the session makes these"
        transport = ws.transport
        if transport is None:
            raise ConnectFailed(f"{endpoint}: the connection was closed at once")
    except (ClientError, OSError, ValueError) as exc:
        raise ConnectFailed(f"{endpoint}: {_describe_failure(exc, scheme)}") from exc
    finally:
        # The link needs only its connection, which belongs to the connector.
        session.detach()
    return WebSocketLink(ws, transport, ws.release)


def _check_endpoint(endpoint: str, *, has_token: bool) -> str:
    """Return the scheme; raises `ConnectFailed`."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConnectFailed(f"{endpoint}: {_NO_ADDRESS}") from None
    if parts.username is not None:
        raise ConnectFailed(
            "an endpoint must not contain a user or password; pass the token separately"
        )
    if not is_address:
        raise ConnectFailed(f"{endpoint}: {_NO_ADDRESS}")
    if has_token and not may_send_token(parts.scheme, parts.hostname or ""):
        raise ConnectFailed(f"{endpoint}: a token is sent only over wss:// or to this machine")
    return parts.scheme


async def _refuse_redirect(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Refuse redirects: a token is only for the address it was given with."""
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise ClientError("redirected elsewhere")
    return response


def _describe_failure(exc: Exception, scheme: str) -> str:
    """Describe a failure in one line, without repeating anything an unknown peer sent."""
    match exc:
        case InvalidURL():
            return _NO_ADDRESS
        case WSServerHandshakeError(status=401):
            return "the token was refused"
        case WSServerHandshakeError(status=status):
            return f"it answered {status}"
        case ClientResponseError():
            return "it is not a WebSocket server"
        case (
            ServerDisconnectedError()
            | ConnectionResetError()
            | ClientConnectorError(os_error=ConnectionResetError())
        ):
            return f"it closed the connection, as if it did not expect {scheme}://"
        case ClientConnectorCertificateError(certificate_error=inner):
            return f"its certificate is not trusted: {reason_of(inner)}"
        case ClientConnectorError(os_error=ssl.SSLError() as inner):
            return f"the TLS handshake failed: {reason_of(inner)}"
        case ClientConnectorError(os_error=inner):
            return f"no connection: {inner.strerror or reason_of(inner)}"
        case TimeoutError():
            return f"no answer within {CONNECT_S:g} s"
        case _:
            return reason_of(exc)
