"""An event stream survives its connections and detects a dead one."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from culm.client.follower import Follower, open_follower
from culm.client.http import open_client
from culm.client.mirror import Mirror
from culm.client.stream import EventStream
from culm.server.listen import Address
from tests.flow.conftest import open_flow
from tests.flow.drive import READ_BYTES, connect, until
from tests.support import WAIT_S, contract

IDLE_S = 0.3  # Heartbeats come every 15 s, so nothing arrives by itself in this time.


class Relay:
    """A proxy to a server that can go silent without closing. Created by `open_relay`."""

    def __init__(self, target: Address) -> None:
        self.is_silent = False
        self.lost = b""  # Everything that was not passed on.
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await connect(self._target)
        self._writers += [writer, back]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(reader, back), name="out")
            tasks.create_task(self._pump(there, writer), name="in")

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                if self.is_silent:
                    self.lost += data
                else:
                    writer.write(data)
        writer.close()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def open_relay(target: Address) -> AsyncGenerator[tuple[Relay, str]]:
    relay = Relay(target)
    with tempfile.TemporaryDirectory(prefix="culm-") as short:
        server = await asyncio.start_unix_server(relay.carry, f"{short}/s")
        try:
            async with server:
                yield relay, f"unix://{short}/s"
        finally:
            relay.hang_up()
            await asyncio.sleep(0.01)


@contract("CLIENT-3")
async def test_silent_connection_is_replaced_without_losing_events(
    tmp_path: Path,
) -> None:
    async with (
        open_flow(tmp_path, "unix") as flow,
        open_relay(flow.server.addresses[0]) as (relay, url),
        open_client(url) as client,
        asyncio.timeout(WAIT_S),
    ):
        remote = await client.open_workspace(flow.directory())
        mirror, stream = Mirror(), EventStream(remote, idle_s=IDLE_S)

        async def load() -> None:
            mirror.load(await remote.snapshot("*"))

        async with open_follower(Follower(mirror, stream, load)) as follower:
            await follower.connected()
            relay.is_silent = True
            # Events are lost from here on: the connection is open but dead.
            direct = await (await flow.client()).open_workspace(flow.directory())
            session = await direct.create_session("unheard")
            await until(lambda: session.id.encode() in relay.lost)
            relay.is_silent = False  # For new connections; the old one has lost its events.
            await follower.until(lambda mirror: session.id in mirror.sessions)
            assert stream.connections > 1
