"""The HTTP server: the API on its listeners, with limits for connections."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from culm.server.api import Api
from culm.server.auth import RequestAuth
from culm.server.connection import HEAD_BYTES_MAX, HEAD_S, Connections
from culm.server.listen import BACKLOG, Listener, UnixAddress
from culm.server.routes import ROUTES
from culm.workspace.registry import Registry

KEEPALIVE_S = 120.0  # Crush clients keep connections for 90 s and do not retry a lost POST.
SHUTDOWN_TIMEOUT_S = 2.5  # aiohttp waits this long for a handler, and again after its cancel.
LINGER_S = 3.0  # A client that still sends a refused body has this long to read the response.


def make_api(registry: Registry, auth: RequestAuth) -> Api:
    return Api(registry, auth, ROUTES)


@asynccontextmanager
async def open_http(
    api: Api, listeners: Sequence[Listener], tls: ssl.SSLContext | None
) -> AsyncGenerator[None]:
    """Serve on every listener while in the block."""
    connections = Connections(
        api.handle,
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
