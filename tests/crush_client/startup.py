"""Finding or starting a server, as a Crush client does: the state machine of crush-wire §2.6.

Owns everything before the first `POST /v1/workspaces`, and the replacement of a server that
answers it with 503. TCP skips all of it. The caller starts the process.
"""

import asyncio
import errno
import fcntl
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from tests.crush_client.api import Api, CallError, StatusError, probe
from tests.crush_client.golang import Record, encode, items, mapping, record, to_json
from tests.crush_client.transport import Request, Transport, TransportError, UnixHost, parse_host
from tests.crush_client.types import WORKSPACE, check_config

LIVENESS_S = 0.2
SPAWN_PROBE_S = 0.2
HEALTH_S = 0.1
HEALTH_EVERY_S = 0.1
READY_S = 10.0
VANISH_TRIES, VANISH_EVERY_S = 20, 0.1
CREATE_TRIES = 3

Sleep = Callable[[float], Awaitable[None]]


class NotReady(Exception):
    """No server answered /v1/health in time: `crush` prints this and ends."""


@dataclass
class Startup:
    """The start-up state machine; `trail` records every decision in order."""

    host: str
    cache: Path
    spawn: Callable[[], Awaitable[None]]  # Starts a server and does not wait for it.
    version: str = "v0.80.0"
    build_id: str = "abc123"
    sleep: Sleep = asyncio.sleep
    ready_s: float = READY_S  # CRUSH_SERVER_READY_TIMEOUT.
    trail: list[str] = field(default_factory=list[str])

    @property
    def path(self) -> Path | None:
        """The socket; None for TCP, where all of this is skipped."""
        host = parse_host(self.host)
        return host.path if isinstance(host, UnixHost) else None

    @property
    def lock_folder(self) -> Path:
        return self.cache / f"server-{re.sub(r'[^A-Za-z0-9._-]', '_', self.host)}"

    async def ensure(self) -> None:
        """Return when a server is ready; raises `NotReady`."""
        if (path := self.path) is None:
            self.trail.append("tcp")
            return
        if await self._has_live_socket(path) and await self._keeps_running_server(path):
            await self._wait_ready()
        else:
            await self._spawn()

    async def replace(self) -> None:
        """Replace a server that answered 503: wait until its socket is gone and start another."""
        assert self.path is not None, "a TCP client has nothing to start"
        await self._wait_vanished(self.path)
        await self._spawn()

    # --- finding a server

    async def _has_live_socket(self, path: Path) -> bool:
        try:
            path.stat()
        except FileNotFoundError:
            self.trail.append("no socket")
            return False
        except OSError:
            self.trail.append("stat failed")
            self._unlink(path)
            return False
        try:
            async with asyncio.timeout(LIVENESS_S):
                _, writer = await asyncio.open_unix_connection(str(path))
        except OSError as exc:  # Includes a timeout, which means that a server is there.
            if exc.errno in (errno.ECONNREFUSED, errno.ENOENT):
                self.trail.append("stale socket")
                self._unlink(path)
                return False
        else:
            writer.close()  # Without sending a byte.
            with suppress(OSError):
                await writer.wait_closed()
        return True

    async def _keeps_running_server(self, path: Path) -> bool:
        async with self._transport() as transport:
            try:
                info = record((await probe(transport, 2)).value)
            except CallError:
                self.trail.append("no version")
                return False
            if self._is_ours(info):
                self.trail.append("same version")
                return True
            if not await self._request_shutdown(transport):
                self.trail.append("reuse")
                return True
        await self._wait_vanished(path)
        return False

    def _is_ours(self, info: Record) -> bool:
        return (info.text("version"), info.text("build_id")) == (self.version, self.build_id)

    async def _request_shutdown(self, transport: Transport) -> bool:
        """Ask a server of another version to exit; returns True if it agreed."""
        match await self._control(transport, "shutdown_if_idle"):
            case 200:
                return True
            case 400:  # An old server: it knows only `shutdown` and does not check if it is idle.
                try:
                    workspaces = await Api(transport, "").call(6)
                except CallError:
                    return False
                return not items(workspaces) and await self._control(transport, "shutdown") == 200
            case _:
                return False

    async def _control(self, transport: Transport, command: str) -> int:
        """Send a control command; returns the status, or 0 without a response."""
        body, headers = encode({"command": command}), {"Content-Type": "text/plain"}
        try:
            answer = await transport.exchange(Request("POST", "/v1/control", body, headers))
        except TransportError:
            return 0
        self.trail.append(f"{command} {answer.status}")
        return answer.status

    async def _wait_vanished(self, path: Path) -> None:
        for _ in range(VANISH_TRIES):
            if not path.exists():
                break
            await self.sleep(VANISH_EVERY_S)
        self._unlink(path)  # In any case, even if a server still listens there.

    def _unlink(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            self.trail.append("unlink")
        with suppress(OSError):
            path.unlink(missing_ok=True)

    # --- starting a server

    async def _spawn(self) -> None:
        # Held until the new server answers, so a second client waiting here finds it.
        async with self._start_lock():
            if await self._is_healthy(SPAWN_PROBE_S):
                self.trail.append("no spawn")
                return
            self.trail.append("spawn")
            await self.spawn()
            await self._wait_ready()

    @asynccontextmanager
    async def _start_lock(self) -> AsyncGenerator[None]:
        self.lock_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock_folder / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    async def _wait_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.ready_s
        while not await self._is_healthy(HEALTH_S):
            if loop.time() >= deadline_s:
                raise NotReady(f"server at {self.host} is not ready after {self.ready_s} s")
            await self.sleep(HEALTH_EVERY_S)
        self.trail.append("ready")

    async def _is_healthy(self, budget_s: float) -> bool:
        async with self._transport() as transport:
            try:
                async with asyncio.timeout(budget_s):
                    answer = await transport.exchange(Request("GET", "/v1/health"))
            except (TransportError, TimeoutError):
                return False
        return 200 <= answer.status < 300

    @asynccontextmanager
    async def _transport(self) -> AsyncGenerator[Transport]:
        transport = Transport(parse_host(self.host))
        try:
            yield transport
        finally:
            await transport.aclose()


@dataclass(frozen=True, slots=True)
class Project:
    """The workspace options of the command line."""

    path: str
    yolo: bool = False
    debug: bool = False
    data_dir: str = ""
    env: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()

    def body(self, client_id: str, version: str) -> dict[str, object]:
        request = record(WORKSPACE.zero())
        request.values |= {
            "path": self.path,
            "yolo": self.yolo,
            "debug": self.debug,
            "data_dir": self.data_dir,
            "version": version,
            "client_id": client_id,
            "env": list(self.env),
            "channels": list(self.channels),
        }
        return mapping(to_json(request))


def new_id() -> str:
    """A UUIDv4; every client process generates its own."""
    return str(UUID(bytes=os.urandom(16), version=4))


async def create_workspace(api: Api, project: Project, startup: Startup) -> Record:
    """Send `POST /v1/workspaces`; a server that is shutting down is replaced, at most twice."""
    body = project.body(api.client_id, startup.version)
    for attempt in range(1, CREATE_TRIES + 1):
        try:
            workspace = record(await api.call(7, body))
        except StatusError as exc:
            if exc.status != 503 or startup.path is None or attempt == CREATE_TRIES:
                raise
            startup.trail.append("create 503")
            await startup.replace()
        else:
            check_config(workspace.find_record("config"))
            api.workspace_id = workspace.text("id")
            return workspace
    raise AssertionError("the last attempt returns or raises")
