"""Servers for the simulated client: one in this process, or real processes that it starts.

Owns the servers it starts. Authentication is off on TCP: a Crush client sends no credentials.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from culm.assemble import open_server
from culm.ids import Ids
from culm.settings import Settings
from culm.tools.base import Tool
from tests.crush_client.startup import Project, Startup
from tests.flow.conftest import FlowServer
from tests.live.harness import SERVE, ProcessServer, open_process
from tests.support import WAIT_S, FakeClock, serve_options


class Pauses:
    """A fake sleep that takes no time; it records the durations and can be held."""

    def __init__(self) -> None:
        self.requested: list[float] = []
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.requested.append(seconds)
        self._changed.set()
        await asyncio.sleep(0)
        await self._open.wait()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def until(self, count: int) -> None:
        """Wait until `count` sleeps were requested."""
        while len(self.requested) < count:
            self._changed.clear()
            await self._changed.wait()


async def never_spawn() -> None:
    raise AssertionError("a client tried to start a server although one is running")


def startup_for(url: str, folder: Path) -> Startup:
    """The start-up of a client whose server is running."""
    return Startup(url, folder / "cache", never_spawn)


def project(flow: FlowServer, name: str = "project") -> Project:
    return Project(str(flow.directory(name)), env=("HOME=/home/dev", "LANG=C.UTF-8"))


@asynccontextmanager
async def open_flow(
    folder: Path,
    kind: str,
    *,
    host: str = "",
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
    tools: Mapping[str, Tool] | None = None,
) -> AsyncGenerator[FlowServer]:
    """Open a flow server as tests/flow does, without a token; `host` reuses an address."""
    with tempfile.TemporaryDirectory(prefix="culm-") as short:  # A socket path must be short.
        fresh = f"unix://{short}/s" if kind == "unix" else "tcp://127.0.0.1:0"
        clock, flows = FakeClock(), list[FlowServer]()
        served = serve_options(folder, host or fresh, settings=settings, config=config)
        options = replace(served, auth=False)

        def on_leave() -> None:
            for flow in flows:
                flow.left.set()

        async with open_server(options, clock, Ids(), on_leave, tools) as server:
            flows.append(FlowServer(server, clock, folder))
            try:
                yield flows[0]
            finally:
                async with asyncio.timeout(WAIT_S):
                    await flows[0].aclose()


class Launcher:
    """Starts `culm serve` whenever a client asks for it. Created by `open_launcher`."""

    def __init__(self, folder: Path, url: str, tasks: asyncio.TaskGroup) -> None:
        self.folder = folder
        self.url = url
        self.started: list[ProcessServer] = []
        self._tasks = tasks
        self._over = asyncio.Event()

    async def spawn(self) -> None:
        """Start a server and return immediately, as the client does."""
        self._tasks.create_task(self._serve(), name=f"server {len(self.started) + 1}")

    def startup(self) -> Startup:
        return Startup(self.url, self.folder / "cache", self.spawn)

    async def _serve(self) -> None:
        args = ("--data-dir", str(self.folder / "data"), "--host", self.url, "--no-auth")
        async with open_process(self.folder, *SERVE, *args) as process:
            self.started.append(process)
            await self._over.wait()

    def close(self) -> None:
        self._over.set()


@asynccontextmanager
async def open_launcher(folder: Path, url: str = "") -> AsyncGenerator[Launcher]:
    """Open a launcher; when the block ends, every server it started has ended."""
    async with asyncio.TaskGroup() as tasks:
        launcher = Launcher(folder, url or f"unix://{folder}/s", tasks)
        try:
            yield launcher
        finally:
            launcher.close()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def open_script(folder: Path, script: Script) -> AsyncGenerator[str]:
    """Serve a socket with a script, for behavior that our server never shows; yields its URL."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError):  # The client left first.
            await script(reader, writer)

    path = folder / "script"
    server = await asyncio.start_unix_server(accept, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read a request, with its body if it has one."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: ([0-9]+)", head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")
