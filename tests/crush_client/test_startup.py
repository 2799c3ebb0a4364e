"""Finding or starting a server: every branch of the start-up, most with real processes."""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.crush_client.api import StatusError
from tests.crush_client.client import open_tui
from tests.crush_client.servers import (
    Pauses,
    never_spawn,
    open_flow,
    open_launcher,
    open_script,
    project,
    read_request,
    startup_for,
)
from tests.crush_client.startup import CREATE_TRIES, VANISH_TRIES, NotReady, Project, Startup
from tests.flow.conftest import FlowServer
from tests.live.harness import START_S, make_directory
from tests.support import WAIT_S

pytestmark = pytest.mark.sockets

REUSED = ["shutdown_if_idle 409", "reuse", "ready"]


def make_stale(path: Path) -> None:
    """Leave a socket file without a listener, as a killed server does."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


# --- real processes


@pytest.mark.live
async def test_server_is_started_if_there_is_no_socket(folder: Path) -> None:
    async with asyncio.timeout(START_S), open_launcher(folder) as launcher:
        startup = launcher.startup()
        async with open_tui(Project(str(make_directory(folder))), startup) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            assert tui.calls.log == []
        assert startup.trail == ["no socket", "spawn", "ready"]
        assert len(launcher.started) == 1


@pytest.mark.live
async def test_stale_socket_is_removed_and_a_server_is_started(folder: Path) -> None:
    make_stale(folder / "s")
    async with asyncio.timeout(START_S), open_launcher(folder) as launcher:
        startup = launcher.startup()
        await startup.ensure()
        assert startup.trail == ["stale socket", "unlink", "spawn", "ready"]


@pytest.mark.live
async def test_killed_server_is_replaced_by_the_next_client(
    folder: Path,
) -> None:
    async with asyncio.timeout(2 * START_S), open_launcher(folder) as launcher:
        await launcher.startup().ensure()
        await launcher.started[0].kill()
        startup = launcher.startup()
        await startup.ensure()
        assert startup.trail == ["stale socket", "unlink", "spawn", "ready"]
        assert len(launcher.started) == 2


@pytest.mark.live
async def test_running_server_of_another_version_is_reused(folder: Path) -> None:
    async with asyncio.timeout(START_S), open_launcher(folder) as launcher:
        await launcher.startup().ensure()
        for _ in range(3):
            startup = launcher.startup()
            await startup.ensure()
            assert startup.trail == REUSED
        assert len(launcher.started) == 1
        assert launcher.started[0].process.returncode is None


@pytest.mark.live
async def test_two_clients_starting_at_once_start_one_server(folder: Path) -> None:
    async with asyncio.timeout(START_S), open_launcher(folder) as launcher:
        startups = [launcher.startup() for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            for startup in startups:
                tasks.create_task(startup.ensure(), name="client")
        assert sorted(startup.trail for startup in startups) == [
            ["no socket", "no spawn"],
            ["no socket", "spawn", "ready"],
        ]
        assert len(launcher.started) == 1


@pytest.mark.live
async def test_terminated_server_is_replaced_by_the_next_client(folder: Path) -> None:
    async with asyncio.timeout(2 * START_S), open_launcher(folder) as launcher:
        await launcher.startup().ensure()
        await launcher.started[0].end(signal.SIGTERM)
        startup = launcher.startup()
        await startup.ensure()
        assert startup.trail == ["no socket", "spawn", "ready"]


# --- a server in this process


async def test_running_server_refuses_shutdown_with_409_and_is_reused(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S):
        await startup.ensure()
    assert startup.trail in (REUSED, ["tcp"])
    assert not flow.left.is_set()


async def test_server_of_the_same_version_is_not_asked_to_shut_down(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_flow(tmp_path, "unix") as flow:
        first = startup_for(flow.url, tmp_path)
        async with open_tui(project(flow), first) as tui:
            info = await tui.api.get(2)
        same = startup_for(flow.url, tmp_path)
        same.version, same.build_id = info.text("version"), info.text("build_id")
        await same.ensure()
    assert same.trail == ["same version", "ready"]


async def test_silent_connections_do_not_disturb_a_client(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as tui:
        for _ in range(5):
            await startup_for(flow.url, flow.folder).ensure()
        await tui.polling.agent()
        assert tui.calls.log == []


async def test_server_shutting_down_is_replaced_at_the_same_socket(
    folder: Path,
) -> None:
    url = f"unix://{folder}/s"
    listening, leave, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(until: asyncio.Event) -> None:
        async with open_flow(folder, "unix", host=url):
            listening.set()
            await until.wait()

    async def sleep(seconds: float) -> None:
        leave.set()  # The socket disappears while the client waits for that.
        await asyncio.sleep(seconds)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:

        async def spawn() -> None:
            tasks.create_task(serve(over), name="new")

        tasks.create_task(serve(leave), name="old")
        await listening.wait()
        await request_shutdown(url)  # From now on it answers every create with 503.
        startup = Startup(url, folder / "cache", spawn, sleep=sleep)
        async with open_tui(Project(str(make_directory(folder))), startup) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            assert tui.calls.log == []
        over.set()
    assert startup.trail == [*REUSED, "create 503", "spawn", "ready"]


async def request_shutdown(url: str) -> None:
    """Request a shutdown as `culm` does; a Crush client cannot."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    body = b'{"command": "shutdown", "server": "culm"}'
    writer.write(b"POST /v1/control HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


# --- other servers


def answer(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class FakeServer:
    """A fake server with a table: the first answer whose key is in the request."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.requests: list[str] = []
        self._answers = answers

    async def script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = (await read_request(reader)).decode()
            self.requests.append(request.partition(" HTTP")[0])
            found = [a for key, a in self._answers.items() if key in request]
            writer.write(found[0] if found else answer(404))


HEALTHY = {"GET /v1/health": answer(204)}
VERSION = {"GET /v1/version": answer(500, b'{"version": "v1"} and more')}


@pytest.mark.parametrize(
    ("answers", "trail"),
    [
        ({"GET /v1/version": answer(200, b"not json")}, ["no version", "no spawn"]),
        ({"GET /v1/version": answer(200)}, ["no version", "no spawn"]),
        ({**VERSION, "shutdown_if_idle": answer(409)}, ["shutdown_if_idle 409", "reuse", "ready"]),
        ({**VERSION, "shutdown_if_idle": answer(500)}, ["shutdown_if_idle 500", "reuse", "ready"]),
        (
            {**VERSION, "shutdown_if_idle": answer(400), "GET /v1/workspaces": answer(500)},
            ["shutdown_if_idle 400", "reuse", "ready"],
        ),
        (
            {
                **VERSION,
                "shutdown_if_idle": answer(400),
                "GET /v1/workspaces": answer(200, b"[{}]"),
            },
            ["shutdown_if_idle 400", "reuse", "ready"],
        ),
        (
            {
                **VERSION,
                "shutdown_if_idle": answer(400),
                "GET /v1/workspaces": answer(200, b"[]"),
                '"shutdown"': answer(409),
            },
            ["shutdown_if_idle 400", "shutdown 409", "reuse", "ready"],
        ),
    ],
)
async def test_server_that_refuses_to_shut_down_is_reused(
    folder: Path, answers: dict[str, bytes], trail: list[str]
) -> None:
    fake = FakeServer({**answers, **HEALTHY})
    async with asyncio.timeout(WAIT_S), open_script(folder, fake.script) as url:
        startup = Startup(url, folder / "cache", never_spawn)
        await startup.ensure()
    assert startup.trail == trail


async def test_server_that_agreed_to_shut_down_loses_its_socket(
    folder: Path,
) -> None:
    answers = {**VERSION, **HEALTHY, "shutdown_if_idle": answer(200)}
    fake, pauses = FakeServer(answers), Pauses()
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        url = await stack.enter_async_context(open_script(folder, fake.script))

        async def spawn() -> None:
            await stack.enter_async_context(open_script(folder, fake.script))

        startup = Startup(url, folder / "cache", spawn, sleep=pauses)
        await startup.ensure()
    assert startup.trail == ["shutdown_if_idle 200", "unlink", "spawn", "ready"]
    assert pauses.requested == [0.1] * VANISH_TRIES


async def test_server_that_never_becomes_healthy_raises_not_ready(folder: Path) -> None:
    fake = FakeServer({**VERSION, "shutdown_if_idle": answer(409)})
    async with asyncio.timeout(WAIT_S), open_script(folder, fake.script) as url:
        startup = Startup(url, folder / "cache", never_spawn, ready_s=0)
        with pytest.raises(NotReady):
            await startup.ensure()


async def test_endless_503_replaces_the_server_twice_and_is_then_fatal(
    folder: Path,
) -> None:
    refusal = answer(503, b'{"message": "server is shutting down"}')
    answers = {
        **VERSION,
        **HEALTHY,
        "shutdown_if_idle": answer(409),
        "POST /v1/workspaces": refusal,
    }
    fake = FakeServer(answers)
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        url = await stack.enter_async_context(open_script(folder, fake.script))

        async def spawn() -> None:
            await stack.enter_async_context(open_script(folder, fake.script))

        startup = Startup(url, folder / "cache", spawn, sleep=Pauses())
        with pytest.raises(StatusError, match=r"^status code 503: server is shutting down$"):
            async with open_tui(Project("/p"), startup):
                pass
    assert startup.trail.count("create 503") == startup.trail.count("spawn") == CREATE_TRIES - 1
    assert fake.requests.count("POST /v1/workspaces") == CREATE_TRIES


async def test_socket_path_that_cannot_be_read_leads_to_a_spawn(folder: Path) -> None:
    (folder / "file").write_text("no folder")
    spawned: list[str] = []

    async def spawn() -> None:
        spawned.append("server")

    url = f"unix://{folder}/file/s"
    startup = Startup(url, folder / "cache", spawn, sleep=Pauses(), ready_s=0)
    with pytest.raises(NotReady):
        await startup.ensure()
    assert (startup.trail, spawned) == (["stat failed", "spawn"], ["server"])


def test_lock_folder_is_named_after_the_host(folder: Path) -> None:
    assert not os.path.lexists(folder / "cache")
    startup = Startup("unix:///run/a b.sock", folder / "cache", never_spawn)
    assert startup.lock_folder == folder / "cache" / "server-unix____run_a_b.sock"
