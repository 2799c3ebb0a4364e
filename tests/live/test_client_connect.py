"""Clients that find, start, replace or restart their server, with real processes."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm import __version__
from culm.client.connection import connect
from culm.client.follower import open_mirror
from culm.client.http import Client, open_client
from culm.client.launch import is_listening
from culm.client.run import open_asked
from culm.errors import InvalidRequest, NoServer
from tests.live.harness import (
    RESUME_S,
    ProcessServer,
    assert_same,
    caught_up,
    environment,
    make_directory,
    open_process_server,
)
from tests.live.machine import open_machine, server_pid
from tests.live.test_run_command import starts
from tests.support import WAIT_S, contract

CLIENTS = 10


@asynccontextmanager
async def open_connected(
    folder: Path, host: str = "", token_file: Path | None = None
) -> AsyncGenerator[Client]:
    """Connect as a program of a user whose machine is `folder`."""
    connecting = connect(
        host or f"unix://{folder}/s",
        token_file=token_file,
        data_dir=folder / "data",
        env=environment(folder, {"CULM_NO_DISCOVERY": "1"}),
    )
    async with asyncio.timeout(RESUME_S), connecting as client:
        yield client


@asynccontextmanager
async def open_version(folder: Path, version: str) -> AsyncGenerator[ProcessServer]:
    """A server that reports another version."""
    program = f"import culm; culm.__version__ = {version!r}; from culm.cli.main import main; main()"
    place = ("--host", f"unix://{folder}/s")
    async with open_process_server(folder, *place, program=("-c", program, "serve")) as server:
        yield server


# --- starting


@contract("CLIENT-2")
async def test_ten_clients_at_once_over_a_stale_socket_start_one_server(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s"))
    async with open_machine(folder):
        ready = asyncio.Barrier(CLIENTS)

        async def ask() -> str:
            async with open_connected(folder) as client:
                await ready.wait()
                return (await client.version()).version

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask()) for _ in range(CLIENTS)]
        assert [one.result() for one in asked] == [__version__] * CLIENTS
        assert starts(folder) == 1


# --- another version


@contract("CLIENT-2")
async def test_older_server_without_workspaces_is_replaced(folder: Path) -> None:
    async with open_version(folder, "0.0.1") as old, open_machine(folder):
        async with open_connected(folder) as client:
            assert (await client.version()).version == __version__
        assert (await old.wait()).status == 0


@contract("CLIENT-2")
async def test_older_server_with_workspaces_is_used_as_it_is(folder: Path) -> None:
    async with open_version(folder, "0.0.1") as old, open_busy(old):
        async with open_connected(folder) as client:
            assert (await client.version()).version == "0.0.1"
        assert old.process.returncode is None


@pytest.mark.parametrize(
    ("version", "hint"), [("devel", "it is busy: stop it when"), ("99.0.0", "upgrade this culm")]
)
async def test_incompatible_server_that_is_busy_or_newer_is_refused_with_a_hint(
    folder: Path, version: str, hint: str
) -> None:
    async with open_version(folder, version) as other, open_busy(other):
        with pytest.raises(NoServer, match=f"is culm {version}, this is culm") as refused:
            await enter_and_leave(folder)
        assert refused.value.hint.startswith(hint)
        assert other.process.returncode is None


async def test_idle_server_of_a_newer_major_version_is_not_replaced(
    folder: Path,
) -> None:
    async with open_version(folder, "99.0.0") as newer:
        with pytest.raises(NoServer, match="is culm 99"):
            await enter_and_leave(folder)
        assert newer.process.returncode is None


@asynccontextmanager
async def open_busy(server: ProcessServer) -> AsyncGenerator[None]:
    """Keep a workspace open on a server."""
    async with open_client(server.url) as other:
        await other.open_workspace(make_directory(server.folder))
        yield


async def enter_and_leave(folder: Path, host: str = "", token_file: Path | None = None) -> None:
    async with open_connected(folder, host, token_file):
        pass


# --- over TCP


async def test_tcp_server_is_not_started_and_a_wrong_token_is_refused(
    folder: Path,
) -> None:
    with pytest.raises(NoServer, match="Connection refused") as failed:
        await enter_and_leave(folder, "tcp://127.0.0.1:1")
    assert failed.value.hint == "start one with `culm serve --host tcp://127.0.0.1:1`"
    wrong = folder / "wrong"
    wrong.write_text("wrong\n")
    async with open_process_server(folder, "--host", "tcp://127.0.0.1:0") as server:
        with pytest.raises(NoServer, match="refused the request") as refused:
            await enter_and_leave(folder, server.url, wrong)
        assert refused.value.hint == "pass the token file of that server with --token-file"
        with pytest.raises(InvalidRequest, match="cannot read"):
            await enter_and_leave(folder, server.url, folder / "nowhere")
        await enter_and_leave(folder, server.url, folder / "data" / "token")
        await enter_and_leave(folder, server.url)  # The default token file.


async def test_http_server_that_is_not_culm_is_refused(folder: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<p>Welcome</p>")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NoServer, match="is not a culm server"):
            await enter_and_leave(folder, f"tcp://127.0.0.1:{port}")


# --- restarting


@contract("CLIENT-3", "CLIENT-5")
async def test_follower_restarts_a_killed_server(folder: Path) -> None:
    async with open_machine(folder), open_connected(folder) as client:
        workspace = await client.open_workspace(make_directory(folder))
        before = await workspace.create_session("before")
        async with open_mirror(workspace) as follower:
            await follower.connected()
            killed = server_pid(folder)
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(RESUME_S):
                while follower.stream.connections < 2:
                    await asyncio.sleep(0.02)
            after = await workspace.create_session("after")
            snapshot = await workspace.snapshot("*")
            await caught_up(follower, snapshot)
            assert_same(follower.mirror, snapshot)
            assert {before.id, after.id} <= {*follower.mirror.sessions}
        assert server_pid(folder) != killed
        assert starts(folder) == 2


async def test_run_of_a_killed_server_is_reported_interrupted_by_the_next_one(
    folder: Path,
) -> None:
    async with open_machine(folder), open_connected(folder) as client:
        workspace = await client.open_workspace(make_directory(folder))
        async with open_asked(workspace, "run `sleep 60`", approve="allow") as asked:
            async with asyncio.timeout(WAIT_S):
                while not await workspace.processes():
                    await asyncio.sleep(0.02)
            os.kill(server_pid(folder), signal.SIGKILL)
            answer = await asked.answer()
        assert (answer.is_complete, answer.run.outcome) == (False, "interrupted")
        assert "offline model" in answer.text
        assert starts(folder) == 2


@contract("CLIENT-5")
async def test_server_stopped_by_sigterm_is_not_restarted(folder: Path) -> None:
    async with open_machine(folder), open_connected(folder) as client:
        workspace = await client.open_workspace(make_directory(folder))
        async with open_mirror(workspace) as follower:
            await follower.connected()
            os.kill(server_pid(folder), signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while (folder / "s").exists():
                    await asyncio.sleep(0.02)
            await client.revive()
            assert not is_listening(f"unix://{folder}/s")
        assert starts(folder) == 1
