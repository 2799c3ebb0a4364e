"""The reading process: many raw streams, with every byte checked.

The first stream is parsed after the round; all others must have the same bytes.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from typing import cast
from zlib import crc32

import uvloop

from bench import frames
from bench.ipc import STEP_TIMEOUT_S, Command, Ready, Received, answer, commands

CONNECTING_MAX = 50  # At once, to stay within a listen backlog.


class Fan:
    """All streams of one publisher."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.reads = 0
        self.writes = 0
        self.timed = False
        self.latencies_ns: list[int] = []
        self._arrived = 0
        self._acks: asyncio.Transport | None = None

    async def open(self, where: Ready, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._acks, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", where.ack_port)
        for first in range(0, count, CONNECTING_MAX):
            fresh: list[Stream] = []
            for _ in range(min(CONNECTING_MAX, count - first)):
                _, stream = await loop.create_connection(
                    lambda: Stream(self, where), "127.0.0.1", where.port
                )
                fresh.append(stream)
            self.streams += fresh
            for stream in fresh:
                await stream.live.wait()

    def begin(self, *, timed: bool) -> None:
        """Count a stream that has the start of a round; the last one starts it."""
        self._arrived += 1
        if self._arrived == len(self.streams):
            self.timed = timed
            self.reads = self.writes = 0
            self.latencies_ns.clear()
            for stream in self.streams:
                stream.reset()
            self._acknowledge()

    def arrived(self) -> None:
        """Count a stream that has a whole burst; after the last one acknowledge it."""
        self._arrived += 1
        if self._arrived == len(self.streams):
            self._acknowledge()

    def _acknowledge(self) -> None:
        assert self._acks is not None, "opened before anything arrives"
        self._arrived = 0
        self.writes += len(self.streams)
        self._acks.write(b".")

    def report(self) -> Received:
        first = self.streams[0]
        events, wrong = frames.count_wrong(bytes(first.kept))
        wrong += sum((s.crc, s.size) != (first.crc, first.size) for s in self.streams)
        # Beginning a round is acknowledged too; in a timed one every event is a write.
        writes = events * len(self.streams) if self.timed else self.writes - len(self.streams)
        late = sorted(self.latencies_ns) or [0]
        for stream in self.streams:
            stream.counting = False
        return Received(
            events=events,
            wrong=wrong,
            frame_bytes=first.size / max(1, events),
            reads_per_write=self.reads / max(1, writes),
            p50_us=late[len(late) // 2] / 1000,
            p99_us=late[len(late) * 99 // 100] / 1000,
        )


class Stream(asyncio.Protocol):
    def __init__(self, fan: Fan, where: Ready) -> None:
        self.live = asyncio.Event()
        self.counting = False
        self.size = self.crc = 0
        self.kept = bytearray()
        self._fan = fan
        self._where = where
        self._tail = b""

    def reset(self) -> None:
        self.counting = True
        self.size = self.crc = 0
        self.kept.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        path = self._where.path.format(client_id=uuid.uuid4())
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._where.port}\r\n\r\n"
        # uvloop's transports are not subclasses of what they implement.
        cast("asyncio.Transport", transport).write(head.encode())

    def data_received(self, data: bytes) -> None:
        # The end of a burst is at the end of a read, but a read may be cut anywhere.
        end = data[-frames.END_BYTES :]
        if len(end) < frames.END_BYTES:
            end = self._tail + end
        self._tail = end
        if not self.counting:
            self._prelude(data, end)
            return
        fan = self._fan
        fan.reads += 1
        self.size += len(data)
        self.crc = crc32(data, self.crc)
        if self is fan.streams[0]:
            self.kept += data
        if fan.timed:
            self._time(data)
        if frames.LAST_END in end:
            self._tail = b""
            fan.arrived()

    def _prelude(self, data: bytes, end: bytes) -> None:
        if not self.live.is_set() and b"data: " in data:
            self.live.set()  # The state on attaching, or an event: it is live from here on.
        if frames.COUNT_END in end or frames.TIME_END in end:
            self._tail = b""
            self._fan.begin(timed=frames.TIME_END in end)

    def _time(self, data: bytes) -> None:
        # A heartbeat, or a read that ends inside a frame, has no time.
        with suppress(ValueError):
            self._fan.latencies_ns.append(time.monotonic_ns() - frames.sent_ns(data))


async def _read() -> None:
    fan = Fan()
    async for command in commands():
        async with asyncio.timeout(STEP_TIMEOUT_S):
            if command.do == "open":
                assert command.where is not None, "has an address"
                await fan.open(command.where, command.streams)
                answer(Command("opened"))
            else:
                answer(fan.report())


if __name__ == "__main__":
    uvloop.run(_read())
