"""The socket file: a live one is kept, a stale one replaced, none left behind."""

import asyncio
import fcntl
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from tests.live.harness import (
    SERVE,
    ProcessServer,
    make_directory,
    open_client_of,
    open_process,
    open_process_server,
    run_serve,
)
from tests.support import WAIT_S, contract


async def assert_serves(server: ProcessServer) -> None:
    async with open_client_of(server) as client, asyncio.timeout(WAIT_S):
        await client.health()


async def test_socket_left_by_a_killed_server_is_replaced_at_the_next_start(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with open_process_server(folder, *host) as killed:
        await killed.kill()
    assert stat.S_ISSOCK((folder / "s").lstat().st_mode), "a kill leaves the file"
    async with open_process_server(folder, *host) as server:
        await assert_serves(server)


async def test_second_server_at_the_same_socket_is_refused(folder: Path) -> None:
    url = f"unix://{folder}/s"
    async with open_process_server(folder, "--host", url) as first:
        second = await run_serve(folder, "--host", url)
        assert (second.status, second.stdout) == (1, "")
        assert f"culm: cannot listen on {url}" in second.stderr
        await assert_serves(first)
    assert "hint: " in second.stderr


async def test_socket_of_another_program_is_not_replaced(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        before = path.lstat().st_ino
        ended = await run_serve(folder, "--host", f"unix://{path}")
        assert (ended.status, ended.stdout) == (1, "")
        assert "hint: " in ended.stderr
        assert path.lstat().st_ino == before
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_regular_file_at_the_socket_path_is_not_deleted(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    ended = await run_serve(folder, "--host", f"unix://{path}")
    assert (ended.status, ended.stdout) == (1, "")
    assert path.read_text() == "precious"


async def test_failed_host_leaves_no_socket_of_another_host(folder: Path) -> None:
    (folder / "taken").write_text("precious")
    hosts = ("--host", f"unix://{folder}/s", "--host", f"unix://{folder}/taken")
    ended = await run_serve(folder, *hosts)
    assert (ended.status, ended.stdout) == (1, "")
    assert not (folder / "s").exists()


async def test_symlink_at_the_socket_path_keeps_its_target(folder: Path) -> None:
    (folder / "file").write_text("precious")
    (folder / "s").symlink_to(folder / "file")
    ended = await run_serve(folder, "--host", f"unix://{folder}/s")
    assert ended.status == 1
    assert (folder / "file").read_text() == "precious"


async def test_exit_keeps_another_servers_socket_at_the_same_path(folder: Path) -> None:
    path = folder / "s"
    async with open_process_server(folder, "--host", f"unix://{path}") as server:
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            assert (await server.end()).status == 0
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))


def is_free(path: Path) -> bool:
    """True if its server has removed its socket and released its lock."""
    with path.with_name(f"{path.name}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return not path.exists()


@contract("EXC-17")
async def test_exiting_server_does_not_remove_its_successors_socket(
    folder: Path,
) -> None:
    """A client that sees the socket vanish starts the next server at once.

    The first one is delayed by a request that never ends. It has given up its path and closed
    its socket by then, so the file system may give the successor's file the same inode.
    """
    # No log file is made in between, which would take the free inode.
    host = ("--host", f"unix://{folder}/s", "--log-level", "error")
    async with open_process_server(folder, *host) as exiting:
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(str(folder / "s"))
            half.send(b"POST /v1/workspaces HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await assert_serves(exiting)  # The half request is being handled now.
            exiting.process.terminate()
            async with asyncio.timeout(WAIT_S):
                while not is_free(folder / "s"):
                    await asyncio.sleep(0.01)
            exiting.process.send_signal(signal.SIGSTOP)  # Its shutdown does not time out meanwhile.
            async with open_process_server(
                folder, *host, "--data-dir", str(folder / "other")
            ) as successor:
                before = (folder / "s").lstat().st_ino
                was_waiting = exiting.process.returncode is None
                half.close()
                exiting.process.send_signal(signal.SIGCONT)
                ended = await exiting.wait(2 * WAIT_S)
                assert (was_waiting, ended.status) == (True, 0)
                assert (folder / "s").exists(), "the exiting server removed its successor's socket"
                assert (folder / "s").lstat().st_ino == before
                await assert_serves(successor)


async def test_private_folder_writable_by_others_is_refused_or_restricted(
    folder: Path,
) -> None:
    private = folder / f"culm-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    status = await start_and_end(folder)
    assert status == 1 or stat.S_IMODE(private.stat().st_mode) & 0o022 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
async def test_private_folder_of_another_user_is_refused(folder: Path, mode: int) -> None:
    private = folder / f"culm-{os.getuid()}"
    private.mkdir()
    os.chown(private, 12345, 12345)
    private.chmod(mode)  # The owner of a sticky folder may replace all files in it.
    assert await start_and_end(folder) == 1


async def start_and_end(folder: Path) -> int:
    """Start a server on its default socket and return its exit status, after a signal if needed."""
    async with open_process(folder, *SERVE, "--data-dir", str(folder / "data")) as server:
        await server.until_ended_or(lambda: bool(server.urls))
        if server.process.returncode is None:
            server.process.terminate()
        return (await server.wait()).status


@contract("INV-28")
async def test_data_directory_in_use_is_refused_with_the_pid_of_its_server(
    folder: Path,
) -> None:
    data = ("--data-dir", str(folder / "data"))
    async with (
        open_process_server(folder, "--host", f"unix://{folder}/a", *data) as first,
        open_process_server(folder, "--host", f"unix://{folder}/b", *data) as second,
        open_client_of(first) as one,
        open_client_of(second) as two,
    ):
        await one.open_workspace(make_directory(folder))
        with pytest.raises(RequestRefused) as refused:
            await two.open_workspace(make_directory(folder, "other"))
        assert (refused.value.status, refused.value.code) == (409, "data_locked")
        assert f"pid {first.process.pid}" in refused.value.message
        await first.kill()
        await two.open_workspace(make_directory(folder, "other"))  # The lock died with its owner.
