"""What `make run` shows: one server, two clients on this directory, one event that reaches both."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.http import RemoteWorkspace, open_client
from culm.client.stream import open_mirror

READY_S = 20.0
SHOW_S = 10.0


@asynccontextmanager
async def open_server(folder: Path) -> AsyncGenerator[str]:
    """Start `culm serve` on a socket of its own; end it when the block ends."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm", "serve", "--log-level", "warning"),
        *("--host", f"unix://{folder}/culm.sock", "--data-dir", str(folder / "data")),
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None, "asked for a pipe"
    try:
        async with asyncio.timeout(READY_S):
            line = (await server.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit("the server did not start")
        print(line)
        yield line.removeprefix("listening ")
    finally:
        if server.returncode is None:
            server.terminate()
        status = await server.wait()
        print(f"server ended with status {status}")


async def show(name: str, workspace: RemoteWorkspace, ready: asyncio.Barrier, title: str) -> None:
    async with open_mirror(workspace) as follower, asyncio.timeout(SHOW_S):
        await follower.connected()
        await ready.wait()
        await follower.until(lambda m: any(s.title == title for s in m.sessions.values()))
        session = next(s for s in follower.mirror.sessions.values() if s.title == title)
        print(f"client {name} sees session {session.title!r} at cursor {follower.mirror.cursor}")


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        async with (
            open_server(Path(name)) as url,
            open_client(url) as first,
            open_client(url) as second,
        ):
            here = await first.open_workspace(".")
            there = await second.open_workspace(".")
            print(f"both clients are in workspace {here.id}: {here.id == there.id}")
            ready = asyncio.Barrier(3)
            async with asyncio.TaskGroup() as clients:
                clients.create_task(show("1", here, ready, "Hello from client 1"))
                clients.create_task(show("2", there, ready, "Hello from client 1"))
                await ready.wait()
                await here.create_session("Hello from client 1")


if __name__ == "__main__":
    asyncio.run(main())
