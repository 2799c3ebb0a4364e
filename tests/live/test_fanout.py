"""Many streams on one workspace: an abrupt end of some does not affect the others."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from culm.ids import Ids
from tests.live.harness import (
    PUBLISHER,
    RESUME_S,
    ProcessServer,
    make_directory,
    open_client_of,
    open_process_server,
    seq_of,
)
from tests.live.publisher import Order
from tests.support import contract

pytestmark = pytest.mark.alone

STREAMS = 200
VICTIMS = 120
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero: close sends a reset, not a FIN.
VIEWS = ("delta", "crush")


@dataclass
class RawStream:
    """One event stream as bytes; it dies after `dies_after` numbered events, if at all."""

    response: aiohttp.ClientResponse
    dies_after: int | None
    seqs: list[int] = field(default_factory=list[int])
    killed: bool = False

    async def read(self, until: asyncio.Future[int]) -> None:
        """Record the numbers of durable events until the last one has arrived."""
        rest = b""
        try:
            async for data in self.response.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                self.seqs += [seq for event in events if (seq := _seq(event)) is not None]
                if self.dies_after is not None and len(self.seqs) >= self.dies_after:
                    self.kill()
                    return
                if until.done() and self.seqs and self.seqs[-1] >= until.result():
                    return
        except aiohttp.ClientError as exc:
            raise AssertionError("a stream that stayed was dropped") from exc

    def kill(self) -> None:
        self.killed = True
        connection = self.response.connection
        assert connection is not None, "it is open"
        transport = connection.transport
        assert transport is not None, "it is open"
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        transport.abort()


def _seq(event: bytes) -> int | None:
    """The number in `id: epoch.7` (delta view) or in a last `"cursor":"epoch.7"` (Crush view)."""
    event = event.lstrip(b"\n")  # The Crush view's heartbeat is a bare newline.
    if event.startswith(b"id: "):
        return seq_of(event[4 : event.index(b"\n")].decode())
    head, found, tail = event.rpartition(b',"cursor":"')
    if not found or not tail.endswith(b'"}') or not head.startswith(b"data: "):
        return None
    return seq_of(tail[:-2].decode())


@asynccontextmanager
async def open_http(
    server: ProcessServer,
) -> AsyncGenerator[list[tuple[aiohttp.ClientSession, str]]]:
    """Plain HTTP over the server's unix socket and over its port."""
    unix, tcp = server.urls
    headers = {"Authorization": f"Bearer {server.token}"}
    connector = aiohttp.UnixConnector(unix.removeprefix("unix://"), limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as by_unix,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as by_tcp,
    ):
        yield [(by_unix, "http://culm.localhost"), (by_tcp, f"http{tcp.removeprefix('tcp')}")]


@contract("INV-18", "INV-66")
async def test_streams_miss_nothing_while_others_are_killed_at_random(
    folder: Path,
) -> None:
    chance = random.Random(18)
    # Without deletes every event keeps its body, so that even a replay skips no number.
    order = Order(seed=18, sessions=6, messages=20, deletes=False)
    hosts = ("--host", f"unix://{folder}/s", "--host", "tcp://127.0.0.1:0")
    async with (
        open_process_server(folder, *hosts, program=PUBLISHER) as server,
        open_client_of(server) as client,
        open_http(server) as connections,
        AsyncExitStack() as stack,
    ):
        remote = await client.open_workspace(make_directory(folder))
        first = (await remote.snapshot()).cursor
        ids = Ids(18)
        streams: list[RawStream] = []
        for number in range(STREAMS):
            session, base = connections[number % 2]
            query = f"client_id={ids.client()}&view={VIEWS[number // 2 % 2]}&cursor={first}"
            response = await stack.enter_async_context(
                session.get(f"{base}{remote.path(f'/events?{query}')}", timeout=None)
            )
            assert response.status == 200
            streams.append(RawStream(response, chance.randrange(600) if number < VICTIMS else None))

        last: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(2 * RESUME_S), asyncio.TaskGroup() as readers:
            for number, stream in enumerate(streams):
                readers.create_task(stream.read(last), name=f"stream {number}")
            server.send_line(order.line())
            await server.until_line(f"end {remote.id} {order.seed}", 2 * RESUME_S)
            # One more event wakes every reader that has already caught up.
            last.set_result(seq_of((await remote.snapshot()).cursor) + 1)
            await remote.create_session("the last one")

        wanted = list(range(seq_of(first) + 1, last.result() + 1))
        assert len(wanted) > 600, "every victim died in the middle"
        assert sum(stream.killed for stream in streams) == VICTIMS
        for number, stream in enumerate(streams):
            received = wanted[: len(stream.seqs)] if stream.killed else wanted
            wrong = [pair for pair in zip(received, stream.seqs, strict=False) if len({*pair}) > 1]
            assert not wrong, f"stream {number}: (wanted, received) {wrong[:3]}"
            assert len(stream.seqs) == len(received), f"stream {number} ended early"
        await client.health()
