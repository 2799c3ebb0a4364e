"""A follower meets a server that is not ready: it waits and reconnects."""

import asyncio
import fcntl
from pathlib import Path

from culm.client.follower import open_mirror
from culm.client.http import open_client
from tests.live.harness import (
    RESUME_S,
    assert_same,
    caught_up,
    find_database,
    make_directory,
    open_client_of,
    open_process_server,
    open_proxy,
)
from tests.support import WAIT_S, contract


@contract("EXC-13")
async def test_follower_waits_while_the_data_directory_is_locked_after_a_restart(
    folder: Path,
) -> None:
    """A handover: the old server has given up its socket and is still closing its database."""
    host = ("--host", f"unix://{folder}/s")
    async with open_process_server(folder, *host) as old, open_client_of(old) as client:
        remote = await client.open_workspace(make_directory(folder))
        async with open_mirror(remote) as follower:
            async with asyncio.timeout(WAIT_S):
                await follower.connected()
            await old.kill()
            with (folder / "data" / "culm.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                async with open_process_server(folder, *host):
                    await asyncio.sleep(2.0)  # It has retried at least once by now.
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    async with asyncio.timeout(RESUME_S):
                        await follower.until(lambda _: follower.stream.connections == 2)
                    await remote.create_session("after the handover")
                    final = await remote.snapshot("*")
                    await caught_up(follower, final)
                    assert_same(follower.mirror, final)


@contract("EXC-13")
async def test_follower_retries_the_snapshot_when_its_resync_is_cut_off(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host) as old,
        open_proxy(folder, old.url) as proxy,
        open_client(proxy.url) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        await remote.create_session("lost with its database")
        async with open_mirror(remote) as follower:
            async with asyncio.timeout(WAIT_S):
                await follower.until(lambda mirror: len(mirror.sessions) == 1)
                await follower.connected()
            await old.kill()
            for path in find_database(folder).parent.iterdir():
                path.unlink()  # A new epoch: the old cursor is invalid.
            proxy.refuses = b"/snapshot?"
            async with open_process_server(folder, *host) as server:
                async with asyncio.timeout(RESUME_S):
                    while proxy.refused < 2:  # aiohttp itself retries once.
                        await asyncio.sleep(0.02)
                proxy.refuses = b""
                async with open_client_of(server) as other:
                    there = await other.open_workspace(make_directory(folder))
                    await there.create_session("a new beginning")
                    final = await there.snapshot("*")
                await caught_up(follower, final)
                assert_same(follower.mirror, final)
