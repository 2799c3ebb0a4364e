"""The HTTP application: routes, the gate before them, and the bounds around them."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from culm.server.auth import GATE, Gate, check_gate
from culm.server.deadlines import DEADLINES, HEAD_S, Deadlines, note_head
from culm.server.listen import BACKLOG, Listener, UnixAddress
from culm.server.problems import answer_problems
from culm.server.routes import agent, sessions, system, workspaces
from culm.server.routes.base import REGISTRY
from culm.workspace.registry import Registry

KEEPALIVE_S = 120.0  # A Crush client keeps connections for 90 s and does not retry a lost POST.
SHUTDOWN_TIMEOUT_S = 5.0
HEADER_BYTES_MAX = 32 << 10


def make_app(registry: Registry, gate: Gate) -> web.Application:
    app = web.Application(middlewares=[note_head, answer_problems, check_gate])
    app[DEADLINES] = Deadlines()
    app[REGISTRY] = registry
    app[GATE] = gate
    for module in (system, workspaces, sessions, agent):
        app.add_routes(module.ROUTES)
    return app


@asynccontextmanager
async def open_http(
    app: web.Application, listeners: Sequence[Listener], tls: ssl.SSLContext | None
) -> AsyncGenerator[None]:
    """Serve on every listener while in the block."""
    runner = web.AppRunner(
        app,
        # A client that leaves ends its own handler and nothing else: what changes state is
        # owned by a workspace or the store, and awaited shielded.
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        access_log=None,
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
    )
    await runner.setup()
    assert runner.server is not None, "set up just now"
    loop = asyncio.get_running_loop()
    accept = partial(app[DEADLINES].accept, runner.server)
    servers: list[asyncio.Server] = []
    try:
        for listener in listeners:
            if isinstance(listener.address, UnixAddress):
                server = await loop.create_unix_server(accept, sock=listener.sock, backlog=BACKLOG)
            else:
                server = await loop.create_server(
                    accept,
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
        await runner.cleanup()
