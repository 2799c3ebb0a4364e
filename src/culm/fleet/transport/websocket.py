"""Links over WebSocket: a worker listens, a parent connects; every frame is one text message.

Owns sockets, the upgrade and its bounds. Who is let in is `auth.py`'s, what is trusted `tls.py`'s.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
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
    WSServerHandshakeError,
    web,
)

from culm.errors import InvalidRequest, ListenFailed
from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.transport.auth import bearer, check_door, may_enter, may_show_token
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.tls import ServerTls, client_context, server_context
from culm.fleet.transport.websocket_link import GOODBYE_S, WebSocketLink, reason_of

BACKLOG = 512
CONNECTIONS_MAX = 1024  # With those that have not said yet who they are.
WAITING_MAX = 512  # Let in, and not accepted yet; one more is told to come later.
HANDSHAKE_S = 10.0  # For TLS, and again for the head of the upgrade.
HEAD_FIELDS_MAX = 64
CONNECT_S = 10.0
# aiohttp refuses what reaches its bound.
_MESSAGE_BOUND = MESSAGE_BYTES_MAX + 1
_NO_ADDRESS = "it is no ws:// or wss:// address"


# --- the listening side


class WebSocketListener:
    """Made by `listen_websocket`."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint
        self._token = token
        self._arrived: asyncio.Queue[WebSocketLink] = asyncio.Queue()
        self._waiting = 0  # In the queue, or on their way into it.
        self._links: set[WebSocketLink] = set()

    async def accept(self) -> Link:
        link = await self._arrived.get()
        self._count_out()
        return link

    def _count_out(self) -> None:
        self._waiting -= 1

    async def on_request(self, request: web.BaseRequest) -> web.StreamResponse:
        """Upgrade one connection; then wait until whoever accepted it has closed it."""
        if not may_enter(request.headers.getall("Authorization", []), self._token):
            return _refusal(401, {"WWW-Authenticate": "Bearer"})
        if self._token is None and "Origin" in request.headers:
            return _refusal(403)  # A web page can reach a loopback port, but show no token.
        if self._waiting >= WAITING_MAX:
            return _refusal(503)
        transport = request.transport
        ws = web.WebSocketResponse[Literal[False]](
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
        """Say goodbye to everybody who is still there."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.close(), name="fleet goodbye")


def _refusal(status: int, headers: dict[str, str] | None = None) -> web.Response:
    response = web.Response(status=status, headers=headers)
    response.force_close()
    return response


class _TurnedAway(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it, but are made alike.
        cast("asyncio.Transport", transport).abort()


@asynccontextmanager
async def listen_websocket(
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: ServerTls | None = None,
) -> AsyncGenerator[WebSocketListener]:
    """Listen while in the block; raises `ListenFailed`, and `InvalidRequest` for TLS files.

    What is not loopback needs a token and TLS, or raises `InvalidRequest`, too.

    When the block ends, links that were not closed are.
    """
    check_door(host, has_token=token is not None, has_tls=tls is not None)
    context = None if tls is None else server_context(tls)
    sock = await _bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    scheme = "ws" if tls is None else "wss"
    listener = WebSocketListener(f"{scheme}://{shown}:{sock.getsockname()[1]}", token)
    http = web.Server(
        listener.on_request,
        access_log=None,
        keepalive_timeout=HANDSHAKE_S,  # Also the time for a first head.
        max_headers=HEAD_FIELDS_MAX,
        lingering_time=0.0,  # Nobody who is let in has a body.
        auto_decompress=False,
    )

    def make_protocol() -> asyncio.Protocol:
        return http() if len(http.connections) < CONNECTIONS_MAX else _TurnedAway()

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
            await http.shutdown(GOODBYE_S)


async def _bind(host: str, port: int) -> socket.socket:
    url = f"tcp://{host}:{port}"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # `localhost` is both; IPv4 is what people type.
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
    """A client's end, with what it does not show."""

    @property
    def transport(self) -> asyncio.Transport | None:
        connection = self._response.connection
        return None if connection is None else connection.transport

    def let_go(self) -> None:
        self._response.close()


async def connect_websocket(
    endpoint: str, token: str | None = None, ca: Path | None = None
) -> WebSocketLink:
    """Raises `ConnectFailed`, in bounded time. `ca` is trusted instead of the usual roots."""
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
            raise ConnectFailed(f"{endpoint}: it closed at once")
    except (ClientError, OSError, ValueError) as exc:
        raise ConnectFailed(f"{endpoint}: {_why_not(exc, scheme)}") from exc
    finally:
        # The link needs only its connection, which belongs to the connector.
        session.detach()
    return WebSocketLink(ws, transport, ws.let_go)


def _check_endpoint(endpoint: str, *, has_token: bool) -> str:
    """Its scheme; raises `ConnectFailed`."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConnectFailed(f"{endpoint}: {_NO_ADDRESS}") from None
    if parts.username is not None:
        raise ConnectFailed("an endpoint has no user and password in it; a token is given apart")
    if not is_address:
        raise ConnectFailed(f"{endpoint}: {_NO_ADDRESS}")
    if has_token and not may_show_token(parts.scheme, parts.hostname or ""):
        raise ConnectFailed(f"{endpoint}: a token is shown over wss://, or on this machine")
    return parts.scheme


async def _refuse_redirect(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """A token is for the address it was given with."""
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise ClientError("it sent us elsewhere")
    return response


def _why_not(exc: Exception, scheme: str) -> str:
    """In one line, which repeats nothing of what a stranger answered."""
    match exc:
        case InvalidURL():
            return _NO_ADDRESS
        case WSServerHandshakeError(status=401):
            return "the token was refused"
        case WSServerHandshakeError(status=status):
            return f"it answered {status}"
        case ClientResponseError():
            return "it does not answer as a WebSocket server does"
        case (
            ServerDisconnectedError()
            | ConnectionResetError()
            | ClientConnectorError(os_error=ConnectionResetError())
        ):
            return f"it hung up, as if it did not expect {scheme}://"
        case ClientConnectorCertificateError(certificate_error=inner):
            return f"its certificate is not trusted: {reason_of(inner)}"
        case ClientConnectorError(os_error=ssl.SSLError() as inner):
            return f"it speaks no TLS, or another one: {reason_of(inner)}"
        case ClientConnectorError(os_error=inner):
            return f"nobody listens there: {inner.strerror or reason_of(inner)}"
        case TimeoutError():
            return f"no answer within {CONNECT_S:g} s"
        case _:
            return reason_of(exc)
