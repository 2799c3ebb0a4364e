"""The socket's file: a live one is respected, a stale one replaced, none left behind."""

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


async def test_a_socket_left_by_a_killed_server_is_replaced_at_the_next_start(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with open_process_server(folder, *host) as killed:
        await killed.kill()
    assert stat.S_ISSOCK((folder / "s").lstat().st_mode), "a kill leaves the file"
    async with open_process_server(folder, *host) as server:
        await assert_serves(server)


async def test_the_socket_of_a_running_culm_is_respected(folder: Path) -> None:
    url = f"unix://{folder}/s"
    async with open_process_server(folder, "--host", url) as first:
        second = await run_serve(folder, "--host", url)
        assert (second.status, second.stdout) == (1, "")
        assert f"culm: cannot listen on {url}" in second.stderr
        await assert_serves(first)
    assert "hint: " in second.stderr


async def test_the_socket_of_a_running_stranger_is_respected(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        before = path.lstat().st_ino
        ended = await run_serve(folder, "--host", f"unix://{path}")
        assert (ended.status, ended.stdout) == (1, "")
        assert "hint: " in ended.stderr
        assert path.lstat().st_ino == before
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(path))


async def test_a_regular_file_at_the_path_is_never_deleted(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    ended = await run_serve(folder, "--host", f"unix://{path}")
    assert (ended.status, ended.stdout) == (1, "")
    assert path.read_text() == "precious"


async def test_when_one_of_two_hosts_is_taken_nothing_is_left_of_the_other(folder: Path) -> None:
    (folder / "taken").write_text("precious")
    hosts = ("--host", f"unix://{folder}/s", "--host", f"unix://{folder}/taken")
    ended = await run_serve(folder, *hosts)
    assert (ended.status, ended.stdout) == (1, "")
    assert not (folder / "s").exists()


async def test_a_link_at_the_path_costs_nobody_his_file(folder: Path) -> None:
    (folder / "file").write_text("precious")
    (folder / "s").symlink_to(folder / "file")
    ended = await run_serve(folder, "--host", f"unix://{folder}/s")
    assert ended.status == 1
    assert (folder / "file").read_text() == "precious"


async def test_another_server_s_socket_at_our_path_outlives_our_exit(folder: Path) -> None:
    path = folder / "s"
    async with open_process_server(folder, "--host", f"unix://{path}") as server:
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            assert (await server.end()).status == 0
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(str(path))


def is_free(path: Path) -> bool:
    """Whether its server has removed its socket and freed its lock."""
    with path.with_name(f"{path.name}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return not path.exists()


@contract("EXC-17")
async def test_a_successor_at_the_path_of_a_server_that_is_still_leaving_keeps_its_socket(
    folder: Path,
) -> None:
    """A client that sees the socket vanish starts the next server at once.

    The first one is held up by a request that never ends. It has given its path away and closed
    its socket by then, so the file system may give the successor's file the very same inode.
    """
    # No log file is made in between, which would take the free inode.
    host = ("--host", f"unix://{folder}/s", "--log-level", "error")
    async with open_process_server(folder, *host) as leaving:
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(str(folder / "s"))
            half.send(b"POST /v1/workspaces HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await assert_serves(leaving)  # Behind the half request on the loop: that is in work.
            leaving.process.terminate()
            async with asyncio.timeout(WAIT_S):
                while not is_free(folder / "s"):
                    await asyncio.sleep(0.01)
            leaving.process.send_signal(signal.SIGSTOP)  # Its time to leave in does not run out.
            async with open_process_server(
                folder, *host, "--data-dir", str(folder / "other")
            ) as successor:
                before = (folder / "s").lstat().st_ino
                held_up = leaving.process.returncode is None
                half.close()
                leaving.process.send_signal(signal.SIGCONT)
                ended = await leaving.wait(2 * WAIT_S)
                assert (held_up, ended.status) == (True, 0)
                assert (folder / "s").exists(), "the leaving server removed its successor's socket"
                assert (folder / "s").lstat().st_ino == before
                await assert_serves(successor)


async def test_a_private_folder_that_others_can_write_to_is_not_used_as_it_is(
    folder: Path,
) -> None:
    private = folder / f"culm-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    status = await start_and_end(folder)
    assert status == 1 or stat.S_IMODE(private.stat().st_mode) & 0o022 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
async def test_a_private_folder_that_belongs_to_somebody_else_is_refused(
    folder: Path, mode: int
) -> None:
    private = folder / f"culm-{os.getuid()}"
    private.mkdir()
    os.chown(private, 12345, 12345)
    private.chmod(mode)  # The owner of a sticky folder may replace anybody's files in it.
    assert await start_and_end(folder) == 1


async def start_and_end(folder: Path) -> int:
    """The exit status of a server on its default socket: at once, or after a signal."""
    async with open_process(folder, *SERVE, "--data-dir", str(folder / "data")) as server:
        await server.until_ended_or(lambda: bool(server.urls))
        if server.process.returncode is None:
            server.process.terminate()
        return (await server.wait()).status


@contract("INV-28")
async def test_a_second_server_cannot_open_a_data_directory_in_use_and_says_whose_it_is(
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
