"""The event loop against scripted streams: clean ends, hangs and backpressure."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.crush_client.api import Api, NoAnswer, StatusError
from tests.crush_client.events import CHANNEL_EVENTS, EventLoop, State
from tests.crush_client.lines import EVENTS
from tests.crush_client.servers import Pauses, open_script, read_request
from tests.crush_client.transport import Body, Transport, parse_host
from tests.support import WAIT_S

LINE = EVENTS["config_changed"].encode()
CLOSE_DELIMITED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
STALL_S = 0.2  # A slower write is blocked by its reader.
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class CountingOwner:
    """A stream owner without a screen, which counts its calls."""

    def __init__(self, api: Api) -> None:
        self.recreates = 0
        self.recoveries = 0
        self.shown: list[str] = []
        self.fails = False
        self._api = api

    async def subscribe(self) -> Body:
        return await self._api.subscribe()

    async def unsubscribe(self, body: Body) -> None:
        await self._api.transport.drop(body)

    async def recreate(self) -> None:
        self.recreates += 1
        if self.fails:
            raise NoAnswer("no")

    async def recovered(self) -> None:
        self.recoveries += 1

    def show(self, text: str) -> None:
        self.shown.append(text)


@asynccontextmanager
async def open_event_loop(
    folder: Path, answer: Callable[[int], bytes], *, fails: bool = False
) -> AsyncGenerator[tuple[EventLoop, CountingOwner, Pauses]]:
    """Run a loop whose n-th subscription gets `answer(n)` and is then closed."""
    count = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        await read_request(reader)
        count += 1
        writer.write(answer(count))
        await writer.drain()
        writer.close()

    async with open_script(folder, script) as url, asyncio.timeout(WAIT_S):
        pauses = Pauses()
        owner = CountingOwner(Api(Transport(parse_host(url)), "c"))
        owner.fails = fails
        loop = EventLoop(owner, pauses)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(loop.run(), name="loop")
            try:
                yield loop, owner, pauses
            finally:
                running.cancel()


def refused(status: int) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\n{{}}".encode()


@pytest.mark.parametrize(
    "body",
    [CLOSE_DELIMITED + LINE, CHUNKED + f"{len(LINE):x}\r\n".encode() + LINE + b"\r\n0\r\n\r\n"],
)
async def test_clean_end_leads_to_a_new_subscription_after_250_ms(
    tmp_path: Path, body: bytes
) -> None:
    async with open_event_loop(tmp_path, lambda _: body) as (loop, owner, pauses):
        await loop.until(lambda: loop.connections == 3)
        assert owner.recoveries >= 2
        assert set(pauses.requested) == {0.25}
        assert (await loop.channel.get()).type == "config_changed"


@pytest.mark.parametrize(
    "body",
    [
        CHUNKED + f"{len(LINE):x}\r\n".encode() + LINE + b"\r\n",
        CHUNKED + b"ffff\r\n" + LINE,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + LINE,
    ],
)
async def test_truncated_body_hangs_the_client_forever(tmp_path: Path, body: bytes) -> None:
    async with open_event_loop(tmp_path, lambda _: body) as (loop, owner, pauses):
        await loop.until(lambda: loop.state is State.HUNG)
        assert (loop.connections, owner.recoveries, pauses.requested) == (1, 0, [])


async def test_reset_connection_hangs_the_client_forever() -> None:
    streaming = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CLOSE_DELIMITED)
        await streaming.wait()
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        loop = EventLoop(CountingOwner(Api(Transport(parse_host(url)), "c")), Pauses())
        running = tasks.create_task(loop.run(), name="loop")
        await loop.until(lambda: loop.state is State.STREAMING)
        streaming.set()
        await loop.until(lambda: loop.state is State.HUNG)
        running.cancel()


@pytest.mark.parametrize("status", [400, 409, 500, 503])
async def test_other_refusals_are_retried_with_pauses_doubling_up_to_10_s(
    tmp_path: Path, status: int
) -> None:
    async with open_event_loop(tmp_path, lambda _: refused(status)) as (loop, owner, pauses):
        await pauses.until(9)
        assert pauses.requested[:9] == [0.25, 0.5, 1, 2, 4, 8, 10, 10, 10]
        assert (owner.recreates, loop.state) == (0, State.DEGRADED)


async def test_pauses_are_reset_after_a_connection(tmp_path: Path) -> None:
    def answer(count: int) -> bytes:
        return CLOSE_DELIMITED if count == 4 else refused(500)

    async with open_event_loop(tmp_path, answer) as (_, owner, pauses):
        await pauses.until(7)
        assert pauses.requested[:7] == [0.25, 0.5, 1, 0.25, 0.25, 0.5, 1]
        assert owner.recoveries == 1


async def test_missing_workspace_is_recreated_without_a_pause(tmp_path: Path) -> None:
    def answer(count: int) -> bytes:
        return refused(404) if count == 1 else CLOSE_DELIMITED

    async with open_event_loop(tmp_path, answer) as (loop, owner, pauses):
        await loop.until(lambda: loop.connections == 1)
        assert (owner.recreates, owner.recoveries) == (1, 1)
        assert 0.25 not in pauses.requested[:-1]


async def test_20_failed_recreates_show_one_toast(tmp_path: Path) -> None:
    async with open_event_loop(tmp_path, lambda _: refused(404), fails=True) as (_, owner, pauses):
        await pauses.until(25)
        assert owner.shown == ["can't restore the workspace"]
        assert pauses.requested[:8] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]


async def test_client_stops_reading_at_100_unconsumed_events(
    tmp_path: Path,
) -> None:
    halted = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CLOSE_DELIMITED)
        try:
            while True:  # Until the other side stops reading and the buffers are full.
                writer.write(500 * LINE)
                async with asyncio.timeout(STALL_S):
                    await writer.drain()
        except TimeoutError:
            halted.set()

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        loop = EventLoop(CountingOwner(Api(Transport(parse_host(url)), "c")), Pauses())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(loop.run(), name="loop")
            await halted.wait()
            assert (loop.channel.qsize(), loop.state) == (CHANNEL_EVENTS, State.STREAMING)
            for _ in range(2 * CHANNEL_EVENTS):
                await loop.channel.get()  # It continues where it stopped.
            running.cancel()


async def test_refused_subscription_has_its_reason(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        body = b'{"message": "workspace not found"}'
        writer.write(b"HTTP/1.1 404 X\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        with pytest.raises(StatusError, match=r"^status code 404: workspace not found$"):
            await api.subscribe()
        await api.transport.aclose()
