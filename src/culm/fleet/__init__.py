"""Sub-agents: workers that take assignments over a link, and parents that give them.

`serve` makes a worker of an executor, `connect` is a parent's way to one. What they need is
imported when it is asked for: whoever needs only the frames does not pay for the rest.
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
    from culm.fleet.host.callbacks import DenyAll, WorkerAsk
    from culm.fleet.host.peer import WorkerPeer
    from culm.fleet.host.run_control import RunControl
    from culm.fleet.protocol.frames import RunSpec
    from culm.fleet.worker_server.base import Mode, ServeInTurn, ServeMany, ServeOnce

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
    "host.callbacks": ("DenyAll", "WorkerAsk"),
    "host.peer": ("WorkerPeer",),
    "host.run_control": ("RunControl",),
    "protocol.frames": ("RunSpec",),
    "worker_server.base": ("ServeInTurn", "ServeMany", "ServeOnce"),
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
    """Take assignments until `mode` (`One()` if none is given) says that it is over.

    `tls` is a certificate and its key, as PEM files. `on_ready` is told the endpoint once parents
    can connect. What is not loopback needs a token and TLS. Raises `ListenFailed`, `NobodyCame`,
    and `InvalidRequest` for a door that stands open or a TLS file that cannot be used.
    """
    from culm.clock import LoopClock
    from culm.fleet.transport.tls import ServerTls
    from culm.fleet.transport.websocket import listen_websocket
    from culm.fleet.worker_server.base import ServeOnce, ServingSettings
    from culm.fleet.worker_server.modes import serve_on
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
    """A worker that takes runs until the block ends; raises `ConnectFailed`.

    `ca` is a PEM file that is trusted instead of the usual roots.
    """
    from culm.clock import LoopClock
    from culm.fleet.host.peer import WorkerPeer
    from culm.fleet.transport.websocket import connect_websocket

    link = await connect_websocket(endpoint, token, ca)
    try:
        yield WorkerPeer(link, LoopClock())
    finally:
        await link.close()
