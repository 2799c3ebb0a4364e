"""`culm serve` as a script or a user sees it: its output, logs and exit status."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
import stat
from pathlib import Path

import pytest

from culm.cli.terminal.process import ECHO_S
from culm.client.follower import open_mirror
from tests.live.fleet_harness import find_processes, until
from tests.live.harness import (
    find_database,
    make_directory,
    open_client_of,
    open_process_server,
    run_process,
    run_serve,
)
from tests.support import WAIT_S, contract

LEAVES_SOON = ("--linger", "0.2", "--detach-grace", "0.2")
QUICK = (*LEAVES_SOON, "--create-grace", "0.2")  # For a client that opens no stream.


async def test_serve_prints_only_one_line_per_host_with_its_port(
    folder: Path,
) -> None:
    hosts = ("--host", f"unix://{folder}/s", "--host", "tcp://127.0.0.1:0")
    async with open_process_server(folder, *hosts) as server:
        unix, tcp = server.urls
        assert unix == f"unix://{folder}/s"
        assert tcp.startswith("tcp://127.0.0.1:")
        assert int(tcp.rpartition(":")[2]) > 0
        for host in (0, 1):
            async with open_client_of(server, host=host) as client:
                await client.health()
        ended = await server.end()
    assert ended.stdout == f"listening {unix}\nlistening {tcp}"


async def test_all_hosts_of_a_server_share_its_workspaces(folder: Path) -> None:
    hosts = ("--host", f"unix://{folder}/s", "--host", "tcp://127.0.0.1:0")
    async with (
        open_process_server(folder, *hosts) as server,
        open_client_of(server, host=0) as a,
        open_client_of(server, host=1) as b,
    ):
        here = await a.open_workspace(make_directory(folder))
        there = await b.open_workspace(make_directory(folder))
        async with open_mirror(there) as follower, asyncio.timeout(WAIT_S):
            session = await here.create_session("seen across")
            await follower.until(lambda mirror: session.id in mirror.sessions)


async def test_default_socket_is_in_the_runtime_directory_with_mode_0600(
    folder: Path,
) -> None:
    runtime = folder / "run"
    async with open_process_server(folder, env={"XDG_RUNTIME_DIR": str(runtime)}) as server:
        path = runtime / f"culm-{os.getuid()}.sock"
        assert server.urls == [f"unix://{path}"]
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with open_client_of(server) as client:
            await client.health()


async def test_without_runtime_directory_the_socket_is_in_a_private_temp_folder(
    folder: Path,
) -> None:
    async with open_process_server(folder) as server:
        private = folder / f"culm-{os.getuid()}"
        assert server.urls == [f"unix://{private}/culm.sock"]
        assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_server_with_status_0_and_leaves_no_socket(
    folder: Path, number: signal.Signals
) -> None:
    async with (
        open_process_server(folder, "--host", f"unix://{folder}/s") as server,
        open_client_of(server) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        async with client.stream(remote.path(f"/events?client_id={client.id}")) as answer:
            ended = await server.end(number)
            async with asyncio.timeout(WAIT_S):
                await answer.read()  # The open stream of a client has ended, too.
        assert (ended.status, ended.stderr.count("Traceback")) == (0, 0)
        assert not (folder / "s").exists()


@contract("INV-23")
async def test_server_exits_0_after_its_last_client_left_and_linger_passed(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with open_process_server(folder, *host, *LEAVES_SOON) as server:
        async with open_client_of(server) as client:
            remote = await client.open_workspace(make_directory(folder))
            async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
                await follower.connected()
                await asyncio.sleep(0.8)  # Longer than both together, while a client is attached.
                await client.health()
        ended = await server.wait()
    assert ended.status == 0
    assert not (folder / "s").exists()


@contract("INV-9")
async def test_server_exits_when_its_only_client_never_opened_a_stream(folder: Path) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, *QUICK) as server,
        open_client_of(server) as client,
    ):
        await client.open_workspace(make_directory(folder))
        ended = await server.wait()
    assert ended.status == 0


async def test_second_signal_ends_a_slow_shutdown_at_once(folder: Path) -> None:
    async with (
        open_process_server(folder, "--host", f"unix://{folder}/s") as server,
        open_client_of(server) as client,
    ):
        await client.open_workspace(make_directory(folder))
        # Another process locks the database: the last writes of the workspace wait for it.
        holder = sqlite3.connect(find_database(folder), isolation_level=None)
        try:
            holder.execute("BEGIN IMMEDIATE")
            server.process.send_signal(signal.SIGTERM)
            await server.until(lambda: any("leaving" in line for line in server.errors))
            await asyncio.sleep(2 * ECHO_S)  # Sooner, it would count as the same request.
            ended = await server.end(signal.SIGINT)
        finally:
            holder.close()
    assert ended.status == 128 + signal.SIGINT
    assert not (folder / "s").exists()


async def test_taken_port_exits_1_with_the_reason_and_a_hint(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        ended = await run_serve(folder, "--host", url)
    assert (ended.status, ended.stdout) == (1, "")
    assert f"culm: cannot listen on {url}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hint: " in ended.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--no-such-option",),
        ("--linger", "-1"),
        ("stray",),
    ],
)
async def test_wrong_usage_exits_2(folder: Path, args: tuple[str, ...]) -> None:
    ended = await run_serve(folder, *args)
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == "hint: see `culm serve --help`"


async def test_invalid_host_is_refused_with_the_expected_form(
    folder: Path,
) -> None:
    ended = await run_serve(folder, "--host", "localhost:80")
    assert ended.status == 2
    assert "'localhost:80' is not an address" in ended.stderr
    assert "hint: use unix:///absolute/path or tcp://host:port" in ended.stderr


@contract("EXC-21")
async def test_public_address_without_tls_or_token_is_refused(folder: Path) -> None:
    for more in ((), ("--no-auth",)):
        ended = await run_serve(folder, "--host", "tcp://0.0.0.0:0", *more)
        assert (ended.status, ended.stdout) == (1, "")
        assert "hint: " in ended.stderr


async def test_log_lines_go_to_stderr_and_to_the_state_directory(folder: Path) -> None:
    async with open_process_server(folder, "--host", f"unix://{folder}/s") as server:
        ended = await server.end()
    assert "culm.cli.commands.serve: leaving" in ended.stderr
    written = (folder / "state" / "culm" / "culm.log").read_text()
    assert written.rstrip("\n") == ended.stderr


async def test_with_log_json_every_log_line_is_one_json_object(folder: Path) -> None:
    args = ("--host", f"unix://{folder}/s", "--log-json", "--log-level", "debug")
    async with (
        open_process_server(folder, *args, *QUICK) as server,
        open_client_of(server) as client,
    ):
        await client.open_workspace(make_directory(folder))
        ended = await server.wait()
    written = (folder / "state" / "culm" / "culm.log").read_text().splitlines()
    for lines in (ended.stderr.splitlines(), written):
        entries = [json.loads(line) for line in lines]
        assert all(entry.keys() >= {"time", "level", "logger", "message"} for entry in entries)
        assert "leaving" in [entry["message"] for entry in entries]


async def test_settings_come_from_the_config_file(folder: Path) -> None:
    config = folder / "settings.json"
    config.write_text('{"create_grace_s": 0.2, "linger_s": 0.2}')
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, "--config", str(config)) as server,
        open_client_of(server) as client,
    ):
        await client.open_workspace(make_directory(folder))
        assert (await server.wait()).status == 0


async def test_option_overrides_the_config_file(folder: Path) -> None:
    config = folder / "settings.json"
    config.write_text('{"create_grace_s": 0.2, "linger_s": 3600}')
    host = ("--host", f"unix://{folder}/s")
    both = ("--config", str(config), "--linger", "0.2")
    async with (
        open_process_server(folder, *host, *both) as server,
        open_client_of(server) as client,
    ):
        await client.open_workspace(make_directory(folder))
        assert (await server.wait()).status == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"linger_s": 1, "lingre_s": 2}', "lingre_s"),
        ('{"linger_s": "long"}', "linger_s"),
        ("linger_s = 1", "settings.json:1: not valid JSON"),
    ],
)
async def test_invalid_config_file_is_refused_with_the_reason(
    folder: Path, text: str, named: str
) -> None:
    config = folder / "settings.json"
    config.write_text(text)
    ended = await run_serve(folder, "--config", str(config))
    assert (ended.status, ended.stdout) == (2, "")
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("args", [("--help",), ("serve", "--help")])
async def test_help_imports_neither_aiohttp_nor_uvloop(folder: Path, args: tuple[str, ...]) -> None:
    ended = await run_process(folder, "-X", "importtime", "-m", "culm", *args)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert ended.status == 0
    assert "culm.cli.main" in imported
    assert not imported & {"aiohttp", "uvloop", "sqlite3"}


async def test_workers_are_prepared_before_the_first_agent(folder: Path) -> None:
    async with open_process_server(folder, "--host", f"unix://{folder}/s") as server:
        async with open_client_of(server) as client:
            await client.open_workspace(make_directory(folder))
            pid = server.process.pid
            await until(lambda: bool(find_processes(pid).pids("zygote")), lambda: pid)
        processes = find_processes(pid)
        await server.end()
    assert processes.alive() == []
