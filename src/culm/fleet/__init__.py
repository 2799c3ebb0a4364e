"""Sub-agents: workers that accept assignments over a link, and hosts that send them.

`serve` turns an executor into a worker, `connect` connects a host to one. Their dependencies are
imported on first use, so that a user of the frames alone does not load the rest.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from culm.fleet.executor import (
        CANCELLED,
        CancelToken,
        EventSink,
        Executor,
        Outcome,
        RunHost,
        SteerInbox,
        completed,
        failed,
    )
    from culm.fleet.host.caller import DenyAll, RunControl, WorkerAsk
    from culm.fleet.host.run_driver import WorkerPeer
    from culm.fleet.protocol.frames import RunSpec
    from culm.fleet.worker_server.connection import Mode, ServeInTurn, ServeMany, ServeOnce

__all__ = [
    "CANCELLED",
    "CancelToken",
    "DenyAll",
    "EventSink",
    "Executor",
    "Outcome",
    "RunControl",
    "RunHost",
    "RunSpec",
    "ServeInTurn",
    "ServeMany",
    "ServeOnce",
    "SteerInbox",
    "WorkerAsk",
    "WorkerPeer",
    "completed",
    "connect",
    "failed",
    "serve",
]

_HOMES: Final = {
    "executor": (
        *("CANCELLED", "CancelToken", "EventSink", "Executor", "Outcome", "RunHost", "SteerInbox"),
        *("completed", "failed"),
    ),
    "host.caller": ("DenyAll", "RunControl", "WorkerAsk"),
    "host.run_driver": ("WorkerPeer",),
    "protocol.frames": ("RunSpec",),
    "worker_server.connection": ("ServeInTurn", "ServeMany", "ServeOnce"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"culm.fleet.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def serve(
    executor: "Executor",
    *,
    mode: "Mode | None" = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: tuple[Path, Path] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Accept assignments until `mode` (default `ServeOnce()`) ends.

    `tls` is a certificate and its key, as PEM files. `on_ready` is called with the endpoint once
    hosts can connect. An address that is not loopback needs a token and TLS. Raises `ListenFailed`,
    `ConnectTimeout`, and `InvalidRequest` for an unprotected address or an unusable TLS file.
    """
    from culm.clock import LoopClock
    from culm.fleet.transport.tls import ServerTls
    from culm.fleet.transport.websocket import listen_websocket
    from culm.fleet.worker_server.connection import ServeOnce, serve_on
    from culm.fleet.worker_server.run import ServingSettings
    from culm.ids import Ids

    files = None if tls is None else ServerTls(*tls)
    async with listen_websocket(host, port, token, files) as listener:
        if on_ready is not None:
            on_ready(listener.endpoint)
        await serve_on(listener, executor, mode or ServeOnce(), ServingSettings(LoopClock(), Ids()))


@asynccontextmanager
async def connect(
    endpoint: str, *, token: str | None = None, ca: Path | None = None
) -> AsyncGenerator["WorkerPeer"]:
    """Connect to a worker that accepts runs until the block ends; raises `ConnectFailed`.

    `ca` is a PEM file that is trusted instead of the usual roots.
    """
    from culm.clock import LoopClock
    from culm.fleet.host.run_driver import WorkerPeer
    from culm.fleet.transport.websocket import connect_websocket

    link = await connect_websocket(endpoint, token, ca)
    try:
        yield WorkerPeer(link, LoopClock())
    finally:
        await link.close()
