"""A server in this process, reached over a unix socket or TCP."""

import asyncio
import tempfile
import zlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from culm.assemble import Server, open_server
from culm.client.http import Client, open_client
from culm.fleet.host.base import Launcher
from culm.ids import ClientId, Ids
from culm.settings import Settings
from culm.tools.base import Tool
from culm.workspace.workspace import LiveWorkspace
from tests.support import BREADTH, WAIT_S, FakeClock, serve_options

KINDS = ("unix", "tcp")


class FlowServer:
    """The server under test with its fake clock; creates clients."""

    def __init__(self, server: Server, clock: FakeClock, folder: Path) -> None:
        self.server = server
        self.clock = clock
        self.folder = folder
        self.left = asyncio.Event()  # Set by the shutdown callback.
        self.leave_calls = 0
        self._clients = AsyncExitStack()

    @property
    def url(self) -> str:
        return str(self.server.addresses[0])

    async def client(self, client_id: ClientId | None = None) -> Client:
        opening = open_client(self.url, token=self.server.token, client_id=client_id)
        return await self._clients.enter_async_context(opening)

    def workspace(self, workspace_id: str) -> LiveWorkspace:
        """The live workspace object, for tests that must act inside the server."""
        return self.server.registry.get(workspace_id)

    def directory(self, name: str = "project") -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    async def run_ready(self) -> None:
        """Let every ready task run, including writes."""
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def aclose(self) -> None:
        await self._clients.aclose()


@asynccontextmanager
async def open_flow(
    folder: Path,
    kind: str,
    *,
    settings: Settings | None = None,
    clock: FakeClock | None = None,
    config: Mapping[str, object] | None = None,
    tools: Mapping[str, Tool] | None = None,
    launcher: Launcher | None = None,
) -> AsyncGenerator[FlowServer]:
    clock = clock or FakeClock()
    with tempfile.TemporaryDirectory(prefix="culm-") as short:  # A socket's path must be short.
        unix, tcp = f"unix://{short}/s", "tcp://127.0.0.1:0"
        hosts = {"unix": (unix,), "tcp": (tcp,), "both": (unix, tcp)}[kind]
        flows: list[FlowServer] = []

        def on_leave() -> None:
            for flow in flows:
                flow.leave_calls += 1
                flow.left.set()

        options = serve_options(folder, *hosts, settings=settings, config=config)
        async with open_server(options, clock, Ids(), on_leave, tools, launcher) as server:
            flow = FlowServer(server, clock, folder)
            flows.append(flow)
            try:
                yield flow
            finally:
                async with asyncio.timeout(WAIT_S):
                    await flow.aclose()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of socket: both for tests marked `sockets`, else one chosen by the test's name.

    Every test must pass with both; `./check --broad` runs both.
    """
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    is_given = any("kind" in mark.args[0] for mark in marks)
    if "kind" in metafunc.fixturenames and not is_given:
        name = metafunc.function.__name__.encode()
        one = KINDS[zlib.crc32(name) % len(KINDS)]
        is_both = BREADTH > 1 or metafunc.definition.get_closest_marker("sockets") is not None
        metafunc.parametrize("kind", KINDS if is_both else [one], indirect=True)


@pytest.fixture
async def flow(tmp_path: Path, kind: str) -> AsyncGenerator[FlowServer]:
    async with open_flow(tmp_path, kind) as server:
        yield server
